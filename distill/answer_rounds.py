"""The rounds that answers are written in: which prompts a round has, and what becomes of them.

Conversations are numbered, and every one has random streams of its own: a round depends on the settings, the seed and the
prompts of the rounds before it.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..data.chats import encode_prompt, end_of_turn_ids, user_header
from ..data.sources import Example, examples_hash
from ..data.store import (
    ArraySpec,
    Damage,
    Store,
    StoredSequence,
    as_stored,
    hidden_arrays,
    state_array,
    state_arrays,
    state_dtype,
)
from ..data.turns import has_template, template_hash
from ..decode.batched import generate_batched
from ..decode.sampling import Sampling
from ..errors import BadInput
from ..models.target import Target
from ..models.vocabulary import tokenizer_hash
from ..models.weights_sample import weights_hash
from ..progress import Stage, stage
from .answer_store import size_words

_PROMPT_STREAM = 1 << 40  # keeps the random streams of written prompts apart from those of answers


class AnswerSettings(NamedTuple):
    """How prompts and answers are written."""

    sampling: Sampling  # of answers
    max_new_tokens: int  # of an answer
    max_prompt_length: int  # tokens; longer prompts are dropped
    max_length: int  # tokens, prompt and answer
    batch_size: int
    seed: int
    keep_hidden: bool  # store the last hidden states that the answers were predicted from
    prompt_sampling: Sampling | None = None  # of self-written prompts; None: as the answers
    self_share: float = 0.5  # of a round's prompts, written by the target itself while given ones last
    keep_states: tuple[int, ...] = ()  # layers whose hidden states are stored, at all positions but the last
    dtype: torch.dtype | None = None  # in which the target writes; None: as it is loaded


class Amount(NamedTuple):
    """How much to write: a number of the target's own prompts beside all given ones, or what fits into `seconds`."""

    own_prompts: int | None = None  # goes before `seconds`
    seconds: float | None = None


class Conversation(NamedTuple):
    """What a user says, turn by turn."""

    number: int
    turns: list[str]  # the user's
    system: Sequence[dict[str, str]] = ()


