"""Data made while training: the drafter's own answers (on-policy), or what the served decoder verifies (online).

On-policy (GKD, arXiv:2306.13649; DistillSpec, arXiv:2310.08461): the drafter being trained answers prompts, and the target
says what it would have said at every position. Online (OSD, arXiv:2310.07177): the decoder serves a stream of prompts with
the drafter, and the hidden states of its verification passes, which hold the target's distribution at every emitted position
whether its draft token was accepted or rejected, become the signal: the target runs no second time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..data.chats import Encoded, encode_response
from ..decode.batched import generate_batched
from ..decode.draft import Accepted, Drafter, TargetOutputs
from ..decode.loop import decode_steps
from ..decode.packed import unpack, use_backend
from ..decode.prompts import pad_rows
from ..decode.sampling import Sampling
from ..decode.streams import mix
from ..models.draft_lm import DraftLM
from ..models.target import Target


class Rollout(NamedTuple):
    """One answer made while training."""

    encoded: Encoded
    hidden: Float[Tensor, "labels hidden"] | None  # the target's, where decoding has computed them
    born: int  # the step it was made in


@runtime_checkable
class Source(Protocol):
    """Makes rollouts for prompts with the drafter as it is now."""

    def __call__(self, prompts: Sequence[list[int]], seed: int, step: int) -> list[Rollout]: ...


class DrafterAnswers:
    """The drafter answers, batched and with a cache; the target will be asked about its words by the teacher."""

    def __init__(self, lm: DraftLM, target: Target, sampling: Sampling, max_new_tokens: int, batch_size: int):
        self.lm, self.target = lm, target
        self.sampling, self.max_new_tokens, self.batch_size = sampling, max_new_tokens, batch_size

    def __call__(self, prompts: Sequence[list[int]], seed: int, step: int) -> list[Rollout]:
        """One answer a prompt, in the order of the prompts."""
        was_training = self.lm.training
        self.lm.eval()
        use_backend(self.lm, "packed")  # the weights have changed since the last time, and packing them is cheap
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        found: dict[int, Rollout] = {}
        for row in generate_batched(
            self.lm,
            [prompts[i] for i in order],
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            eos_token_ids=self.target.eos_token_ids,
            batch_size=self.batch_size,
            seed=seed,
            indices=order,
        ):
            encoded = encode_response(prompts[row.index] + row.tokens, len(prompts[row.index]))
            found[row.index] = Rollout(encoded, None, step)
        unpack(self.lm)
        self.lm.train(was_training)
        return [found[i] for i in range(len(prompts))]


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
        served: Callable[[int, float], None],
    ):
        """`module`: the drafter's trainable module. ``served(step, block_efficiency)`` is told how each batch went."""
        self.target, self.drafter, self.module = target, drafter, module
        self.sampling, self.max_new_tokens = sampling, max_new_tokens
        self.num_speculative_tokens, self.served = num_speculative_tokens, served

    def __call__(self, prompts: Sequence[list[int]], seed: int, step: int) -> list[Rollout]:
        """Serve the prompts side by side."""
        was_training = self.module.training
        self.module.eval()
        recorder = _Recorder(self.drafter)
        answers: list[list[int]] = [[] for _ in prompts]
        stats = None
        for served in decode_steps(
            self.target,
            recorder,
            pad_rows([list(prompt) for prompt in prompts], self.target),
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            num_speculative_tokens=self.num_speculative_tokens,
            seed=[mix(seed, i) for i in range(len(prompts))],
        ):
            stats = served.stats
            for answer, new in zip(answers, served.tokens, strict=True):
                answer.extend(new)
        self.module.train(was_training)
        if stats is not None and stats.block_efficiency is not None:
            self.served(step, stats.block_efficiency)
        return [
            Rollout(encode_response(list(prompt) + answer, len(prompt)), torch.cat(hidden).to(torch.float16), step)
            for prompt, answer, hidden in zip(prompts, answers, recorder.hidden, strict=True)
            if answer
        ]


