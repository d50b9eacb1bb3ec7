"""Which dtype is faster is measured once a machine, and every process then decides alike."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from draftsmith.decode import quick
from draftsmith.decode.half import HalfProduct, half_supported
from draftsmith.decode.onednn import PackedProduct, supported
from draftsmith.decode.packed import FastProducts, fast_products
from draftsmith.decode.quick import bf16_time, quick_dtype, quicker_by_onednn, quicker_in_bf16, quickest_weights

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    monkeypatch.setattr(quick, "has_bf16_products", lambda device: True)
    monkeypatch.setattr(quick, "supported", lambda dtype=torch.float32: True)
    quick._noted.cache_clear()
    yield
    quick._noted.cache_clear()


@pytest.fixture
def measured(monkeypatch):
    """Answers of the measurement, one after another, by their number of rows."""
    asked: list[int] = []

    def answer(*times):
        left = iter(times)
        monkeypatch.setattr(quick, "_measured_bf16", lambda rows: (asked.append(rows), next(left))[1])
        return asked

    return answer


@pytest.mark.parametrize(("time", "quicker"), [(0.55, True), (0.9, True), (0.95, False), (1.8, False)])
def test_the_clock_decides_on_a_cpu_that_has_the_instructions(time, quicker, measured):
    measured(time)
    assert quicker_in_bf16(CPU, 64) is quicker
    assert quick_dtype(torch.float32, CPU, 64) is (torch.bfloat16 if quicker else torch.float32)
    assert quick_dtype(torch.float16, CPU, 64) is torch.float16


def test_nothing_is_timed_without_the_instructions_or_on_a_gpu(measured, monkeypatch):
    asked = measured()
    assert quicker_in_bf16(torch.device("cuda"), 512)
    assert quick_dtype(torch.float32, torch.device("cuda"), 512) is torch.float32, (
        "a GPU writes in what it was loaded in"
    )
    monkeypatch.setattr(quick, "has_bf16_products", lambda device: False)
    assert not quicker_in_bf16(CPU, 64)
    assert not quicker_in_bf16(torch.device("cuda"), 512)
    assert asked == []


@pytest.mark.parametrize(
    ("bf16", "half", "quickest"),
    [
        (0.6, 0.5, torch.float16),
        (0.5, 0.6, torch.bfloat16),
        (0.95, 1.2, torch.float32),
        (None, 0.5, torch.float16),
        (0.5, None, torch.bfloat16),
        (None, None, torch.float32),
    ],
)
def test_a_drafters_weights_are_kept_in_what_is_fastest(bf16, half, quickest, monkeypatch):
    monkeypatch.setattr(quick, "has_bf16_products", lambda device: bf16 is not None)
    monkeypatch.setattr(quick, "half_supported", lambda: half is not None)
    monkeypatch.setattr(quick, "_measured_bf16", lambda rows: bf16)
    monkeypatch.setattr(quick, "_measured_half", lambda rows: half)
    assert quickest_weights(torch.float32, CPU) is quickest
    for loaded, device in ((torch.float32, "cuda"), (torch.bfloat16, "cpu")):
        assert quickest_weights(loaded, torch.device(device)) is loaded


def test_another_process_reads_what_the_first_one_measured(measured, tmp_path):
    asked = measured(0.5, 1.5)
    assert bf16_time(64) == 0.5
    quick._noted.cache_clear()  # as a new process has none
    assert bf16_time(64) == 0.5
    assert bf16_time(1) == 1.5
    assert asked == [64, 1]
    assert [path.suffix for path in (tmp_path / "speed").iterdir()] == [".json", ".json"]


def test_of_processes_that_measure_at_once_all_follow_one(measured, tmp_path):
    file = tmp_path / "speed" / "a.json"
    with ThreadPoolExecutor(8) as pool:
        kept = set(pool.map(lambda value: quick._note(file, value), [0.1 * number for number in range(1, 9)]))
    assert len(kept) == 1
    assert json.loads(file.read_text()) == {"time": kept.pop()}
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"time": null}'])
def test_a_damaged_note_is_no_error(content, measured, tmp_path):
    asked = measured(0.5, 0.6)
    bf16_time(64)
    (note,) = (tmp_path / "speed").iterdir()
    note.write_text(content)
    quick._noted.cache_clear()
    assert bf16_time(64) == 0.6
    assert asked == [64, 64]
    assert json.loads(note.read_text()) == {"time": 0.6}


def test_a_cache_folder_that_cannot_be_written_is_no_error(measured, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "file"))
    measured(0.7)
    assert bf16_time(64) == 0.7


@pytest.mark.parametrize(("time", "quicker"), [(0.5, True), (1.3, False)])
def test_the_clock_decides_whose_float32_products_a_step_uses(time, quicker, monkeypatch):
    monkeypatch.setattr(quick, "_measured_onednn", lambda rows: time)
    assert quicker_by_onednn() is quicker
    with fast_products(CPU):
        assert bool(_get_current_dispatch_mode_stack()) is quicker
    monkeypatch.setattr(quick, "_measured_onednn", lambda rows: 1 - time)
    assert quicker_by_onednn() is quicker, "measured once"


@pytest.mark.skipif(not supported(), reason="no oneDNN")
def test_both_libraries_products_are_the_same_up_to_rounding():
    torch.manual_seed(0)
    weight, x = torch.randn(300, 200, requires_grad=True), torch.randn(400, 200, requires_grad=True)
    results = []
    for mode in (nullcontext(), FastProducts()):
        with mode:
            out = torch.nn.functional.linear(x, weight)
            results.append((out, *torch.autograd.grad(out.square().sum(), (x, weight))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3 * float(one.detach().abs().max()))
    assert 0.02 < quick._measured_onednn(64, seconds=0.05) < 50


@pytest.mark.skipif(not supported(torch.bfloat16), reason="no oneDNN, or none that computes bfloat16 here")
def test_a_measurement_is_a_ratio_of_times():
    assert 0.05 < quick._measured_products(4, torch.bfloat16, PackedProduct, seconds=0.05) < 50


@pytest.mark.skipif(not (half_supported() and supported()), reason="no kernels with weights in float16 here")
def test_weights_in_float16_are_measured_against_float32():
    assert 0.05 < quick._measured_products(1, torch.float32, HalfProduct, seconds=0.05) < 50
