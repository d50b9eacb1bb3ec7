"""Reading examples: every format, and one clear line for what is wrong."""

import json

import datasets
import pytest

from draftsmith.data.sources import Example, examples_hash, read_examples, shipped_evaluation
from draftsmith.errors import BadInput

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [USER, ANSWER]),
        ({"prompt": "a", "completion": "b"}, [USER, ANSWER]),
        ({"prompt": "a", "response": "b", "source": "x"}, [USER, ANSWER]),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
        ({"prompt": "a"}, [USER]),
        ({"turns": ["a", "c"]}, [USER, {"role": "user", "content": "c"}]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, ANSWER]}, [USER, ANSWER]),
    ],
)
def test_rows_of_every_kind(tmp_path, row, messages):
    assert read_examples(write(tmp_path / "x.jsonl", row))[0].messages == messages


def test_prompts_keep_their_names_and_categories(tmp_path):
    path = write(
        tmp_path / "x.jsonl", {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": "c"}
    )
    (example,) = read_examples(path)
    assert (example.id, example.category, example.turns, example.has_answer) == (81, "writing", ["a", "b"], False)
    assert example.opening == [{"role": "user", "content": "a"}]


def test_plain_text(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("one\ntwo\n\n\n  \nthree\n")
    assert read_examples(path) == [Example(1, [], "one\ntwo"), Example(2, [], "three")]
    rows = write(tmp_path / "y.jsonl", {"text": "one"}, {"text": " "}, "", {"text": "two"})
    assert [example.text for example in read_examples(rows)] == ["one", "two"]
    assert read_examples(rows)[0].has_answer
    assert read_examples(rows)[0].turns == ["one"]


def test_parquet_json_array_and_saved_folder_give_the_same(tmp_path):
    rows = [{"id": str(i), "messages": [USER, ANSWER]} for i in range(3)]
    expected = read_examples(write(tmp_path / "x.jsonl", *rows))
    (tmp_path / "x.json").write_text(json.dumps(rows, indent=1))
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(tmp_path / "x.parquet")
    data.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "splits")
    for name in ("x.json", "x.parquet", "plain", "splits"):
        assert read_examples(tmp_path / name) == expected, name
    with pytest.raises(BadInput, match="no split 'test'"):
        read_examples(tmp_path / "splits", split="test")


def test_several_sources_and_a_limit(tmp_path):
    one = write(tmp_path / "1.jsonl", *({"prompt": f"{i}"} for i in range(3)))
    two = write(tmp_path / "2.jsonl", *({"prompt": f"{i}"} for i in range(3, 6)))
    assert [e.turns[0] for e in read_examples([one, two], limit=4)] == ["0", "1", "2", "3"]
    assert len(read_examples([str(one), two])) == 6


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"prompt": "a"}, '{"prompt": "a",}'], "line 2: not valid JSON"),
        ([{"prompt": "a"}, "", "[1]"], "line 3: expected an object"),
        ([{"promt": "a"}], r"line 1: unknown columns: promt \(did you mean 'prompt'\?\)"),
        ([{"messages": []}], "line 1: messages is empty"),
        ([{"messages": [{"content": "a"}]}], "line 1: message 0 has no role"),
        ([{"messages": [{"role": "user", "content": 5}]}], r"line 1: message 0 \(user\) has no text content, but int"),
        ([{"turns": "a"}], "line 1: turns is str"),
        ([{"turns": [" "]}], "line 1: no turn with any text"),
        ([{"text": 5}], "line 1: text is int"),
        ([{"prompt": 5}], "line 1: prompt is int"),
        ([{"conversations": [{"from": ["human"], "value": "x"}]}], "line 1: message 0 has no role"),
        (['{"prompt": ' + "9" * 5000 + "}"], "line 1: cannot be read as JSON"),
        (["[" * 100_000], "line 1: cannot be read as JSON"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, rows, reason):
    path = write(tmp_path / "x.jsonl", *rows)
    with pytest.raises(BadInput, match=f"x.jsonl {reason}") as raised:
        read_examples(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_file_is_checked_to_its_end_whatever_the_limit(tmp_path, name):
    """What is wrong with it is not to show only when more of it is asked for."""
    path = write(tmp_path / name, {"prompt": "a"}, {"prompt": "b"}, '{"prompt": ')
    with pytest.raises(BadInput, match=f"{name} line 3: not valid JSON"):
        read_examples(path, limit=1)
    sound = write(tmp_path / f"sound.{name}", {"prompt": "a"}, {"prompt": "b"})
    assert [example.turns for example in read_examples(sound, limit=1)] == [["a"]]


def test_bytes_that_are_no_text_name_the_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(BadInput, match="line 2: not UTF-8"):
        read_examples(path)


def test_missing_answers_empty_and_missing_files(tmp_path):
    path = write(tmp_path / "prompts.jsonl", {"messages": [USER, ANSWER]}, {"messages": [USER]})
    with pytest.raises(BadInput, match=r"prompts\.jsonl line 2: no assistant turn"):
        read_examples(path, require_answers=True)
    with pytest.raises(BadInput, match="no examples in it"):
        read_examples(write(tmp_path / "empty.jsonl"))
    with pytest.raises(BadInput, match=r"no such file \(did you mean 'prompts.jsonl'\?\)"):
        read_examples(tmp_path / "prompt.jsonl")
    with pytest.raises(BadInput, match="unknown kind of file"):
        read_examples(write(tmp_path / "x.csv"))
    with pytest.raises(BadInput, match="no data source"):
        read_examples([])


def test_damaged_parquet_and_unreachable_hub_are_one_line(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no parquet")
    for source in (tmp_path / "x.parquet", "nobody/has-this-data-set"):
        with pytest.raises(BadInput) as raised:
            read_examples(source)
        assert "\n" not in str(raised.value)
        assert str(source) in str(raised.value)


def test_the_opening_is_the_system_prompt_and_the_first_user_turn():
    example = Example(0, [{"role": "system", "content": "s"}, USER, ANSWER, USER])
    assert example.opening == example.messages[:2]
    assert Example(0, [], "a text").opening == [{"role": "user", "content": "a text"}]
    assert Example(0, [ANSWER]).opening == []


def test_hash_depends_on_content_and_order_alone():
    one, two = Example(1, [USER, ANSWER]), Example(2, [USER])
    assert examples_hash([one, two]) == examples_hash([one._replace(id=7), two])
    assert examples_hash([one, two]) != examples_hash([two, one])
    assert examples_hash([one]) != examples_hash([Example(1, [], "a")])


def test_shipped_prompts_do_not_overlap():
    training, evaluation = read_examples("shipped"), shipped_evaluation()
    assert training
    assert evaluation
    assert not {e.turns[0] for e in training} & {e.turns[0] for e in evaluation}


def test_real_prompt_files(shared_data):
    counts = {path.stem: len(read_examples(path)) for path in (shared_data / "prompts").glob("*.jsonl")}
    assert counts["mt_bench"] == 80
    assert counts["spec_bench"] == 480
    assert all(example.has_answer for example in read_examples(shared_data / "corpora" / "oasst_en_chat.jsonl"))


@pytest.mark.parametrize("row", [{"turns": ["\ud800"]}, {"text": "a \udfff"}])
def test_half_a_surrogate_pair_is_no_text(row, tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"turns": ["fine"]}\n' + json.dumps(row) + "\n")
    with pytest.raises(BadInput, match="line 2: not Unicode"):
        read_examples(str(path))


def test_a_file_that_may_not_be_read_is_one_line(tmp_path, monkeypatch):
    path = tmp_path / "closed.jsonl"
    path.write_text('{"turns": ["fine"]}\n')

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(BadInput, match="cannot be read"):
        read_examples(str(path))
