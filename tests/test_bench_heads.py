"""`make results-heads`: every kind at toy size gives a row that was measured; what is finished is not done again."""

import copy
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.decode.draft_model import DraftModel
from draftsmith.decode.lengths import FixedLength
from draftsmith.decode.loop import plain_generate
from draftsmith.decode.prompts import pad_rows
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.step import Decoding, Ends
from draftsmith.decode.streams import RowStreams
from draftsmith.models.target import as_target

BENCH = Path(__file__).resolve().parents[1] / "bench"
VOCABULARY = [f"{kind}:drafter.vocabulary=150" for kind in ("model", "blockwise", "medusa", "medusa2", "hydra")]
VOCABULARY += [f"{kind}:drafter.vocabulary=150" for kind in ("eagle", "eagle 3", "early_exit")]
TOY = [
    *(
        "data.generation_batch=2",
        "data.max_new_tokens=24",
        "engine.tokens_per_step=256",
        "early_exit:drafter.exit_layer=1",
        "model:drafter.init={layers: [0, 1]}",
    ),
    *("layer_skip:drafter.calibration_tokens=64", "layer_skip:drafter.calibration_prompts=1"),
    *("layer_skip:drafter.calibration_new_tokens=4", "medusa2:drafter.lora.rank=2"),
]


@pytest.fixture
def bench(monkeypatch):
    """Modules of the folder, which is no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.fixture(scope="module")
def table(chat_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    command = [sys.executable, str(BENCH / "heads.py"), "--target", str(chat_folder / "model")]
    command += ["--prompts", str(chat_folder / "prompts.jsonl"), "--limit", "3", "--max-new-tokens", "10"]
    command += ["--minutes-per-kind", "0.02", "--answer-minutes", "0.02", "--samples", "60", "--audit-prompts", "2"]
    command += ["--threads", "1", "--folder", str(folder / "runs"), "--out", str(folder / "results.md")]
    for change in (*TOY, *VOCABULARY, f"evaluate.prompts={chat_folder / 'prompts.jsonl'}"):
        command += ["--override", change]

    def run(*more: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, *more], env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        page = (folder / "results.md").read_text()
        return done, [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]

    return run


def test_every_kind_has_a_row_and_a_finished_one_is_not_measured_again(table, bench):
    names = list(bench("_kinds").NAMES)
    _, (header, *rows) = table()
    assert [cells[0] for cells in rows] == names
    assert all(len(cells) == len(header) for cells in rows)
    by_name = {cells[0]: dict(zip(header, cells, strict=True)) for cells in rows}
    for name, cells in by_name.items():
        assert float(cells["block efficiency, chain"].split()[0]) >= 1.0, name
        assert cells["audits"].endswith(" passed"), name
        assert cells["right, by position"].count("/") == int(cells["draft tokens"]) - 1, name
        assert (cells["trained"] == "0") == (name in ("layer_skip", "prompt_lookup")), name
    for name in ("medusa", "hydra", "blockwise", "eagle", "eagle 3", "model"):
        assert by_name[name]["tree"], name
        assert by_name[name]["audits"] == "4 passed", name
    done, again = table()
    assert [cells[:5] for cells in again] == [header[:5], *(cells[:5] for cells in rows)]
    assert not [line for line in done.stdout.splitlines() if line.startswith(("training ", "measuring "))]


def test_accuracies_are_those_of_drafts_after_every_token(bench, tiny_llama):
    """Against drafts that are each started afresh from the text so far, and ragged rows against rows alone."""
    target = as_target(tiny_llama(layers=2))
    near = copy.deepcopy(target.model)  # and not the same
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(
                0.1 * parameter.std() * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            )
    drafter = DraftModel(near, target.vocab_size)
    prompts = [[5, 9, 3, 17], [8, 8], [1, 30, 22, 4, 9]]
    found = bench("_kind_figures").accuracies(target, drafter, prompts, 2, 9)
    right, given = [[0, 0], [0, 0]], [[0, 0], [0, 0]]
    for prompt in prompts:
        answer = plain_generate(target, torch.tensor([prompt]), max_new_tokens=9).tokens[0, len(prompt) :].tolist()
        for before in range(len(answer) - 1):  # no draft has room before the last token
            draft = _fresh_draft(target, drafter, prompt + answer[:before])
            wanted = answer[before : before + 2]
            hits = [drafted == token for drafted, token in zip(draft, wanted, strict=False)][: len(answer) - 1 - before]
            for i, hit in enumerate(hits):
                right[i] = [right[i][0] + hit, right[i][1] + 1]
                if all(hits[:i]):
                    given[i] = [given[i][0] + hit, given[i][1] + 1]
    assert 0 < right[0][0] < right[0][1], "or there is nothing to count"
    assert found["right"] == right
    assert found["given"] == given


def _fresh_draft(target: Any, drafter: Any, text: list[int]) -> list[int]:
    decoding = Decoding(
        target,
        drafter,
        pad_rows([text], target),
        sampling=Sampling(),
        rule="lossless",
        options={},
        streams=RowStreams([0]),
        ends=Ends(frozenset(), None),
        policy=FixedLength(2),
        max_new_tokens=9,
    )
    draft = decoding.draft()
    assert draft is not None
    return draft.tokens[0].tolist()


def test_a_section_is_written_in_its_place(bench, tmp_path):
    write_section, page = bench("_results_page").write_section, tmp_path / "docs" / "results.md"
    write_section(page, ["# One", "", "old"])
    write_section(page, ["# Two", "", "## Part", "two"])
    write_section(page, ["# One", "", "new"])
    assert page.read_text() == "# One\n\nnew\n\n# Two\n\n## Part\ntwo\n"