class _Recorder:
    """A drafter that also keeps the hidden states from which the target judged every emitted token."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        wanted = getattr(drafter, "wants", None) or {}
        self._layers = list(wanted.get("hidden_states", ()))
        self.wants = {**wanted, "hidden_states": [*self._layers, *([] if -1 in self._layers else [-1])]}
        self.hidden: list[list[Tensor]] = []

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Forget what was kept."""
        self.hidden = [[] for _ in range(input_ids.shape[0])]
        self.drafter.start(input_ids, attention_mask)

    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Any:
        """The drafter's own."""
        return self.drafter.propose(num_tokens, sampling, generators)

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Keep the states at the newest token and at the accepted nodes: each predicted one emitted token."""
        assert target_outputs is not None
        states = target_outputs.hidden_states[-1]
        if target_outputs.logits is not None:  # not the prefill
            fed = torch.nn.functional.pad(accepted.path + 1, (1, 0)).clamp(min=0)
            for row, count in enumerate(accepted.host_lengths):
                if count:
                    self.hidden[row].append(states[row, fed[row, :count]])
        if getattr(self.drafter, "wants", None):
            self.drafter.observe(accepted, target_outputs)
        elif target_outputs.logits is not None:
            self.drafter.observe(accepted, None)


class RolloutBuffer:
    """Rollouts for the coming steps. Refilled when its newest are older than `staleness` steps; bounded in size."""

    def __init__(
        self,
        source: Source,
        prompts: Sequence[list[int]],
        *,
        tokens_per_step: int,
        staleness: int,
        size: int,
        replay: bool,
        seed: int,
    ):
        """`replay`: older rollouts may be drawn again until the buffer is full (online); else each is used once."""
        self.source, self.prompts = source, prompts
        self.tokens_per_step, self.staleness, self.size, self.replay, self.seed = (
            tokens_per_step,
            staleness,
            size,
            replay,
            seed,
        )
        self.rollouts: list[Rollout] = []
        self.refills = 0
        self.position = 0  # of the next prompt in the stream
        self.refilled_at = -1

    def take(self, step: int) -> list[Rollout]:
        """Rollouts of about `tokens_per_step` tokens for this step."""
        if self.refilled_at < 0 or step - self.refilled_at > self.staleness:
            self._refill(step)
        order = torch.randperm(len(self.rollouts), generator=self._generator(step)).tolist()
        taken: list[int] = []
        tokens = 0
        for i in order:
            length = len(self.rollouts[i].encoded.input_ids)
            if taken and tokens + length > self.tokens_per_step:
                break
            taken.append(i)
            tokens += length
        chosen = [self.rollouts[i] for i in taken]
        if not self.replay and self.staleness:
            self.rollouts = [rollout for i, rollout in enumerate(self.rollouts) if i not in set(taken)] or self.rollouts
        return chosen

    def _refill(self, step: int) -> None:
        mean = self._mean_length()
        # Replayed rollouts serve many steps: the stream brings one step's worth at a time.
        steps = 1 if self.replay else self.staleness + 1
        count = min(self.size, max(1, round(steps * self.tokens_per_step / mean)))
        prompts = [self.prompts[(self.position + i) % len(self.prompts)] for i in range(count)]
        self.position = (self.position + count) % len(self.prompts)
        made = self.source(prompts, mix(self.seed, self.refills), step)
        self.refills += 1
        self.refilled_at = step
        self.rollouts = [*self.rollouts, *made][-self.size :] if self.replay else made

    def _mean_length(self) -> float:
        if self.rollouts:
            return sum(len(rollout.encoded.input_ids) for rollout in self.rollouts) / len(self.rollouts)
        return 2.0 * sum(map(len, self.prompts)) / len(self.prompts)

    def _generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(mix(self.seed + 1, step))

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on with the same rollouts."""
        return {
            "refills": self.refills,
            "position": self.position,
            "refilled_at": self.refilled_at,
            "rollouts": [
                {
                    "input_ids": list(rollout.encoded.input_ids),
                    "loss_mask": list(rollout.encoded.loss_mask),
                    "hidden": rollout.hidden,
                    "born": rollout.born,
                }
                for rollout in self.rollouts
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on from there."""
        self.refills, self.position = int(state_dict["refills"]), int(state_dict["position"])
        self.refilled_at = int(state_dict["refilled_at"])
        self.rollouts = [
            Rollout(Encoded(list(kept["input_ids"]), list(kept["loss_mask"])), kept["hidden"], int(kept["born"]))
            for kept in state_dict["rollouts"]
        ]
