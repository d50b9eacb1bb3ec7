"""Data made while training: who makes it, and the buffer that steps draw from.

On-policy (GKD, arXiv:2306.13649; DistillSpec, arXiv:2310.08461): the drafter being trained answers prompts, and the target
says what it would have said at every position. The other source, the decoder that serves with the drafter, is in
:mod:`.online`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ..data.batches import epoch_order
from ..data.chats import Encoded, encode_response
from ..decode.batched import generate_batched
from ..decode.packed import unpack, use_backend
from ..decode.sampling import Sampling
from ..decode.streams import mix
from ..models.draft_lm import DraftLM
from ..models.target import Target


class Rollout(NamedTuple):
    """One answer made while training."""

    encoded: Encoded
    # The target's hidden states, where decoding has computed them: the last ones, from which labels are predicted, or by
    # layer those of all positions but the last.
    hidden: Float[Tensor, "labels hidden"] | dict[int, Float[Tensor, "positions hidden"]] | None
    born: int  # the step it was made in


@runtime_checkable
class Source(Protocol):
    """Makes rollouts for prompts with the drafter as it is now."""

    def __call__(self, prompts: Sequence[list[int]], seed: int, step: int) -> list[Rollout]: ...


def readable_length(target: Target, lm: DraftLM | None = None) -> int | None:
    """Tokens, prompt and answer together, that the target and a draft model were both made for; None: any number."""
    configs = [target.model.config, *([] if lm is None else [lm.config])]
    limits = [getattr(config.get_text_config(), "max_position_embeddings", None) for config in configs]
    return min((limit for limit in limits if limit is not None), default=None)


class DrafterAnswers:
    """The drafter answers, batched and with a cache; the target will be asked about its words by the teacher."""

    def __init__(self, lm: DraftLM, target: Target, sampling: Sampling, max_new_tokens: int, batch_size: int):
        self.lm, self.target = lm, target
        self.sampling, self.max_new_tokens, self.batch_size = sampling, max_new_tokens, batch_size
        self.longest = readable_length(target, lm)

    def __call__(self, prompts: Sequence[list[int]], seed: int, step: int) -> list[Rollout]:
        """One answer a prompt, in the order of the prompts, each of which must leave room for one."""
        was_training = self.lm.training
        self.lm.eval()
        use_backend(self.lm, "packed")  # the weights have changed since the last time, and packing them is cheap
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        rooms = [self.max_new_tokens if self.longest is None else self.longest - len(prompt) for prompt in prompts]
        found: dict[int, Rollout] = {}
        for row in generate_batched(
            self.lm,
            [prompts[i] for i in order],
            max_new_tokens=min(self.max_new_tokens, max(rooms)),
            sampling=self.sampling,
            eos_token_ids=self.target.eos_token_ids,
            batch_size=self.batch_size,
            seed=seed,
            indices=order,
        ):
            prompt = prompts[row.index]
            encoded = encode_response(prompt + row.tokens[: rooms[row.index]], len(prompt))
            found[row.index] = Rollout(encoded, None, step)
        unpack(self.lm)
        self.lm.train(was_training)
        return [found[i] for i in range(len(prompts))]


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
        answer_length: int = 0,
    ):
        """`prompts` (at least one) are taken in an order of their own in every pass over them. `replay`: older rollouts may
        be drawn again until the buffer is full (online); else each is used once. `answer_length`: what an answer is taken
        to have, in tokens, before any is known.
        """
        self.source, self.prompts, self.answer_length = source, prompts, answer_length
        self.tokens_per_step, self.staleness, self.size = tokens_per_step, staleness, size
        self.replay, self.seed = replay, seed
        self.rollouts: list[Rollout] = []
        self.refills = 0
        self.position = 0  # of the next prompt in the stream, which goes over the prompts again and again
        self.refilled_at = -1
        self.made_length: float | None = None  # mean tokens of the rollouts that were made last
        self.owed = 0  # tokens that steps so far had too few, or too many where it is negative

    def take(self, step: int) -> list[Rollout]:
        """Rollouts for this step, at least one: about `tokens_per_step` tokens, and as many a step over a run."""
        if self.refilled_at < 0 or step - self.refilled_at > self.staleness:
            self._refill(step)
        wanted = self.tokens_per_step + self.owed
        share = wanted
        if not self.replay:  # what there is has to do until the next refill
            share = min(wanted, sum(map(_length, self.rollouts)) / (self.staleness + 1 - (step - self.refilled_at)))
        taken: list[int] = []
        tokens = 0
        for i in torch.randperm(len(self.rollouts), generator=self._generator(step)).tolist():
            length = _length(self.rollouts[i])
            if taken and tokens + length / 2 > share:
                break
            taken.append(i)
            tokens += length
        # Within a step's worth: one endless answer should not starve the steps after it.
        self.owed = max(-self.tokens_per_step, min(wanted - tokens, self.tokens_per_step))
        chosen = [self.rollouts[i] for i in taken]
        if not self.replay:
            used = set(taken)
            self.rollouts = [rollout for i, rollout in enumerate(self.rollouts) if i not in used] or self.rollouts
        return chosen

    def _refill(self, step: int) -> None:
        # Replayed rollouts serve many steps: the stream brings one step's worth at a time.
        steps = 1 if self.replay else self.staleness + 1
        count = min(self.size, max(1, round((steps * self.tokens_per_step + self.owed) / self._mean_length())))
        made = self.source(self._next_prompts(count), mix(self.seed, self.refills), step)
        self.refills += 1
        self.refilled_at = step
        self.made_length = sum(map(_length, made)) / len(made)
        self.rollouts = [*self.rollouts, *made][-self.size :] if self.replay else made

    def _next_prompts(self, count: int) -> list[list[int]]:
        found, number = [], len(self.prompts)
        while len(found) < count:
            epoch, index = divmod(self.position, number)
            order = epoch_order(number, self.seed, epoch)[index : index + count - len(found)]
            found += [self.prompts[i] for i in order]
            self.position += len(order)
        return found

    def _mean_length(self) -> float:
        if self.made_length is not None:
            return self.made_length
        return sum(map(len, self.prompts)) / len(self.prompts) + self.answer_length

    def _generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(mix(self.seed + 1, step))

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on with the same rollouts."""
        return {
            "refills": self.refills,
            "position": self.position,
            "refilled_at": self.refilled_at,
            "made_length": self.made_length,
            "owed": self.owed,
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
        self.refilled_at, self.made_length = int(state_dict["refilled_at"]), state_dict["made_length"]
        self.owed = int(state_dict["owed"])
        self.rollouts = [
            Rollout(Encoded(list(kept["input_ids"]), list(kept["loss_mask"])), kept["hidden"], int(kept["born"]))
            for kept in state_dict["rollouts"]
        ]


def _length(rollout: Rollout) -> int:
    return len(rollout.encoded.input_ids)
