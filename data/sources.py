"""Prompts, chats and plain text from files, data set ids and the package itself.

A source is one of

- ``*.jsonl`` / ``*.json`` (one object a line, or one JSON array) and ``*.parquet``, with the columns below;
- ``*.txt``: plain text, paragraphs (separated by empty lines) are examples;
- a folder that ``datasets`` wrote or can read; ``hub/id`` or ``hub/id:configuration`` for ``datasets.load_dataset``;
- ``shipped``: the training prompts that come with the package.

Rows: ``messages`` (role, content) or ``conversations`` (from, value) are chats; ``turns`` (with ``question_id`` and
``category``) are prompts, a user turn each; ``prompt`` with ``completion`` or ``response`` is a prompt and its answer,
as strings or as messages; ``prompt`` alone is a prompt; ``text`` is plain text.
"""

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..errors import BadInput, nearest
from .turns import as_messages

TEXT_SUFFIXES = (".jsonl", ".json", ".txt")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet")
COLUMNS = ("messages", "conversations", "turns", "prompt", "completion", "response", "text")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


class Example(NamedTuple):
    """A chat, a prompt (a chat without an assistant turn) or a plain text."""

    id: str | int
    messages: list[dict[str, str]]  # role, content; empty for plain text
    text: str | None = None
    category: str | None = None

    @property
    def turns(self) -> list[str]:
        """The user's turns; the text itself for plain text."""
        if self.text is not None:
            return [self.text]
        return [message["content"] for message in self.messages if message["role"] == "user"]

    @property
    def system(self) -> list[dict[str, str]]:
        """The system prompt before the first turn; empty where there is none."""
        return [message for message in self.messages[:1] if message["role"] == "system"]

    @property
    def opening(self) -> list[dict[str, str]]:
        """The system prompt and the first user turn; a plain text as one user turn."""
        return self.system + [{"role": "user", "content": turn} for turn in self.turns[:1]]

    @property
    def has_answer(self) -> bool:
        """Whether there is something to learn: an assistant turn, or plain text."""
        return self.text is not None or any(message["role"] == "assistant" for message in self.messages)


def read_examples(
    source: str | Path | Sequence[str | Path],
    split: str = "train",
    limit: int | None = None,
    require_answers: bool = False,
) -> list[Example]:
    """The examples of one source, or of several in order; the first `limit` of them.

    `split` is for data set ids and folders. Rows of empty text are skipped. Raises BadInput, naming file and line, for
    malformed JSON, columns of no known kind and (with `require_answers`) a chat without an assistant turn, wherever in a
    text file that is begun; and for a missing file and a source without examples.
    """
    examples: list[Example] = []
    for one in [source] if isinstance(source, str | Path) else source:
        before = len(examples)
        if limit is not None and before >= limit:
            break
        found = _read(str(one), split, require_answers)
        examples += islice(found, None if limit is None else limit - before)
        if Path(one).suffix.lower() in TEXT_SUFFIXES:  # a file is sound or not, however little of it is used
            deque(found, maxlen=0)
        if len(examples) == before:
            raise BadInput(f"{one}: no examples in it")
    if not examples:
        raise BadInput("no data source is given")
    return examples


def shipped_evaluation(limit: int | None = None) -> list[Example]:
    """The evaluation prompts that come with the package; training never sees them."""
    return list(islice(_jsonl(_shipped("evaluation.jsonl"), False), limit))


