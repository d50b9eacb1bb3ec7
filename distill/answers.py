"""The target writes the data: answers to given prompts and, where asked, the prompts themselves.

Conversations are numbered and worked off in rounds of a fixed size; every one has random streams of its own, and a round is
stored as a whole. So what is written depends on the settings and the seed alone, not on where a run was interrupted.
"""

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..data.sources import Example
from ..data.store import (
    INDEX,
    ArraySpec,
    Store,
    hidden_arrays,
    open_complete,
    state_arrays,
)
from ..data.store_writer import StoreWriter
from ..errors import BadInput
from ..models.native import release_freed_memory
from ..models.target import Target
from ..progress import say, stage
from .answer_rounds import Amount, AnswerSettings, Rounds
from .answer_store import mend
from .author import writing_in

__all__ = ["Amount", "AnswerSettings", "write_answers"]


def write_answers(
    target: Target,
    examples: Sequence[Example],
    own_prompts: bool,
    settings: AnswerSettings,
    amount: Amount,
    folder: Path,
) -> Store:
    """Let the target answer `examples` (every user turn, in order) and, with `own_prompts`, prompts that it writes itself.

    Under a budget in seconds the first rounds are timed, the number of rounds is fixed and noted in ``folder/rounds.json``,
    and stays what it is however often the run is interrupted. A store that is finished is opened as it is; a damaged shard
    is named and written again.

    Raises:
        BadInput: a store made with other settings lies in `folder`; not one prompt fits; nothing was answered.
    """
    job = Rounds(target, examples, own_prompts, settings, amount)
    fingerprint = job.fingerprint()
    store = open_complete(folder, fingerprint)
    if store is not None and not store.damaged():
        say(f"answers: {len(store):,} of {store.num_tokens:,} tokens, prompts included, written before")
        return store
    job.check_openings()
    arrays: dict[str, ArraySpec] = hidden_arrays(target.hidden_size) if settings.keep_hidden else {}
    arrays |= state_arrays(settings.keep_states, target.hidden_size, job.dtype)
    with writing_in(target, job.dtype) as job.author:
        if (folder / INDEX).exists():
            mend(folder, fingerprint, partial(job.again, folder=folder))
        with StoreWriter(folder, fingerprint, arrays) as writer:
            _write_rounds(job, writer, folder / "rounds.json")
            if not len(writer):
                raise BadInput(f"data: the target answered none of the prompts ({job.dropped_words()})")
            writer.finish()
    store = Store(folder)
    say(f"answers: {len(store):,} of {store.num_tokens:,} tokens, prompts included; {job.dropped_words()}")
    return store


def _write_rounds(job: Rounds, writer: StoreWriter, plan_file: Path) -> None:
    """Round after round until the planned number is written."""
    size, most, budget = job.round_size, job.most_rounds, job.amount.seconds
    first = max(writer.done, default=-1) // size + 1  # a round is stored as a whole, so its last number tells
    job.remember(Store(writer.folder) if len(writer) else ())
    timed = budget is not None and job.amount.own_prompts is None
    planned = json.loads(plan_file.read_text())["rounds"] if plan_file.exists() else None if timed else most
    seconds: list[float] = []
    title, expected = "the target writes and answers prompts", budget if timed else None
    if planned is None or first < planned:
        job.say_size(writer.arrays, planned)
    total, done = None if planned is None else job.prompts_before(planned), job.prompts_before(first)
    with stage(title, total, unit="prompts", done=done, expected_seconds=expected) as bar:
        number = first
        while number < (most if planned is None else planned):
            start = time.monotonic()
            # All of a round or nothing: an interrupted one must not leave its first turns behind.
            writer.append_all(list(job.round(number, bar)))
            release_freed_memory()
            number += 1
            seconds.append(time.monotonic() - start)
            if planned is None and number >= 2:
                assert budget is not None
                fits = first + round(budget / (sum(seconds) / len(seconds)))
                planned = int(min(most, max(number, fits)))
                _note(plan_file, {"rounds": planned, "prompts_per_round": size})
                job.say_size(writer.arrays, planned)
                bar.total = job.prompts_before(planned)
    left_out = len(job.examples) - job.given_before(number)
    if left_out > 0:
        say(f"{left_out:,} of {len(job.examples):,} given prompts are left out: the budget in minutes is spent")


def _note(file: Path, value: dict[str, int]) -> None:
    temporary = file.with_name(f".{file.name}.partial")
    temporary.write_text(json.dumps(value))
    temporary.replace(file)
