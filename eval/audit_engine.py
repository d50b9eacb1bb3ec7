"""What is audited: something that generates like `speculative_generate`, and how it is asked to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..decode.loop import plain_generate, speculative_generate
from ..decode.prompts import pad_rows
from ..decode.sampling import Sampling
from ..models.target import Target
from ..progress import Stage, stage

_PLAIN_ROWS = 64  # plain answers sampled side by side: they are the ruler, whatever is being measured


class Answers(NamedTuple):
    """New tokens of every row, and what was counted on the way (zeros where the engine counts nothing)."""

    tokens: list[list[int]]
    steps: int
    drafted: int
    accepted: int

    @property
    def tell_something(self) -> bool:
        """Whether the engine drafted (or does not say)."""
        return self.drafted > 0 or not self.steps

    @property
    def line(self) -> str:
        """How much was drafted, in words: an audit of an engine that drafts nothing shows nothing."""
        if not self.steps:
            return "the engine does not say how much it drafted"
        if not self.drafted:
            return "FAILED: NOTHING WAS DRAFTED, so this says nothing about drafting"
        return (
            f"{self.drafted / self.steps:.2f} draft tokens a step, {self.accepted / self.drafted:.0%} of them accepted"
        )


@dataclass(frozen=True)
class Engine:
    """A target, a drafter, and the function under audit, which takes what `speculative_generate` takes."""

    target: Target
    drafter: Any
    sampling: Sampling
    generate: Callable[..., Any] = speculative_generate
    settings: dict[str, Any] = field(default_factory=dict)  # rule, tree, num_speculative_tokens, eos_token_id, …
    batch_size: int = 1
    show_progress: bool = False

    @property
    def eos(self) -> frozenset[int]:
        """Ids that end a row."""
        given = self.settings.get("eos_token_id")
        if given is None:
            return frozenset(self.target.eos_token_ids)
        return frozenset([given] if isinstance(given, int) else given)

    def at_temperature_zero(self) -> "Engine":
        """The same engine, decoding greedily."""
        return replace(self, sampling=self.sampling._replace(temperature=0.0))

    def answers(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int], title: str
    ) -> Answers:
        """What the engine says after every prompt, `batch_size` of them side by side."""

        def decode(ids: Any, mask: Any, **asked: Any) -> Any:
            return self.generate(self.target, self.drafter, ids, mask, **self.settings, **asked)

        return self._decoded(decode, prompts, max_new_tokens, seeds, self.batch_size, title)

    def plain(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        seeds: Sequence[int],
        title: str,
        alone: bool = False,
    ) -> Answers:
        """What plain decoding says; one row at a time where `alone`."""

        def decode(ids: Any, mask: Any, **asked: Any) -> Any:
            return plain_generate(self.target, ids, mask, eos_token_id=sorted(self.eos), **asked)

        rows = 1 if alone else max(self.batch_size, _PLAIN_ROWS)
        return self._decoded(decode, prompts, max_new_tokens, seeds, rows, title)

    def _decoded(
        self,
        decode: Callable[..., Any],
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        seeds: Sequence[int],
        rows: int,
        title: str,
    ) -> Answers:
        tokens: list[list[int]] = []
        steps = drafted = accepted = 0
        with _stage(self.show_progress, title, len(prompts)) as progress:
            for first in range(0, len(prompts), rows):
                group = pad_rows([list(prompt) for prompt in prompts[first : first + rows]], self.target)
                out = decode(
                    group.ids,
                    group.attention_mask,
                    max_new_tokens=max_new_tokens,
                    seed=list(seeds[first : first + rows]),
                    **self.sampling._asdict(),
                )
                for row, start, end in zip(out.tokens.tolist(), group.lengths, out.lengths.tolist(), strict=True):
                    tokens.append(row[start:end])
                counted = getattr(out, "stats", None)
                if counted is not None:
                    steps, drafted = steps + counted.target_calls, drafted + counted.drafted
                    accepted += counted.accepted
                progress.advance(len(group.lengths))
        return Answers(tokens, steps, drafted, accepted)


def _stage(shown: bool, title: str, total: int) -> Any:
    return stage(title, total, unit="answers") if shown else _Quiet()


class _Quiet:
    def __enter__(self) -> Stage:
        return Stage("", None, "answers", 0, None)

    def __exit__(self, *_: object) -> None:
        return None
