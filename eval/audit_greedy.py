"""The audit of greedy decoding: the same tokens as plain decoding, and where not, whether rounding explains it."""

from collections.abc import Sequence
from typing import NamedTuple

from .audit_engine import Engine
from .audit_sampled import Finding
from .exact import logits_along, rounding


class Deviation(NamedTuple):
    """A place where an answer is not plain decoding's."""

    real: bool  # False: a tie, or so close that rounding decides
    words: str


def audit_greedy(engine: Engine, prompts: Sequence[list[int]], names: Sequence[str], *, max_new_tokens: int) -> Finding:
    """Decode every prompt with the engine and, one at a time, plainly; explain every difference."""
    seeds = [0] * len(prompts)
    answers = engine.answers(prompts, max_new_tokens, seeds, "decoding with the engine")
    plain = engine.plain(prompts, max_new_tokens, seeds, "plain decoding", alone=True)
    lines, real, rounded = [], 0, 0
    for name, prompt, answer, expected in zip(names, prompts, answers.tokens, plain.tokens, strict=True):
        if answer == expected:
            continue
        deviation = explain(engine, prompt, answer, expected, max_new_tokens)
        lines.append(f"{'FAILED ' if deviation.real else ''}{name}, {deviation.words}")
        real += deviation.real
        rounded += not deviation.real
    same = len(prompts) - real - rounded
    lines.append(answers.line)
    number = sum(map(len, answers.tokens))
    lines.append(
        f"{same} of {len(prompts)} answers ({number} tokens in all) are plain decoding's, token by token; "
        f"{rounded} differ at a tie or by rounding, {real} really"
    )
    return Finding(not real and answers.tell_something, lines, [])


def explain(
    engine: Engine, prompt: Sequence[int], answer: Sequence[int], expected: Sequence[int], max_new_tokens: int
) -> Deviation:
    """Where `answer` leaves plain decoding's, and whether all of its tokens are the target's best but for rounding.

    After a tie both answers are the target's, each in its own way: from there on the answer is judged by the target's
    logits after the answer itself.
    """
    pairs = list(zip(answer, expected, strict=False))
    start = next((i for i, (mine, other) in enumerate(pairs) if mine != other), len(pairs))
    words = ""
    if answer:
        logits = logits_along(engine.target, prompt, answer, engine.sampling)
        best = logits.amax(-1)
        behind = best - logits.gather(1, logits.new_tensor(answer).long()[:, None])[:, 0]
        for i in range(start, len(answer)):
            if float(behind[i]) == 0 and i > start:
                continue
            # Two logits are compared, and each may be off by as much.
            moved = 2 * rounding(engine.target, [*prompt, *answer[:i]])
            real = float(behind[i]) > moved
            if real or i == start:
                margin = logits[i].topk(2).values
                other = f" instead of {expected[i]}" if i == start and i < len(expected) else ""
                words += (", then " if words else "") + (
                    f"position {i}: token {answer[i]}{other}, {float(behind[i]):.2g} behind the target's best logit "
                    f"(top-2 margin {float(margin[0] - margin[1]):.2g}, rounding explains {moved:.1g}): "
                    f"{'a REAL difference' if real else 'a tie or rounding'}"
                )
            if real:
                return Deviation(True, words)
    ending = _wrong_end(engine, prompt, answer, max_new_tokens)
    if ending is not None:
        return Deviation(True, f"{words}, then it {ending}" if words else f"the answer {ending}")
    return Deviation(False, words)


def _wrong_end(engine: Engine, prompt: Sequence[int], answer: Sequence[int], max_new_tokens: int) -> str | None:
    """What is wrong with where an answer ends; None if nothing is."""
    limit = engine.target.context_limit
    room = max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt))
    first_end = next((i for i, token in enumerate(answer) if token in engine.eos), None)
    if first_end is not None and first_end + 1 < len(answer):
        return f"goes on after the end-of-sequence token at position {first_end}"
    if len(answer) > room:
        return f"has {len(answer)} tokens where {room} were allowed"
    if first_end is None and len(answer) < room:
        return f"ends after {len(answer)} tokens without an end-of-sequence token"
    return None
