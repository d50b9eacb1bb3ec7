"""Which devices compute in bfloat16 by themselves, by what torch says of them."""

import platform
import subprocess
import sys

import pytest
import torch

from draftsmith.models import native
from draftsmith.models.native import has_bf16_products

CPU = torch.device("cpu")
PROCESSORS = {
    "AVX2": ({"avx2": True, "avx512_f": False, "avx512_bf16": False, "amx_bf16": False}, False),
    "AVX-512 without bf16": ({"avx512_f": True, "avx512_vnni": True, "avx512_bf16": False}, False),
    "converts only": ({"avx2": True, "avx_ne_convert": True}, False),
    "AVX-512 with bf16": ({"avx512_f": True, "avx512_bf16": True}, True),
    "AMX": ({"avx512_f": True, "amx_tile": True, "amx_bf16": True}, True),
    "NEON": ({"neon": True, "bf16": False}, False),
    "NEON with bf16": ({"neon": True, "bf16": True}, True),
    "SVE with bf16": ({"neon": True, "sve": True, "sve_bf16": True}, True),
}


@pytest.mark.parametrize(("capabilities", "fast"), PROCESSORS.values(), ids=PROCESSORS.keys())
def test_a_cpu_is_judged_by_its_instructions(capabilities, fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert has_bf16_products(CPU) is fast
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert has_bf16_products(CPU) is False, "torch's own loops use none of these instructions"


def test_what_torch_cannot_tell_is_not_assumed(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert has_bf16_products(CPU) is False
    assert has_bf16_products(torch.device("meta")) is False


@pytest.mark.parametrize(("available", "supported"), [(False, True), (True, False), (True, True)])
def test_a_gpu_must_be_there_and_compute_it_in_hardware(available, supported, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: (asked.append(options), supported)[1])
    assert has_bf16_products(torch.device("cuda", 0)) is (available and supported)
    assert all(options == {"including_emulation": False} for options in asked)


def test_the_names_asked_for_are_those_that_torch_gives():
    """On this machine's architecture: a name that torch no longer gives would read as "not there"."""
    known = set(native._capabilities())
    assert {"avx512_bf16", "amx_bf16"} <= known or "bf16" in known


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left as they are")
def test_holes_between_tensors_go_back_to_the_system():
    script = """
import torch
from pathlib import Path
from draftsmith.models.native import release_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

tensors = [torch.ones(25_000) for _ in range(2000)]  # of 100 kB: from the heap, 200 MB in all
del tensors[:-1]  # the last one stays above the hole
before = resident()
release_freed_memory()
print(before - resident())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100e6
