"""Stores: what is written is read, killed writers lose little, damage is named and mended."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.store import (
    ArraySpec,
    Store,
    StoredSequence,
    as_stored,
    bytes_per_row,
    hidden_arrays,
    top_k_arrays,
)
from draftsmith.data.store_writer import StoreWriter, drop_from, rebuild
from draftsmith.errors import BadInput

FINGERPRINT = {"target": "a1", "tokenizer": "b2", "settings": {"temperature": 0.7}}
ARRAYS = hidden_arrays(4) | top_k_arrays(2)


def sequence(number: int, arrays: bool = True) -> StoredSequence:
    """Another content for every number."""
    generator = torch.Generator().manual_seed(number)
    length = 3 + number % 5
    ids = torch.randint(0, 200_000, (length,), generator=generator)
    content = {
        "hidden": torch.randn(length - 1, 4, generator=generator).half(),
        "top_ids": torch.randint(0, 50, (length - 2, 2), generator=generator).int(),
        "top_log_probs": -torch.rand(length - 2, 2, generator=generator),
        "rest_log_mass": torch.full((length - 2,), -torch.inf),
    }
    return StoredSequence(ids, number % 3, content if arrays else {}, number)


def assert_same(found: StoredSequence, expected: StoredSequence) -> None:
    assert torch.equal(found.input_ids, expected.input_ids)
    assert (found.prompt_length, found.source) == (expected.prompt_length, expected.source)
    assert set(found.arrays) == set(expected.arrays)
    for name, tensor in expected.arrays.items():
        assert found.arrays[name].dtype == tensor.dtype
        assert torch.equal(found.arrays[name], tensor), name


def write(folder: Path, count: int = 10, shard: int = 3) -> Path:
    with StoreWriter(folder, FINGERPRINT, ARRAYS) as writer:
        for number in range(count):
            writer.append(sequence(number))
            if number % shard == shard - 1:
                writer.flush()
    return folder


def test_what_is_written_is_read(tmp_path):
    store = Store(write(tmp_path / "s"), FINGERPRINT, open_shards=2)
    assert len(store) == 10
    assert len(list(tmp_path.glob("s/*.safetensors"))) == 4
    for number in (9, 0, 5, 3, 9, 1, -1):
        assert_same(store[number], sequence(number % 10))
    assert store.lengths() == [3 + n % 5 for n in range(10)]
    assert store.sources() == list(range(10))
    assert store.num_tokens == sum(store.lengths())
    assert len(store._open) <= 2  # few shards are mapped at a time
    with pytest.raises(IndexError):
        store[10]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=12), st.integers(1, 200))
def test_any_lengths_and_shard_sizes(tmp_path_factory, content, shard_bytes):
    folder = tmp_path_factory.mktemp("store")
    with StoreWriter(folder, {}, {"x": ArraySpec(torch.float32)}, shard_bytes=shard_bytes) as writer:
        for number, (length, with_rows) in enumerate(content):
            rows = torch.arange(length * with_rows, dtype=torch.float32) + number
            writer.append(StoredSequence(torch.arange(length) + number, 0, {"x": rows}))
    store = Store(folder)
    assert len(store) == len(content)
    for number, (length, with_rows) in enumerate(content):
        assert store[number].input_ids.tolist() == list(range(number, number + length))
        assert store[number].arrays["x"].tolist() == list(range(number, number + length * with_rows))
        assert store[number].source == number


def test_sources_out_of_order_are_kept_and_skipped_on_resume(tmp_path):
    with StoreWriter(tmp_path, FINGERPRINT) as writer:
        for source in (4, 0, 7):
            writer.append(StoredSequence(torch.tensor([source]), 0, {}, source))
    with StoreWriter(tmp_path, FINGERPRINT) as writer:
        assert writer.done == {0, 4, 7}
        assert len(writer) == 3
        assert not writer.complete
        writer.append(StoredSequence(torch.tensor([2]), 0, {}, 2))
        writer.finish()
    store = Store(tmp_path)
    assert store.sources() == [4, 0, 7, 2]
    assert store.complete
    assert [found.source for found in store] == [4, 0, 7, 2]


def test_flushes_by_time(tmp_path):
    with StoreWriter(tmp_path, FINGERPRINT, flush_seconds=0.0) as writer:
        writer.append(sequence(0, arrays=False))
        assert len(Store(tmp_path)) == 1


def kill_at(folder: Path, rename: int, after: bool) -> None:
    """In a child: write, and die by SIGKILL right before or after the given rename."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        return
    renames, original = 0, Path.replace

    def replace(self, target):
        nonlocal renames
        renames += 1
        if renames == rename and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, target)
        if renames == rename:
            os.kill(os.getpid(), signal.SIGKILL)

    Path.replace = replace  # type: ignore[method-assign]
    write(folder)
    os._exit(0)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("rename", [1, 2, 3, 4, 5, 6, 7])
