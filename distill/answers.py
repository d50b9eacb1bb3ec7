"""The target writes the data: answers to given prompts and, where asked, the prompts themselves.

Conversations are numbered and worked off in rounds of a fixed size; every one has random streams of its own, and a round is
stored as a whole. So what is written depends on the settings and the seed alone, not on where a run was interrupted.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..data.chats import encode_prompt, end_of_turn_ids, user_header
from ..data.sources import Example, examples_hash
from ..data.store import ArraySpec, Store, StoredSequence, hidden_arrays
from ..data.store_writer import StoreWriter
from ..data.turns import has_template, template_hash
from ..decode.batched import generate_batched
from ..decode.sampling import Sampling
from ..errors import BadInput
from ..models.target import Target
from ..models.vocabulary import tokenizer_hash
from ..progress import Stage, say, stage

_PROMPT_STREAM = 1 << 40  # keeps the random streams of written prompts apart from those of answers


class AnswerSettings(NamedTuple):
    """How prompts and answers are written."""

    sampling: Sampling
    max_new_tokens: int  # of an answer
    max_prompt_length: int  # tokens; longer prompts are dropped
    max_length: int  # tokens, prompt and answer
    batch_size: int
    seed: int
    keep_hidden: bool  # store the last hidden states that the answers were predicted from


class Amount(NamedTuple):
    """How much to write: given prompts all, and of the target's own either a number or what fits into `seconds`."""

    own_prompts: int | None = None
    seconds: float | None = None