class Rounds:
    """What is to be written, and what was dropped on the way."""

    def __init__(
        self, target: Target, examples: Sequence[Example], own_prompts: bool, settings: AnswerSettings, amount: Amount
    ):
        if own_prompts and amount == Amount():
            raise BadInput("data.num_self_prompts: needed for prompts 'self' unless engine.minutes is the budget")
        self.target, self.settings, self.own_prompts, self.amount = target, settings, own_prompts, amount
        self.dtype = settings.dtype or target.dtype
        self.author = target  # while rounds are written, a copy of it where they are written in another dtype
        self.examples = list(examples)
        assert target.tokenizer is not None
        self.tokenizer: Any = target.tokenizer
        self.round_size = 4 * settings.batch_size
        self.timed = amount.seconds is not None and amount.own_prompts is None
        # Where time decides how many prompts there are, the first round is short, a batch: it is timed.
        self._lacking = self.round_size - settings.batch_size if self.timed else 0
        own = (math.inf if self.timed else amount.own_prompts or 0) if own_prompts else 0
        self.prompts: int | float = len(self.examples) + own  # in all; infinity until the time left for them is known
        self.seen: set[str] = set()
        self.dropped = {"empty or unfinished": 0, "repeated": 0, "too long": 0}

    def start(self, number: int) -> int:
        """Prompts before a round."""
        return max(0, number * self.round_size - self._lacking)

    def end(self, number: int) -> int:
        """Prompts up to the end of a round."""
        return int(min(self.start(number + 1), self.prompts))

    def number(self, source: int) -> int:
        """The round that a conversation belongs to."""
        return (source + self._lacking) // self.round_size

    def given_before(self, prompts: int) -> int:
        """Given prompts among the first `prompts`: what the target's own share leaves, more where it has no more of its own."""
        own = math.floor(prompts * self.settings.self_share) if self.own_prompts else 0
        if self.amount.own_prompts is not None:
            own = min(own, self.amount.own_prompts)
        return min(len(self.examples), prompts - own)

    def check_openings(self) -> None:
        """Render what every given conversation begins with, before hours of work. Raises BadInput that names one."""
        for example in self.examples:
            if not example.turns or not example.turns[0].strip():
                continue  # dropped, and counted
            try:
                encode_prompt(self.tokenizer, example.opening)
            except BadInput as error:
                raise BadInput(f"data.prompts: example {example.id!r}: {error}") from error

    def fingerprint(self) -> dict[str, Any]:
        """Everything the answers depend on."""
        settings = self.settings._asdict() | {
            "dtype": str(self.dtype),
            "sampling": list(self.settings.sampling),
            "prompt_sampling": None if self.settings.prompt_sampling is None else list(self.settings.prompt_sampling),
        }
        return {
            "target": self.target.name,
            "weights": weights_hash(self.target),
            "tokenizer": tokenizer_hash(self.tokenizer),
            "chat_template": template_hash(self.tokenizer),
            "prompts": examples_hash(self.examples),
            "own_prompts": self.amount.own_prompts or self.own_prompts,
            **settings,
        }

    def remember(self, stored: Iterable[StoredSequence]) -> None:
        """Know the prompts of the rounds that are stored, and no others, so that none is written twice."""
        prompts = (sequence.input_ids[: sequence.prompt_length] for sequence in stored)
        self.seen = {_plain(self.tokenizer.decode(prompt)) for prompt in prompts}

    def again(self, damage: Damage, folder: Path) -> list[StoredSequence]:
        """What was in a damaged shard, which holds a round: it depends on the prompts of the rounds before."""
        store, number = Store(folder), self.number(damage.sources[0])
        self.remember(store[i] for i in range(damage.indices[0]))
        dropped = dict(self.dropped)
        with stage("the target writes a round again", len(set(damage.sources)), unit="prompts") as bar:
            sequences = list(self.round(number, bar))
        self.dropped = dropped
        return sequences

    def arrays(self) -> dict[str, ArraySpec]:
        """What is kept beside token ids."""
        found: dict[str, ArraySpec] = hidden_arrays(self.target.hidden_size) if self.settings.keep_hidden else {}
        return found | state_arrays(self.settings.keep_states, self.target.hidden_size, self.dtype)

    def most_tokens(self) -> tuple[int, int] | None:
        """The most there can be of answers, and of them with their prompts; None until the time left for them is known."""
        if self.prompts == math.inf:
            return None
        given = self.examples[: self.given_before(int(self.prompts))]
        answers = sum(len(example.turns) for example in given) + int(self.prompts) - len(given)
        return answers * min(self.settings.max_new_tokens, self.settings.max_length), answers * self.settings.max_length

    def size(self) -> str | None:
        """What is going to be on disk, where more than token ids is kept."""
        arrays = self.arrays()
        return f"answers: {size_words(arrays, *(self.most_tokens() or (None, None)))}" if arrays else None

    def round(self, number: int, bar: Stage) -> Iterator[StoredSequence]:
        """The conversations of one round, answered turn by turn."""
        waiting = self._conversations(number, bar)
        contexts: dict[int, list[dict[str, str]]] = {c.number: list(c.system) for c in waiting}
        turn = 0
        while waiting:
            prompts, kept = [], []
            for conversation in waiting:
                contexts[conversation.number].append({"role": "user", "content": conversation.turns[turn]})
                ids = encode_prompt(self.tokenizer, contexts[conversation.number])
                if len(ids) <= (self.settings.max_prompt_length if turn == 0 else self.settings.max_length - 1):
                    prompts.append(ids)
                    kept.append(conversation)
                else:
                    self._drop("too long", bar, prompts=int(turn == 0))
            yield from self._answer(kept, prompts, contexts, turn, bar)
            turn += 1
            waiting = [conversation for conversation in kept if len(conversation.turns) > turn]

    def dropped_words(self) -> str:
        """What became of the prompts that are not in the store."""
        return "dropped: " + ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())

    def _drop(self, reason: str, bar: Stage, prompts: int = 1) -> None:
        self.dropped[reason] += 1
        bar.advance(prompts)

    def _conversations(self, number: int, bar: Stage) -> list[Conversation]:
        """The prompts of a round: given ones and own ones by their shares, only own ones once the given are used up."""
        first, end = self.start(number), self.end(number)
        given = self.examples[self.given_before(first) : self.given_before(end)]
        found = [Conversation(first + i, list(example.turns), example.system) for i, example in enumerate(given)]
        if end - first > len(given):
            found += self._write_prompts(range(first + len(given), end), bar)
        return [conversation for conversation in found if self._is_new(conversation, bar)]

    def _write_prompts(self, numbers: range, bar: Stage) -> list[Conversation]:
        """The target's own user turns: sampled after the template's user header (arXiv:2406.08464)."""
        header = user_header(self.tokenizer)
        ends = sorted({*end_of_turn_ids(self.tokenizer, "user"), *self.target.eos_token_ids})
        written: dict[int, str] = {}
        templated = has_template(self.tokenizer)
        for row in generate_batched(
            self.author,
            [header] * len(numbers),
            max_new_tokens=max(1, self.settings.max_prompt_length - len(header)),
            sampling=self.settings.prompt_sampling or self.settings.sampling,
            eos_token_ids=ends,
            batch_size=self.settings.batch_size,
            seed=self.settings.seed,
            indices=[_PROMPT_STREAM + n for n in numbers],
        ):
            bar.advance(0, tokens=len(row.tokens))
            text = self.tokenizer.decode(row.tokens, skip_special_tokens=True).strip()
            # A prompt that ran into the limit stops in the middle of a sentence: no user writes that. Plain text may.
            written[row.index - _PROMPT_STREAM] = text if row.ended or not templated else ""
        return [Conversation(n, [written[n]]) for n in numbers]

    def _is_new(self, conversation: Conversation, bar: Stage) -> bool:
        if not conversation.turns or not conversation.turns[0].strip():
            self._drop("empty or unfinished", bar)
            return False
        opening = [*conversation.system, {"role": "user", "content": conversation.turns[0]}]
        key = _plain(self.tokenizer.decode(encode_prompt(self.tokenizer, opening)))
        if key in self.seen:
            self._drop("repeated", bar)
            return False
        self.seen.add(key)
        return True

    def _answer(
        self,
        conversations: list[Conversation],
        prompts: list[list[int]],
        contexts: dict[int, list[dict[str, str]]],
        turn: int,
        bar: Stage,
    ) -> Iterator[StoredSequence]:
        if not prompts:
            return
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # neighbours in length share a batch
        longest = self.settings.max_length - len(prompts[order[0]])
        rows = generate_batched(
            self.author,
            [prompts[i] for i in order],
            max_new_tokens=min(self.settings.max_new_tokens, longest),
            sampling=self.settings.sampling,
            batch_size=self.settings.batch_size,
            seed=self.settings.seed,
            keep_hidden=self.settings.keep_hidden,
            keep_states=self.settings.keep_states,
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
            ids = torch.tensor(prompts[i] + row.tokens[:room])
            arrays = {} if row.hidden is None else {"hidden": row.hidden[:room]}
            # At once where and as they are stored: a round of them may be larger than the target.
            dtype = state_dtype(self.dtype)
            for layer, rows in row.states.items():
                arrays[state_array(layer)] = as_stored(f"hidden states of layer {layer}", rows[: len(ids)], dtype)
            finished.append(StoredSequence(ids, len(prompts[i]), arrays, number))
            bar.advance(1 if turn == 0 else 0, tokens=len(row.tokens))
        # In the order of their numbers, so that the store does not depend on which row finished first.
        yield from sorted(finished, key=lambda sequence: sequence.source)


def _plain(text: str) -> str:
    """Text as it counts for repetition: without regard to case and white space."""
    return " ".join(text.lower().split())
