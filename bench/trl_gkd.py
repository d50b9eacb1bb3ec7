"""Distillation side by side with trl's: GKD on given answers, GKD and DistillationTrainer on the drafter's own.

    python bench/trl_gkd.py --install                             trl into .venv-trl (pip, some minutes), then measure
    python bench/trl_gkd.py --environment ~/venvs/trl             an environment that holds torch and trl
    python bench/trl_gkd.py --rounds 2                            a quick look

SmolLM2 teaches its own first four layers, full vocabulary, float32, forward KL at temperature 1 over the answers' tokens,
AdamW over all weights. The shipped training prompts are answered by the target once; all contenders then get the same
token ids in the same batches. Each is a process of its own. They take turns, step by step; the median is over steps,
ratios are medians over rounds. On given answers the losses of the first and the last step must agree.

trl's trainers run without gradient checkpointing, their default, which would make them slower (and GKD generate without
a cache). draftsmith also measures alpha in every eighth step; what that costs is in its figures.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _common import DEMO_TARGET, Bound, Figure, arguments, begin, load, print_figures, print_table
from _turns import Contender

from draftsmith.data.chats import encode_prompt
from draftsmith.data.sources import read_examples
from draftsmith.data.turns import render
from draftsmith.decode.batched import generate_batched
from draftsmith.decode.packed import use_backend
from draftsmith.decode.sampling import Sampling
from draftsmith.models.cut import cut_layers
from draftsmith.models.draft_lm import DraftLM, save_draft_lm
from draftsmith.models.loading import locate
from draftsmith.models.target import Target

HERE = Path(__file__).parent
GKD, DISTILLATION, ROLLOUTS = "trl GKD, lmbda=1", "trl DistillationTrainer", "draftsmith, rollouts: drafter"
GKD_GIVEN, UNCACHED, CACHED = "trl GKD, lmbda=0", "draftsmith, uncached", "draftsmith, cache: hidden"
ALPHA_EVERY = 8  # steps of which one measures alpha
SAME_LOSS = 1e-3  # relative: float32 sums in another order, weights after some steps


def prepare(options: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """The drafter's folder and the file of examples."""
    target = load(options.target)
    layers = list(range(options.layers))
    save_draft_lm(
        DraftLM(cut_layers(target.model, layers)),
        folder / "drafter",
        target_name=options.target,
        tokenizer=target.tokenizer,
    )
    use_backend(target.model, "packed")
    data = folder / "examples.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for example in answered(target, options):
            file.write(json.dumps(example) + "\n")
    return folder / "drafter", data


