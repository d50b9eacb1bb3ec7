"""Folders are written whole or not at all."""

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.errors import BadInput
from draftsmith.models.folder import check_files, hash_files, read_manifest, write_manifest, written_whole


def fail_inside(folder):
    with written_whole(folder) as partial:
        (partial / "x").write_text("new")
        raise RuntimeError


def test_an_error_leaves_what_was_there(tmp_path):
    folder = tmp_path / "a" / "final"
    with written_whole(folder) as partial:
        (partial / "x").write_text("1")
        assert not folder.exists()
    with pytest.raises(RuntimeError):
        fail_inside(folder)
    assert (folder / "x").read_text() == "1"
    with written_whole(folder) as partial:
        (partial / "y").write_text("3")
    assert [p.name for p in folder.iterdir()] == ["y"]
    assert [p.name for p in folder.parent.iterdir()] == ["final"]


def test_what_a_kill_left_is_healed(tmp_path):
    folder = tmp_path / "final"
    (tmp_path / ".final.replaced").mkdir()
    (tmp_path / ".final.replaced" / "x").write_text("old")
    (tmp_path / ".final.partial").mkdir()
    (tmp_path / ".final.partial" / "x").write_text("half")
    with pytest.raises(RuntimeError):
        fail_inside(folder)
    assert (folder / "x").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["final"]


def test_manifest_round_trip_and_hashes(tmp_path):
    assert read_manifest(tmp_path) is None
    write_manifest(tmp_path, "medusa", heads=4)
    assert read_manifest(tmp_path) == {"format": 1, "kind": "medusa", "heads": 4}
    (tmp_path / "draftsmith.json").write_text("[]")
    with pytest.raises(BadInput, match="expected an object"):
        read_manifest(tmp_path)
    (tmp_path / "w.safetensors").write_bytes(b"1")
    hashes = hash_files(tmp_path)
    check_files(tmp_path, hashes)
    (tmp_path / "more.safetensors").write_bytes(b"1")
    with pytest.raises(BadInput, match=r"more\.safetensors: damaged or changed"):
        check_files(tmp_path, hashes)


def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path, small_disk):
    folder = tmp_path / "final"
    with written_whole(folder) as partial:
        (partial / "x").write_text("1")

    def write():
        with written_whole(folder) as partial:
            save_file({"weight": torch.zeros(1000)}, partial / "model.safetensors")

    with small_disk(500), pytest.raises(BadInput, match=r"final: cannot be written: \S"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert (folder / "x").read_text() == "1"
