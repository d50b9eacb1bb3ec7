"""Rollouts of the decoder that serves (OSD, arXiv:2310.07177): what it answers, and what the target said while it verified.

The hidden states of a verification pass hold the target's distribution at every emitted position, whether its draft token was
accepted or rejected. They become the signal, so that the target does not run a second time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ..data.chats import encode_response
from ..data.store import as_stored, state_dtype
from ..decode.draft import Accepted, Drafter, TargetOutputs, wants
from ..decode.draft_model import DraftModel
from ..decode.loop import decode_steps
from ..decode.packed import unpack, use_backend
from ..decode.prompts import pad_rows
from ..decode.sampling import Sampling
from ..decode.stats import RowStats, Stats
from ..decode.streams import mix
from ..models.target import Target
from .rollouts import Rollout, readable_length


class OnlineStream:
    """The decoder serves prompts with the drafter and keeps what verification computed."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        module: torch.nn.Module,
        sampling: Sampling,
        max_new_tokens: int,
        num_speculative_tokens: int,
        batch_size: int,
        layers: Sequence[int] | None = None,
    ):
        """`module` is trained. `layers`: hidden states to keep at every position but the last, as transformers counts them
        from 0; None: the last ones where labels are predicted; none of them: nothing.
        """
        self.target, self.drafter, self.module = target, drafter, module
        self.sampling, self.max_new_tokens, self.batch_size = sampling, max_new_tokens, batch_size
        self.num_speculative_tokens, self.layers = num_speculative_tokens, layers
        self.longest = readable_length(target, drafter.lm if isinstance(drafter, DraftModel) else None)
        self.told: Callable[[RowStats], None] = lambda counts: None  # is told how every call went

    def __call__(self, prompts: Sequence[list[int]], seed: int, step: int) -> list[Rollout]:
        """Serve the prompts, `batch_size` side by side; each must leave room for an answer."""
        was_training = self.module.training
        self.module.eval()
        lm = self.drafter.lm if isinstance(self.drafter, DraftModel) else None
        if lm is not None:
            use_backend(lm, "packed")  # the weights have changed since the last time
        rollouts: list[Rollout] = []
        served: list[RowStats] = []
        for first in range(0, len(prompts), self.batch_size):
            batch = prompts[first : first + self.batch_size]
            seeds = [mix(seed, first + i) for i in range(len(batch))]
            made, stats = self._serve([list(prompt) for prompt in batch], seeds, step)
            rollouts += made
            served += stats.rows
        if lm is not None:
            unpack(lm)
        self.module.train(was_training)
        self.told(Stats(served).pooled)
        return rollouts

    def _serve(self, prompts: list[list[int]], seeds: list[int], step: int) -> tuple[list[Rollout], Stats]:
        last_alone = self.layers is None
        layers = (self.target.num_layers,) if self.layers is None else tuple(self.layers)
        recorder = Recorder(self.drafter, layers, everywhere=not last_alone) if layers else None
        answers: list[list[int]] = [[] for _ in prompts]
        stats = Stats([])
        for served in decode_steps(
            self.target,
            recorder or self.drafter,
            pad_rows(prompts, self.target),
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            num_speculative_tokens=self.num_speculative_tokens,
            seed=seeds,
        ):
            stats = served.stats
            for answer, new in zip(answers, served.tokens, strict=True):
                answer.extend(new)
        rollouts = []
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            answer = answer[: None if self.longest is None else self.longest - len(prompt)]
            hidden = None
            if recorder is not None:
                dtype = torch.float16 if last_alone else state_dtype(self.target.dtype)
                positions = len(answer) + (0 if last_alone else len(prompt) - 1)
                kept = recorder.recorded(row)
                states = {n: as_stored(f"hidden states of layer {n}", kept[n][:positions], dtype) for n in kept}
                hidden = states[self.target.num_layers] if last_alone else states
            rollouts.append(Rollout(encode_response(prompt + answer, len(prompt)), hidden, step))
        return rollouts, stats


class Recorder:
    """A drafter that also keeps hidden states from which the target judged every emitted token; all else is its own."""

    def __init__(self, drafter: Drafter, layers: Sequence[int], everywhere: bool):
        """`layers` count from 0. `everywhere`: of the prompts too, but for the position of a sequence's last token."""
        self.drafter, self.layers, self.everywhere = drafter, tuple(layers), everywhere
        asked = wants(drafter)
        self.wants = {**asked, "hidden_states": list(dict.fromkeys([*asked.get("hidden_states", ()), *layers]))}
        self._kept: list[dict[int, list[Tensor]]] = []  # by row and layer, in the order of positions

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)  # what a drafter may have besides: a shared cache, trees, companions

    def recorded(self, row: int) -> dict[int, Tensor]:
        """``[positions, hidden]`` by layer."""
        return {layer: torch.cat(parts) for layer, parts in self._kept[row].items()}

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Forget what was kept."""
        self._kept = [{layer: [] for layer in self.layers} for _ in input_ids]
        self.drafter.start(input_ids, attention_mask)

    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Any:
        """The drafter's own."""
        return self.drafter.propose(num_tokens, sampling, generators)

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Keep the states at the newest token and at the accepted nodes: each predicted one emitted token."""
        assert target_outputs is not None
        after_prefill = target_outputs.logits is None
        if not after_prefill:
            fed = torch.nn.functional.pad(accepted.path.clamp(min=-1) + 1, (1, 0))
            self._keep(target_outputs, [fed[row, :count] for row, count in enumerate(accepted.host_lengths)])
        elif self.everywhere:
            self._keep(target_outputs, [slice(count) for count in target_outputs.valid.sum(1).tolist()])
        if wants(self.drafter):
            self.drafter.observe(accepted, target_outputs)
        elif not after_prefill:
            self.drafter.observe(accepted, None)

    def _keep(self, outputs: TargetOutputs, at: Sequence[Any]) -> None:
        for row, (kept, where) in enumerate(zip(self._kept, at, strict=True)):
            for layer in self.layers:
                kept[layer].append(outputs.hidden_states[layer][row, where])
