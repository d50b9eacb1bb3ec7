"""The shipped prompt files: schema, variety, and an evaluation set that training cannot have seen."""

import json
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

Row = dict[str, Any]


def rows_of(lines: str) -> list[Row]:
    return [json.loads(line) for line in lines.splitlines()]


@pytest.fixture(scope="module")
def train() -> list[Row]:
    return rows_of(files("draftsmith.data.prompts").joinpath("train.jsonl").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def evaluation() -> list[Row]:
    return rows_of(files("draftsmith.data.prompts").joinpath("evaluation.jsonl").read_text(encoding="utf-8"))


def words(turn: str) -> list[str]:
    return re.findall(r"[\w']+", turn.lower())


def ngrams(row: Row, n: int) -> set[tuple[str, ...]]:
    """Runs of `n` words within one turn."""
    runs: set[tuple[str, ...]] = set()
    for turn in row["turns"]:
        tokens = words(turn)
        runs.update(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
    return runs


def test_every_row_has_the_fastchat_fields(train: list[Row], evaluation: list[Row]) -> None:
    for row in train + evaluation:
        assert set(row) == {"question_id", "category", "turns"}
        assert isinstance(row["question_id"], int)
        assert re.fullmatch(r"[a-z]+", row["category"])
        assert 1 <= len(row["turns"]) <= 2
        assert all(isinstance(turn, str) and turn and turn == turn.strip() for turn in row["turns"])


def test_ids_and_first_turns_are_unique_over_both_files(train: list[Row], evaluation: list[Row]) -> None:
    both = train + evaluation
    assert len({row["question_id"] for row in both}) == len(both)
    assert len({tuple(words(row["turns"][0])) for row in both}) == len(both)


def test_sizes_and_categories(train: list[Row], evaluation: list[Row]) -> None:
    assert len(train) >= 300
    counts = Counter(row["category"] for row in evaluation)
    assert counts == dict.fromkeys(counts, 12)
    assert len(counts) == 6
    assert set(counts) < {row["category"] for row in train}
    assert sum(len(row["turns"]) == 2 for row in evaluation) == 12


def test_any_leading_part_of_the_evaluation_set_is_balanced(evaluation: list[Row]) -> None:
    for limit in range(1, len(evaluation) + 1):
        counts = Counter(row["category"] for row in evaluation[:limit]).values()
        assert max(counts) - (min(counts) if len(counts) == 6 else 0) <= 1


def test_training_prompts_vary_in_length_and_opening(train: list[Row]) -> None:
    lengths = sorted(len(words(row["turns"][0])) for row in train)
    assert lengths[0] <= 3
    assert lengths[-1] >= 100
    openings = Counter(tuple(words(row["turns"][0])[:3]) for row in train)
    assert max(openings.values()) <= len(train) * 0.03  # no template fills the file


def test_evaluation_shares_no_five_words_in_a_row_with_training(train: list[Row], evaluation: list[Row]) -> None:
    seen = set[tuple[str, ...]]().union(*(ngrams(row, 5) for row in train))
    shared = {row["question_id"]: ngrams(row, 5) & seen for row in evaluation}
    assert not {question: runs for question, runs in shared.items() if runs}


def test_no_two_prompts_are_near_duplicates(train: list[Row], evaluation: list[Row]) -> None:
    bags = [(row["question_id"], set(words(" ".join(row["turns"])))) for row in train + evaluation]
    for i, (question, bag) in enumerate(bags):
        if len(bag) < 8:
            continue  # so short that a shared topic is a large share of the words
        for other, others in bags[:i]:
            assert len(bag & others) / len(bag | others) < 0.5, (question, other)


def test_public_benchmarks_are_not_in_the_training_prompts(train: list[Row], shared_data: Path) -> None:
    ours = set[tuple[str, ...]]().union(*(ngrams(row, 7) for row in train))
    files_beside = sorted((shared_data / "prompts").glob("*.jsonl"))
    assert files_beside
    for path in files_beside:
        for row in rows_of(path.read_text(encoding="utf-8")):
            assert not ngrams(row, 7) & ours, (path.name, row["question_id"])