class _Conversation(NamedTuple):
    number: int
    turns: list[str]  # the user's


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
    and stays what it is however often the run is interrupted.

    Raises:
        BadInput: a store made with other settings lies in `folder`; not one prompt fits; nothing was answered.
    """
    job = _Job(target, examples, own_prompts, settings)
    arrays: dict[str, ArraySpec] = hidden_arrays(target.hidden_size) if settings.keep_hidden else {}
    with StoreWriter(folder, job.fingerprint(), arrays, shard_bytes=2**62, flush_seconds=float("inf")) as writer:
        if not writer.complete:
            _write_rounds(job, writer, folder / "rounds.json", amount)
            if not len(writer):
                raise BadInput(f"data: the target answered none of the prompts ({job.dropped_words()})")
            writer.finish()
    store = Store(folder)
    say(f"answers: {len(store):,} of {store.num_tokens:,} tokens, prompts included; {job.dropped_words()}")
    return store


def _write_rounds(job: "_Job", writer: StoreWriter, plan_file: Path, amount: Amount) -> None:
    """Round after round until the planned number is written."""
    size = job.round_size
    first = max(writer.done, default=-1) // size + 1  # a round is stored as a whole, so its last number tells
    job.remember(writer, first)
    planned = _planned(job, plan_file, amount)
    seconds: list[float] = []
    total = None if planned is None else planned * size
    expected = amount.seconds
    with stage(
        "the target writes and answers prompts", total, unit="prompts", done=first * size, expected_seconds=expected
    ) as bar:
        number = first
        while planned is None or number < planned:
            start = time.monotonic()
            for sequence in job.round(number, bar):
                writer.append(sequence)
            writer.flush()
            number += 1
            seconds.append(time.monotonic() - start)
            if planned is None and number >= 2:
                assert amount.seconds is not None
                planned = max(number, first + round(amount.seconds / (sum(seconds) / len(seconds))))
                plan_file.write_text(json.dumps({"rounds": planned, "prompts_per_round": size}))
                bar.total = planned * size


def _planned(job: "_Job", plan_file: Path, amount: Amount) -> int | None:
    """The number of rounds, where it is known: counted out, or noted by an earlier part of this run."""
    if plan_file.exists():
        return int(json.loads(plan_file.read_text())["rounds"])
    if not job.own_prompts:
        return -(-len(job.examples) // job.round_size)
    if amount.own_prompts is not None:
        both = -(-(len(job.examples) + amount.own_prompts) // job.round_size)
        return max(both, -(-len(job.examples) // (job.round_size // 2)))  # given prompts are half of a round
    if amount.seconds is None:
        raise BadInput("data.num_self_prompts: needed for prompts 'self' unless engine.minutes is the budget")
    return None


class _Job:
    """What is to be written, and what was dropped on the way."""

    def __init__(self, target: Target, examples: Sequence[Example], own_prompts: bool, settings: AnswerSettings):
        self.target, self.settings, self.own_prompts = target, settings, own_prompts
        self.examples = list(examples)
        assert target.tokenizer is not None
        self.tokenizer: Any = target.tokenizer
        self.round_size = 4 * settings.batch_size
        self.seen: set[str] = set()
        self.dropped = {"empty or unfinished": 0, "repeated": 0, "too long": 0}

    def fingerprint(self) -> dict[str, Any]:
        """Everything the answers depend on."""
        settings = self.settings._asdict() | {"sampling": list(self.settings.sampling)}
        return {
            "target": self.target.name,
            "dtype": str(self.target.dtype),
            "tokenizer": tokenizer_hash(self.tokenizer),
            "chat_template": template_hash(self.tokenizer),
            "prompts": examples_hash(self.examples),
            "own_prompts": self.own_prompts,
            **settings,
        }

    def remember(self, writer: StoreWriter, rounds: int) -> None:
        """Know the prompts of the rounds that are stored, so that none is written twice."""
        if len(writer):
            for sequence in Store(writer.folder):
                self.seen.add(_plain(self.tokenizer.decode(sequence.input_ids[: sequence.prompt_length])))

    def round(self, number: int, bar: Stage) -> Iterator[StoredSequence]:
        """The conversations of one round, answered turn by turn."""
        waiting = self._conversations(number, bar)
        contexts: dict[int, list[dict[str, str]]] = {c.number: [] for c in waiting}
        turn = 0
        while waiting:
            prompts, kept = [], []
            for conversation in waiting:
                contexts[conversation.number].append({"role": "user", "content": conversation.turns[turn]})
                ids = encode_prompt(self.tokenizer, contexts[conversation.number])
                if self._fits(ids, first=turn == 0):
                    prompts.append(ids)
                    kept.append(conversation)
            yield from self._answer(kept, prompts, contexts, turn, bar)
            turn += 1
            waiting = [conversation for conversation in kept if len(conversation.turns) > turn]

    def dropped_words(self) -> str:
        """What became of the prompts that are not in the store."""
        return "dropped: " + ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())

    def _fits(self, ids: list[int], first: bool) -> bool:
        limit = self.settings.max_prompt_length if first else self.settings.max_length - 1
        if len(ids) <= limit:
            return True
        self.dropped["too long"] += 1
        return False

    def _conversations(self, number: int, bar: Stage) -> list[_Conversation]:
        """The prompts of a round: given ones and own ones in alternation until the given are used up."""
        size = self.round_size
        given_per_round = size // 2 if self.own_prompts else size
        start = number * given_per_round
        given = self.examples[start : start + given_per_round]
        found = [_Conversation(number * size + i, list(example.turns)) for i, example in enumerate(given)]
        if self.own_prompts:
            found += self._write_prompts(range(number * size + len(given), (number + 1) * size), bar)
        else:
            bar.advance(size - len(given))
        return [conversation for conversation in found if self._is_new(conversation, bar)]

    def _write_prompts(self, numbers: range, bar: Stage) -> list[_Conversation]:
        """The target's own user turns: sampled after the template's user header (arXiv:2406.08464)."""
        header = user_header(self.tokenizer)
        ends = sorted({*end_of_turn_ids(self.tokenizer, "user"), *self.target.eos_token_ids})
        written: dict[int, str] = {}
        templated = has_template(self.tokenizer)
        for row in generate_batched(
            self.target,
            [header] * len(numbers),
            max_new_tokens=max(1, self.settings.max_prompt_length - len(header)),
            sampling=self.settings.sampling,
            eos_token_ids=ends,
            batch_size=self.settings.batch_size,
            seed=self.settings.seed,
            indices=[_PROMPT_STREAM + n for n in numbers],
        ):
            bar.advance(0, tokens=len(row.tokens))
            text = self.tokenizer.decode(row.tokens, skip_special_tokens=True).strip()
            # A prompt that ran into the limit stops in the middle of a sentence: no user writes that. Plain text may.
            written[row.index - _PROMPT_STREAM] = text if row.ended or not templated else ""
        return [_Conversation(n, [written[n]]) for n in numbers]

    def _is_new(self, conversation: _Conversation, bar: Stage) -> bool:
        text = conversation.turns[0].strip()
        if not text:
            reason = "empty or unfinished"
        else:
            ids = encode_prompt(self.tokenizer, [{"role": "user", "content": conversation.turns[0]}])
            key = _plain(self.tokenizer.decode(ids))
            if key not in self.seen:
                self.seen.add(key)
                return True
            reason = "repeated"
        self.dropped[reason] += 1
        bar.advance(1)
        return False

    def _answer(
        self,
        conversations: list[_Conversation],
        prompts: list[list[int]],
        contexts: dict[int, list[dict[str, str]]],
        turn: int,
        bar: Stage,
    ) -> Iterator[StoredSequence]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # neighbours in length share a batch
        rows = generate_batched(
            self.target,
            [prompts[i] for i in order],
            max_new_tokens=self.settings.max_new_tokens,
            sampling=self.settings.sampling,
            batch_size=self.settings.batch_size,
            seed=self.settings.seed,
            keep_hidden=self.settings.keep_hidden,
            indices=[conversations[i].number + turn * (_PROMPT_STREAM << 1) for i in order],
        )
        by_stream = {conversations[i].number + turn * (_PROMPT_STREAM << 1): i for i in order}
        finished = []
        for row in rows:
            i = by_stream[row.index]
            number = conversations[i].number
            text = self.tokenizer.decode(row.tokens, skip_special_tokens=True)
            contexts[number].append({"role": "assistant", "content": text})
            room = self.settings.max_length - len(prompts[i])
            arrays = {} if row.hidden is None else {"hidden": row.hidden[:room]}
            ids = torch.tensor(prompts[i] + row.tokens[:room])
            finished.append(StoredSequence(ids, len(prompts[i]), arrays, number))
            bar.advance(1 if turn == 0 else 0, tokens=len(row.tokens))
        # In the order of their numbers, so that the store does not depend on which row finished first.
        yield from sorted(finished, key=lambda sequence: sequence.source)


def _plain(text: str) -> str:
    """Text as it counts for repetition: without regard to case and white space."""
    return " ".join(text.lower().split())
