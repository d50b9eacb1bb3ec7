"""The target writes the data: answers to given prompts and, where asked, the prompts themselves.

Conversations are numbered and worked off in rounds of a fixed size; every one has random streams of its own, and a round is
stored as a whole. So what is written depends on the settings and the seed alone, not on where a run was interrupted.
"""

import json
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..data.sources import Example
from ..data.store import INDEX, Store, open_complete
from ..data.store_writer import StoreWriter
from ..errors import BadInput
from ..models.native import release_freed_memory
from ..models.target import Target
from ..progress import say, stage
from .answer_rounds import Amount, AnswerSettings, Rounds
from .answer_store import mend
from .author import writing_in

_PLAN = "planned.json"

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

    Under a budget in seconds the first rounds are timed; then the number of prompts is fixed and noted in
    ``folder/planned.json``, and stays what it is however often the run is interrupted. A store that is finished is opened as
    it is; a damaged shard is named and written again.

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
    plan_file = folder / _PLAN
    if job.timed and plan_file.exists():
        job.prompts = json.loads(plan_file.read_text())["prompts"]
    with writing_in(target, job.dtype) as job.author:
        if (folder / INDEX).exists():
            mend(folder, fingerprint, partial(job.again, folder=folder))
        with StoreWriter(folder, fingerprint, job.arrays()) as writer:
            _write_rounds(job, writer, plan_file)
            if not len(writer):
                raise BadInput(f"data: the target answered none of the prompts ({job.dropped_words()})")
            writer.finish()
    store = Store(folder)
    say(f"answers: {len(store):,} of {store.num_tokens:,} tokens, prompts included; {job.dropped_words()}")
    return store


def _write_rounds(job: Rounds, writer: StoreWriter, plan_file: Path) -> None:
    """Round after round until the planned number of prompts is answered."""
    # A round is stored as a whole, so its last conversation tells.
    number, planned = job.number(max(writer.done)) + 1 if writer.done else 0, not job.timed or plan_file.exists()
    job.remember(Store(writer.folder) if len(writer) else ())
    done = job.end(number - 1) if number else 0
    if done < job.prompts:
        _say_size(job)
    title, expected, spent = "the target writes and answers prompts", job.amount.seconds if job.timed else None, 0.0
    total = None if job.prompts == math.inf else int(job.prompts)
    with stage(title, total, unit="prompts", done=done, expected_seconds=expected) as bar:
        while done < job.prompts:
            start, before = time.monotonic(), done
            # All of a round or nothing: an interrupted one must not leave its first turns behind.
            writer.append_all(list(job.round(number, bar)))
            release_freed_memory()
            seconds = time.monotonic() - start
            number, done, spent = number + 1, job.end(number), spent + seconds
            if not planned and _plan(job, number, done, (done - before) / seconds, spent):
                planned, bar.total = True, int(job.prompts)
                _note(plan_file, {"prompts": bar.total})
                _say_size(job)
    left_out = len(job.examples) - job.given_before(done)
    if left_out > 0:
        say(f"{left_out:,} of {len(job.examples):,} given prompts are left out: the budget in minutes is spent")


def _say_size(job: Rounds) -> None:
    if size := job.size():
        say(size)


def _plan(job: Rounds, number: int, done: int, prompts_a_second: float, spent: float) -> bool:
    """Fix how many prompts there are, `done` of them in the rounds before `number`; False where that is too early."""
    assert job.amount.seconds is not None
    fits = done + (job.amount.seconds - spent) * prompts_a_second
    # The short first round is a rough measure: good enough only where no whole round follows it.
    if number == 1 and fits >= job.start(2):
        return False
    job.prompts = int(min(job.prompts, max(done, fits)))
    return True


def _note(file: Path, value: dict[str, int]) -> None:
    temporary = file.with_name(f".{file.name}.partial")
    temporary.write_text(json.dumps(value))
    temporary.replace(file)