def examples_hash(examples: Iterable[Example]) -> str:
    """sha256 over the content of the examples, in order; names do not count."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.messages, example.text], ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def _read(source: str, split: str, require_answers: bool) -> Iterator[Example]:
    if source == "shipped":
        return _jsonl(_shipped("train.jsonl"), require_answers)
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    if path.is_dir():
        return _rows(_load_folder(path, split), source, require_answers)
    if not path.exists() and (suffix in SUFFIXES or source.startswith((".", "/", "~"))):
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise BadInput(f"{source}: no such file{nearest(path.name, siblings)}")
    match suffix if path.exists() else "":
        case ".jsonl":
            return _jsonl(path, require_answers)
        case ".json":
            return _json(path, require_answers)
        case ".parquet":
            return _rows(
                _load("parquet", source, data_files=str(path), split="train", streaming=True), source, require_answers
            )
        case ".txt":
            return _paragraphs(path)
        case "":
            name, _, configuration = source.partition(":")
            return _rows(_load(name, source, name=configuration or None, split=split), source, require_answers)
        case _:
            raise BadInput(f"{source}: unknown kind of file (expected {', '.join(SUFFIXES)})")


def _shipped(name: str) -> Path:
    return Path(str(resources.files(f"{__package__}.prompts") / name))


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror or error})") from error


def _text(path: Path) -> str:
    with _opened(path) as file:
        try:
            return file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error


def _jsonl(path: Path, require_answers: bool) -> Iterator[Example]:
    """Examples of a JSONL file, checked line by line; ids default to the line number."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except json.JSONDecodeError as error:
                raise BadInput(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from error
            except UnicodeDecodeError as error:
                raise BadInput(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
                raise BadInput(f"{where}: cannot be read as JSON ({_one_line(error)})") from error
            yield from _example(row, where, number, require_answers)


def _json(path: Path, require_answers: bool) -> Iterator[Example]:
    """A JSON array of rows, or JSONL under another name."""
    text = _text(path)
    if not text.lstrip().startswith("["):
        yield from _jsonl(path, require_answers)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"{path} line {error.lineno}: not valid JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: cannot be read as JSON ({_one_line(error)})") from error
    for number, row in enumerate(rows, 1):
        yield from _example(row, f"{path} item {number}", number, require_answers)


def _paragraphs(path: Path) -> Iterator[Example]:
    text = _text(path)
    lines: list[str] = []
    number = 0
    for line in [*text.splitlines(), ""]:
        if line.strip():
            lines.append(line)
        elif lines:
            number += 1
            yield Example(number, [], "\n".join(lines))
            lines = []


def _load_folder(path: Path, split: str) -> Iterable[Mapping[str, Any]]:
    import datasets

    if not any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        return _load(str(path), str(path), split=split)
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not a data set that `datasets` can read ({_one_line(error)})") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise BadInput(f"{path}: no split {split!r} (expected one of {', '.join(map(str, loaded))})")
        loaded = loaded[split]
    return loaded  # type: ignore[return-value]


def _load(path: str, source: str, **options: Any) -> Iterable[Mapping[str, Any]]:
    """``datasets.load_dataset`` with its many errors as one line."""
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HFValidationError

    try:
        return datasets.load_dataset(path, **options)  # type: ignore[return-value]
    except (OSError, ValueError, RuntimeError, HFValidationError, DatasetsError) as error:
        raise BadInput(
            f"{source}: neither a file here nor a data set that can be loaded ({_one_line(error)})"
        ) from error


def _rows(rows: Iterable[Mapping[str, Any]], source: str, require_answers: bool) -> Iterator[Example]:
    iterator = enumerate(rows, 1)
    while True:
        try:  # streamed files are read here, so this is where a damaged one shows
            number, row = next(iterator)
        except StopIteration:
            return
        except (OSError, ValueError, RuntimeError) as error:
            raise BadInput(f"{source}: cannot be read ({_one_line(error)})") from error
        yield from _example(row, f"{source} row {number}", number, require_answers)


def _example(row: Any, where: str, number: int, require_answers: bool) -> Iterator[Example]:
    """The row's example; nothing for empty text."""
    if not isinstance(row, Mapping):
        raise BadInput(f"{where}: expected an object with named columns, found {type(row).__name__}")
    name = row.get("question_id", row.get("id"))
    name = name if isinstance(name, str | int) else number
    category = row.get("category") if isinstance(row.get("category"), str) else None
    if "text" in row and not any(row.get(column) is not None for column in COLUMNS[:-1]):
        if not isinstance(row["text"], str):
            raise BadInput(f"{where}: text is {type(row['text']).__name__}, expected a string")
        if row["text"].strip():
            _check_unicode(row["text"], where)
            yield Example(name, [], row["text"], category)
        return
    try:
        messages = as_messages(_messages(row))
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error
    if not any(message["content"].strip() for message in messages):
        raise BadInput(f"{where}: no turn with any text")
    for message in messages:
        _check_unicode(message["content"], where)
    example = Example(name, messages, None, category)
    if require_answers and not example.has_answer:
        raise BadInput(f"{where}: no assistant turn (data.responses=target lets the target answer prompts)")
    yield example


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which is no character
        raise BadInput(f"{where}: not Unicode ({error.reason} at character {error.start})") from error


def _messages(row: Mapping[str, Any]) -> list[Any]:
    """The row's messages, unchecked. Raises BadInput, without the place, for columns of no known kind."""
    for column in ("messages", "conversations", "turns"):
        value = row.get(column)
        if value is None:
            continue
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise BadInput(f"{column} is {'empty' if value == [] else type(value).__name__}, expected a list of turns")
        wanted = str if column == "turns" else Mapping
        for turn in value:
            if not isinstance(turn, wanted):
                raise BadInput(f"{column} holds {type(turn).__name__}, expected {wanted.__name__.lower()}s")
        if column == "turns":
            return [{"role": "user", "content": turn} for turn in value]
        return [_from_sharegpt(turn) for turn in value]
    if row.get("prompt") is None:
        columns = ", ".join(map(str, row)) or "none"
        hint = next((h for column in row if (h := nearest(str(column), COLUMNS))), "")
        raise BadInput(f"unknown columns: {columns}{hint}; expected messages, turns, prompt with response, or text")
    answer = next((row[column] for column in ("completion", "response") if row.get(column) is not None), None)
    return _side(row["prompt"], "prompt", "user") + (_side(answer, "answer", "assistant") if answer is not None else [])


def _side(value: Any, column: str, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Sequence) and value and all(isinstance(turn, Mapping) for turn in value):
        return list(value)
    raise BadInput(f"{column} is {type(value).__name__}, expected a string or a list of messages")


def _from_sharegpt(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    if "from" in turn and "value" in turn:
        role = turn["from"]
        return {"role": _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role, "content": turn["value"]}
    return turn


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