def test_killed_writer_goes_on(tmp_path, rename, after):
    folder = tmp_path / "s"
    kill_at(folder, rename, after)
    with StoreWriter(folder, FINGERPRINT, ARRAYS) as writer:
        survivors = len(writer)
        assert survivors >= 3 * max(0, (rename - 2) // 2)  # all that was flushed before
        assert writer.done == set(range(survivors))
        for number in range(survivors, 10):
            writer.append(sequence(number))
    store = Store(folder, FINGERPRINT)
    assert not store.damaged()
    for number in range(10):
        assert_same(store[number], sequence(number))
    files = {path.name for path in folder.iterdir()}
    assert not [name for name in files if "writing" in name]
    assert {shard["file"] for shard in json.loads((folder / "index.json").read_text())["shards"]} == {
        name for name in files if name.startswith("shard")
    }


def test_exception_keeps_what_was_appended(tmp_path):
    def interrupted() -> None:
        with StoreWriter(tmp_path, FINGERPRINT) as writer:
            writer.append(sequence(0, arrays=False))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(Store(tmp_path)) == 1


def test_sequences_that_belong_together_are_all_there_or_none(tmp_path):
    with StoreWriter(tmp_path, FINGERPRINT, ARRAYS) as writer:
        writer.append(sequence(0))
        writer.append_all([sequence(1), sequence(2)])
    wrong = sequence(5)._replace(arrays={})
    with pytest.raises(BadInput, match="expected"), StoreWriter(tmp_path, FINGERPRINT, ARRAYS) as writer:
        writer.append_all([sequence(3), sequence(4), wrong])
    with StoreWriter(tmp_path, FINGERPRINT, ARRAYS) as writer:
        assert (len(writer), writer.done) == (3, {0, 1, 2})
        writer.append_all([sequence(3), sequence(4)])
    for number, found in enumerate(Store(tmp_path)):
        assert_same(found, sequence(number))


def test_values_beyond_the_range_of_their_type_are_refused():
    large = torch.tensor([[1.0, 7e4]])
    with pytest.raises(
        BadInput, match=r"hidden states of layer 3: values beyond the range of float16: set target\.dtype"
    ):
        as_stored("hidden states of layer 3", large, torch.float16)
    assert torch.equal(as_stored("x", large, torch.bfloat16), large.bfloat16())
    assert as_stored("x", torch.tensor([[torch.inf]]), torch.float16).isinf().all()


def test_another_fingerprint_is_refused_by_name(tmp_path):
    write(tmp_path / "s")
    changed = {**FINGERPRINT, "tokenizer": "c3", "settings": {"temperature": 0.8}}
    with pytest.raises(BadInput, match=r"another settings, tokenizer .*b2 there, c3 here"):
        Store(tmp_path / "s", changed)
    with pytest.raises(BadInput, match="another template"):
        StoreWriter(tmp_path / "s", {**FINGERPRINT, "template": "x"}, ARRAYS)
    with pytest.raises(BadInput, match="holds the arrays"):
        StoreWriter(tmp_path / "s", FINGERPRINT, hidden_arrays(8))
    assert len(Store(tmp_path / "s", FINGERPRINT)) == 10


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    match how:
        case "truncated":
            path.write_bytes(content[:-7])
        case "corrupted":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case _:
            path.unlink()


@pytest.mark.parametrize("how", ["truncated", "corrupted", "missing"])
def test_damaged_shard_is_named_and_rebuilt(tmp_path, how):
    folder = write(tmp_path / "s")
    damage(folder / "shard-00001.safetensors", how)
    store = Store(folder, FINGERPRINT)
    assert_same(store[0], sequence(0))  # other shards are not touched by it
    with pytest.raises(BadInput, match=rf"shard-00001.safetensors: {how}.*sequences 3 to 5"):
        store[4]
    (found,) = store.damaged()
    assert (found.file, found.indices, found.sources) == ("shard-00001.safetensors", [3, 4, 5], [3, 4, 5])
    for count in (2, 4):
        with pytest.raises(BadInput, match=f"{count} sequences came back, expected 3"):
            rebuild(folder, FINGERPRINT, lambda lost, count=count: [sequence(s) for s in range(count)])
    with pytest.raises(BadInput, match=r"arrays \[\], expected"):
        rebuild(folder, FINGERPRINT, lambda lost: [sequence(s, arrays=False) for s in lost.sources])
    assert rebuild(folder, FINGERPRINT, lambda lost: [sequence(s) for s in lost.sources]) == [found]
    mended = Store(folder, FINGERPRINT)
    assert not mended.damaged()
    for number in range(10):
        assert_same(mended[number], sequence(number))
    assert rebuild(folder, FINGERPRINT, lambda lost: []) == []


def test_damaged_or_missing_index_is_named(tmp_path):
    with pytest.raises(BadInput, match="no store here"):
        Store(tmp_path / "nothing")
    folder = write(tmp_path / "s")
    (folder / "index.json").write_text('{"format": 1, ')
    with pytest.raises(BadInput, match=r"index.json: damaged index"):
        Store(folder)
    (folder / "index.json").write_text('{"format": 99}')
    with pytest.raises(BadInput, match="not a store of format 1"):
        StoreWriter(folder, FINGERPRINT, ARRAYS)


def test_two_writers_and_unwritable_folders_are_refused(tmp_path):
    with StoreWriter(tmp_path / "s", FINGERPRINT), pytest.raises(BadInput, match="another process is writing"):
        StoreWriter(tmp_path / "s", FINGERPRINT)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        StoreWriter(tmp_path / "file" / "s", FINGERPRINT)


def test_wrong_arrays_are_refused(tmp_path):
    with StoreWriter(tmp_path, FINGERPRINT, hidden_arrays(2)) as writer:
        ids = torch.arange(3)
        with pytest.raises(BadInput, match=r"arrays \[\], expected \['hidden'\]"):
            writer.append(StoredSequence(ids, 0))
        with pytest.raises(BadInput, match=r"hidden is \[3, 5\]"):
            writer.append(StoredSequence(ids, 0, {"hidden": torch.zeros(3, 5)}))
        with pytest.raises(BadInput, match=r"beyond the range of float16"):
            writer.append(StoredSequence(ids, 0, {"hidden": torch.full((3, 2), 1e6)}))
        with pytest.raises(BadInput, match="prompt of 4 tokens"):
            writer.append(StoredSequence(ids, 4, {"hidden": torch.zeros(3, 2)}))
        assert len(writer) == 0


def test_bytes_per_row_is_what_lands_on_disk(tmp_path):
    assert bytes_per_row(hidden_arrays(576)) == 1152
    assert bytes_per_row(top_k_arrays(64)) == 64 * 8 + 4
    with StoreWriter(tmp_path, FINGERPRINT, hidden_arrays(576, torch.bfloat16)) as writer:
        for _ in range(20):
            writer.append(StoredSequence(torch.arange(100), 10, {"hidden": torch.randn(100, 576)}))
    expected = 2000 * (4 + bytes_per_row(hidden_arrays(576)))
    assert expected < Store(tmp_path).num_bytes < 1.02 * expected
    assert Store(tmp_path)[3].arrays["hidden"].dtype == torch.bfloat16


def test_a_full_disk_is_one_line_and_the_store_goes_on_afterwards(tmp_path, small_disk):
    folder = write(tmp_path / "s", count=3)
    writer = StoreWriter(folder, FINGERPRINT, ARRAYS)
    for number in range(3, 10):
        writer.append(sequence(number))
    with small_disk(500), pytest.raises(BadInput, match=r"shard-00001.safetensors: cannot be written: \S"):
        writer.flush()
    writer.close()
    assert not Store(folder, FINGERPRINT).damaged()
    assert [found.source for found in Store(folder)] == list(range(10))


def test_what_lies_behind_a_lost_shard_can_be_dropped(tmp_path):
    folder = write(tmp_path / "s")
    with StoreWriter(folder, FINGERPRINT, ARRAYS) as writer:
        writer.finish()
    damage(folder / "shard-00001.safetensors", "missing")
    drop_from(folder, "shard-00001.safetensors")
    store = Store(folder, FINGERPRINT)
    assert (len(store), store.complete, store.damaged()) == (3, False, [])
    with StoreWriter(folder, FINGERPRINT, ARRAYS) as writer:
        assert writer.done == {0, 1, 2}
        writer.append(sequence(3))
    assert_same(Store(folder)[3], sequence(3))
    assert len(list(folder.glob("*.safetensors"))) == 2
