"""Peak extra memory and time of the chunked distillation loss against the plain one, forward and backward.

    python bench/chunked_loss.py                                  vocabulary 262144, hidden 640, 2048 positions
    python bench/chunked_loss.py --vocab 49152 --tokens 512       something smaller

Plain is what one writes first: both heads over all positions, the divergence, autograd. Memory is the growth of a fresh
process's largest resident size over one forward and backward (the head's gradient included), one process a version.
Times are medians of interleaved runs in one process.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.distill.chunked import DraftHead, chunked_loss
from draftsmith.distill.chunked_targets import TargetHidden
from draftsmith.distill.mixture import parse_mixture

VERSIONS = ("plain", "chunked")
SIZE = (262_144, 640, 2048)  # vocabulary, hidden size, supervised positions
MEMORY_BOUND, TIME_BOUND = 0.10, 1.1  # shares of the plain version that the chunked one may take at that size


class Inputs(NamedTuple):
    """Random hidden states and heads, scaled so that distributions are peaked as a language model's are."""

    draft_hidden: Tensor
    draft_weight: Tensor
    target_hidden: Tensor
    target_weight: Tensor


def make_inputs(options: argparse.Namespace) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)

    def normal(rows: int, std: float) -> Tensor:
        return torch.randn(rows, options.hidden, generator=generator, dtype=dtype).mul_(std)

    std = 2.0 / options.hidden**0.5
    return Inputs(
        normal(options.tokens, 1.0).requires_grad_(),
        normal(options.vocab, std).requires_grad_(not options.frozen_head),
        normal(options.tokens, 1.0),
        normal(options.vocab, std),
    )


def plain(inputs: Inputs, options: argparse.Namespace) -> Tensor:
    with torch.no_grad():
        target_logits = inputs.target_hidden @ inputs.target_weight.t()
    draft_logits = inputs.draft_hidden @ inputs.draft_weight.t()
    loss = parse_mixture(options.loss)(draft_logits, target_logits).sum()
    loss.backward()
    return loss.detach()


def chunked(inputs: Inputs, options: argparse.Namespace) -> Tensor:
    loss = chunked_loss(
        parse_mixture(options.loss),
        inputs.draft_hidden,
        DraftHead(inputs.draft_weight),
        TargetHidden(inputs.target_hidden, lambda hidden: hidden @ inputs.target_weight.t()),
        chunk_tokens=options.chunk_tokens,
        metrics=options.metrics,
    ).sum
    loss.backward()
    return loss.detach()


RUN: dict[str, Callable[[Inputs, argparse.Namespace], Tensor]] = {"plain": plain, "chunked": chunked}


def clear_gradients(inputs: Inputs) -> None:
    for tensor in inputs:
        tensor.grad = None


def peak_memory(options: argparse.Namespace) -> float:
    """MiB that this process grew by over one forward and backward."""
    inputs = make_inputs(options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    RUN[options.peak_of](inputs, options)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024  # Linux counts in KiB


def measure_times(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each version, and the losses, which must agree."""
    inputs = make_inputs(options)
    seconds: dict[str, list[float]] = {version: [] for version in VERSIONS}
    values: dict[str, float] = {}
    for _ in range(options.rounds):
        for version in VERSIONS:
            clear_gradients(inputs)
            start = time.perf_counter()
            values[version] = RUN[version](inputs, options).item()
            seconds[version].append(time.perf_counter() - start)
    return {version: statistics.median(seconds[version]) for version in VERSIONS}, values


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=SIZE[0])
    parser.add_argument("--hidden", type=int, default=SIZE[1])
    parser.add_argument("--tokens", type=int, default=SIZE[2], help="supervised positions")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--loss", default="forward_kl")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=3, help="interleaved timings of each version")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--frozen-head", action="store_true", help="no gradient for the drafter's head")
    parser.add_argument("--metrics", action="store_true", help="the chunked version also counts alpha and agreement")
    parser.add_argument(
        "--peak-of", choices=VERSIONS, help=argparse.SUPPRESS
    )  # a child process: print MiB, nothing else
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    if options.peak_of:
        print(peak_memory(options))
        return
    peaks = {}
    for version in VERSIONS:
        command = [sys.executable, __file__, *sys.argv[1:], "--peak-of", version]
        peaks[version] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    seconds, values = measure_times(options)
    print(
        f"{options.loss}, vocabulary {options.vocab}, hidden {options.hidden}, {options.tokens} positions, "
        f"{options.dtype}, {options.threads} threads, forward and backward"
    )
    print(f"{'version':<10}{'peak extra MiB':>16}{'seconds':>10}{'tokens/s':>10}{'mean loss':>12}")
    for version in VERSIONS:
        rate, loss = options.tokens / seconds[version], values[version] / options.tokens
        print(f"{version:<10}{peaks[version]:>16.0f}{seconds[version]:>10.2f}{rate:>10.1f}{loss:>12.6f}")
    memory, duration = peaks["chunked"] / peaks["plain"], seconds["chunked"] / seconds["plain"]
    judged = (options.vocab, options.hidden, options.tokens) == SIZE
    marks = [f" (at most {bound})" if judged else "" for bound in (MEMORY_BOUND, TIME_BOUND)]
    print(f"chunked / plain: memory {memory:.3f}{marks[0]}, time {duration:.2f}{marks[1]}")


if __name__ == "__main__":
    main()