def answered(target: Target, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Whole batches of prompts with the target's answers, as text and as token ids."""
    tokenizer: Any = target.tokenizer
    room = options.length - options.answer_tokens
    found: list[tuple[str, list[int]]] = []
    for example in read_examples("shipped"):
        ids = encode_prompt(tokenizer, example.turns[:1])
        if len(ids) <= room and len(found) < options.limit:
            messages = [{"role": "user", "content": example.turns[0]}]
            text = render(tokenizer, messages, add_generation_prompt=True)
            assert tokenizer(text).input_ids == ids  # as trl will read it
            found.append((text, ids))
    prompts = [ids for _, ids in found[: len(found) // options.batch_size * options.batch_size]]
    written = generate_batched(
        target, prompts, max_new_tokens=options.answer_tokens, sampling=Sampling(0.7), batch_size=options.batch_size
    )
    answers = {answer.index: answer.tokens for answer in written}
    return [
        {"prompt": found[i][0], "input_ids": ids + answers[i], "prompt_length": len(ids)}
        for i, ids in enumerate(prompts)
    ]


def install(environment: Path) -> None:
    """Make an environment with this torch and the latest trl."""
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"torch=={torch.__version__.split('+')[0]}"], check=True)
    subprocess.run([*pip, "trl"], check=True)


def start(name: str, options: argparse.Namespace, folder: Path, models: tuple[Path, Path], **how: Any) -> Contender:
    """Start one contender and wait until it is ready."""
    ours = name.startswith("draftsmith")
    scratch = folder / name.replace(" ", "_").replace(",", "").replace(":", "")
    settings = {
        "target": locate(options.target),
        "drafter": str(models[0]),
        "data": str(models[1]),
        "scratch": str(scratch),
        "threads": options.threads,
        "batch_size": options.batch_size,
        "length": options.length,
        "max_new_tokens": options.max_new_tokens,
        "learning_rate": 1e-4,
        "betas": [0.9, 0.95],
        **how,
    }
    python = sys.executable if ours else str(options.environment / "bin" / "python")
    script = HERE / ("_draftsmith_side.py" if ours else "_trl_side.py")
    environment = {"OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads)}
    return Contender(name, [python, str(script)], settings, scratch.with_suffix(".log"), environment)


def race(contenders: list[Contender], rounds: int) -> dict[str, float]:
    """Every contender takes a step to warm up, one that measures alpha and `rounds` more; peak memory of each."""
    for turn in range(rounds + 2):
        shift = turn % len(contenders)
        for contender in contenders[shift:] + contenders[:shift]:
            contender.take(ALPHA_EVERY - 1 + turn)
    return {contender.name: contender.stop() for contender in contenders}


def seconds(contender: Contender) -> float:
    """A step's, median; draftsmith's with its share of a step that measures alpha."""
    return statistics.median(turn.seconds for turn in contender.turns[2:]) * alpha_cost(contender)


def cpu_seconds(contender: Contender) -> float:
    """The same, as all its threads worked."""
    return statistics.median(turn.cpu_seconds for turn in contender.turns[2:]) * alpha_cost(contender)


def alpha_cost(contender: Contender) -> float:
    """What measuring alpha now and then makes of a step's time; 1 for those that do not."""
    if not contender.name.startswith("draftsmith"):
        return 1.0
    per_token = [turn.cpu_seconds / turn.supervised for turn in contender.turns[1:]]
    return 1 + max(0.0, per_token[0] / statistics.median(per_token[1:]) - 1) / ALPHA_EVERY


def rate(contender: Contender) -> float:
    """Supervised tokens a second, median."""
    return statistics.median(t.supervised / t.seconds for t in contender.turns[2:]) / alpha_cost(contender)


def speed_up(mine: Contender, other: Contender) -> float:
    """Rate over the other's, median over rounds."""
    pairs = zip(mine.turns[2:], other.turns[2:], strict=True)
    ratios = [(a.supervised / a.seconds) / (b.supervised / b.seconds) for a, b in pairs]
    return statistics.median(ratios) / alpha_cost(mine)


def table(title: str, contenders: list[Contender], peaks: dict[str, float], given: bool) -> None:
    """What every contender did."""
    rows = []
    for contender in contenders:
        first, last = contender.turns[0], contender.turns[-1]
        losses = [f"{first.loss:.6f}", f"{last.loss:.6f}"] if given else []
        supervised = statistics.mean(turn.supervised for turn in contender.turns)
        cells = [
            f"{seconds(contender):.2f}",
            f"{cpu_seconds(contender):.2f}",
            f"{supervised:.0f}",
            f"{rate(contender):.0f}",
        ]
        rows.append([contender.name, *cells, f"{peaks[contender.name]:.0f}", *losses])
    losses = ["first loss", "last loss"] if given else []
    print_table(title, ["", "s a step", "CPU s", "supervised", "a second", "peak MiB", *losses], rows)


def check_same_work(contenders: list[Contender]) -> None:
    """All of them must have had the same loss over the same number of tokens in every step."""
    first = contenders[0]
    for other in contenders[1:]:
        for step, (a, b) in enumerate(zip(first.turns, other.turns, strict=True)):
            if a.supervised != b.supervised or abs(a.loss - b.loss) > SAME_LOSS * abs(a.loss):
                raise SystemExit(f"step {step}: {first.name} {a}, {other.name} {b}: not the same work")
    differences = [
        abs(a.loss / b.loss - 1) for other in contenders[1:] for a, b in zip(first.turns, other.turns, strict=True)
    ]
    print(f"same work: equal counts of supervised tokens, losses of all steps agree to {max(differences):.1g}")


def given_answers(options: argparse.Namespace, folder: Path, models: tuple[Path, Path], what: str) -> None:
    """Answers that are there before training."""
    contenders = [
        start(GKD_GIVEN, options, folder, models, trainer="gkd", on_policy=False),
        start(UNCACHED, options, folder, models, rollouts=False, cache=False),
        start(CACHED, options, folder, models, rollouts=False, cache=True),
    ]
    theirs, uncached, cached = contenders
    print(f"against: {theirs.facts['versions']}", flush=True)
    try:
        peaks = race(contenders, options.rounds)
    finally:
        for contender in contenders:
            contender.kill()
    table(f"given answers: {what}", contenders, peaks, given=True)
    check_same_work(contenders)
    print(f"writing the cache, once: {cached.facts['seconds_to_cache']:.1f} s")
    figures = [
        Figure("supervised tokens a second, uncached / GKD", speed_up(uncached, theirs), Bound(1.5)),
        Figure("supervised tokens a second, cached / GKD", speed_up(cached, theirs), Bound(2.5)),
        Figure("peak memory, uncached / GKD", peaks[UNCACHED] / peaks[GKD_GIVEN], Bound(0.6, False)),
        Figure("peak memory, cached / GKD", peaks[CACHED] / peaks[GKD_GIVEN], Bound(0.6, False)),
    ]
    print_figures("given answers, ratios", figures)


def own_answers(options: argparse.Namespace, folder: Path, models: tuple[Path, Path], what: str) -> None:
    """Answers that the drafter writes in every step."""
    contenders = [
        start(GKD, options, folder, models, trainer="gkd", on_policy=True),
        start(DISTILLATION, options, folder, models, trainer="distillation", on_policy=True),
        start(ROLLOUTS, options, folder, models, rollouts=True, cache=False),
    ]
    gkd, distillation, mine = contenders
    try:
        peaks = race(contenders, options.rounds)
    finally:
        for contender in contenders:
            contender.kill()
    table(f"on-policy, {options.max_new_tokens} new tokens: {what}", contenders, peaks, given=False)
    figures = [
        Figure("seconds a step / GKD's", _slow_down(mine, gkd), Bound(0.7, False)),
        Figure("seconds a step / DistillationTrainer's", _slow_down(mine, distillation), Bound(1.0, False)),
        Figure("peak memory / GKD's", peaks[ROLLOUTS] / peaks[GKD]),
        Figure("peak memory / DistillationTrainer's", peaks[ROLLOUTS] / peaks[DISTILLATION]),
    ]
    print_figures("on-policy, ratios", figures)


def _slow_down(mine: Contender, other: Contender) -> float:
    pairs = zip(mine.turns[2:], other.turns[2:], strict=True)
    return statistics.median(a.seconds / b.seconds for a, b in pairs) * alpha_cost(mine)


def parse_options() -> argparse.Namespace:
    parser = arguments(__doc__, rounds=6, limit=32)
    parser.add_argument("--environment", type=Path, default=Path(".venv-trl"), help="folder of trl's environment")
    parser.add_argument("--install", action="store_true", help="make it, or bring its trl up to date, first")
    parser.add_argument("--target", default=DEMO_TARGET, help="hub id, folder or .gguf")
    parser.add_argument("--layers", type=int, default=4, help="of the target, that the drafter begins with")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="most tokens of prompt and answer together")
    parser.add_argument("--answer-tokens", type=int, default=128, help="most tokens of a given answer")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an answer of the drafter")
    parser.add_argument("--part", choices=("given", "on-policy", "both"), default="both")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.install:
        install(options.environment)
    if not (options.environment / "bin" / "python").exists():
        raise SystemExit(f"{options.environment}: no environment with trl; --install makes it")
    begin(options)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="draftsmith-bench-") as scratch:
        folder = Path(scratch)
        models = prepare(options, folder)
        gc.collect()
        what = (
            f"{options.target} -> its first {options.layers} layers, batch {options.batch_size}, at most "
            f"{options.length} tokens, float32, {options.rounds} rounds"
        )
        if options.part != "on-policy":
            given_answers(options, folder, models, what)
        if options.part != "given":
            own_answers(options, folder, models, what)


if __name__ == "__main__":
    main()
