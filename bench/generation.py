"""Batched answers for the data stages against transformers.generate with the same batch on the same prompts.

    python bench/generation.py                                    SmolLM2, 64 of our prompts, 32 side by side
    python bench/generation.py --temperature 0                    greedy: both write the same tokens

Prompts are sorted by length for both, so that neither pays for more padding. A rate counts new tokens up to each answer's
end, not what transformers pads finished rows with.
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from _common import DEMO_TARGET, Bound, Figure, arguments, begin, encode, load, print_figures, print_table, take_turns

from draftsmith.data.sources import read_examples
from draftsmith.decode.batched import generate_batched
from draftsmith.decode.packed import use_backend
from draftsmith.decode.sampling import Sampling
from draftsmith.models.quiet import quiet
from draftsmith.models.target import Target

REQUIRED = 1.3


@dataclass
class Written:
    """Lengths of the answers of one contestant."""

    lengths: list[int] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Tokens an answer."""
        return sum(self.lengths) / len(self.lengths)


def ours(target: Target, options: argparse.Namespace, written: Written, prompts: list[list[int]]) -> float:
    """Answer everything, finished rows refilled; the number of new tokens."""
    answers = generate_batched(
        target,
        prompts,
        max_new_tokens=options.max_new_tokens,
        sampling=Sampling(options.temperature),
        batch_size=options.batch_size,
    )
    lengths = [len(answer.tokens) for answer in answers]
    written.lengths += lengths
    return sum(lengths)


def theirs(target: Target, options: argparse.Namespace, written: Written, prompts: list[list[int]]) -> float:
    """The same by transformers, batch after batch, padded on the left."""
    size = options.batch_size
    lengths: list[int] = []
    for first in range(0, len(prompts), size):
        lengths += _batch(target, options, prompts[first : first + size])
    written.lengths += lengths
    return sum(lengths)


def _batch(target: Target, options: argparse.Namespace, prompts: list[list[int]]) -> list[int]:
    width, eos = max(map(len, prompts)), list(target.eos_token_ids)
    pad = eos[0] if eos else 0
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=target.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature:
        sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
    with quiet():
        out: Any = target.model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=options.max_new_tokens,
            pad_token_id=pad,
            eos_token_id=eos or None,
            **sampling,
        )
    return [_length(row, eos) for row in out[:, width:].tolist()]


def _length(tokens: list[int], eos: list[int]) -> int:
    """Tokens up to the first EOS, which counts."""
    return next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))


def main() -> None:
    parser = arguments(__doc__, rounds=2, limit=64)
    parser.add_argument("--target", default=DEMO_TARGET, help="hub id, folder or .gguf")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.8)
    options = parser.parse_args()
    begin(options)
    torch.manual_seed(0)
    target = load(options.target)
    prompts = sorted(encode(target, read_examples("shipped", limit=options.limit)), key=len)
    packed = replace(target, model=copy.deepcopy(target.model))
    targets = {"plain": target}
    if use_backend(packed.model, "packed") == "packed":
        targets["packed"] = packed
    written = {f"{who}, {backend}": Written() for backend in targets for who in ("transformers", "draftsmith")}
    contestants: dict[str, Callable[[list[list[int]]], float]] = {}
    for backend, model in targets.items():
        contestants[f"transformers, {backend}"] = partial(theirs, model, options, written[f"transformers, {backend}"])
        contestants[f"draftsmith, {backend}"] = partial(ours, model, options, written[f"draftsmith, {backend}"])
    for work in contestants.values():
        work(prompts[:4])
    for answers in written.values():
        answers.lengths.clear()
    timings = take_turns(contestants, [prompts], options.rounds, warm_up=False)
    title = (
        f"{options.target}: {len(prompts)} prompts, {options.batch_size} side by side, at most "
        f"{options.max_new_tokens} tokens, temperature {options.temperature:g}, {options.rounds} rounds"
    )
    rows = [(name, f"{timings.rate(name):.1f}", f"{written[name].mean:.1f}") for name in contestants]
    print_table(title, ["", "tokens/s", "tokens an answer"], rows)
    figures = [
        Figure(f"draftsmith / transformers, both {backend}", ratio, Bound(REQUIRED))
        for backend in targets
        for ratio in [timings.ratio(f"draftsmith, {backend}", f"transformers, {backend}")]
    ]
    if "packed" in targets:
        ratio = timings.ratio("draftsmith, packed", "transformers, plain")
        figures.append(Figure("draftsmith, packed / transformers, plain", ratio))
    print_figures("ratios", figures)


if __name__ == "__main__":
    main()
