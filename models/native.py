"""What a device computes by itself rather than step by step in software, and the host's memory."""

import ctypes
import platform
from collections.abc import Mapping
from typing import Any

import torch


def has_bf16_products(device: torch.device) -> bool:
    """Whether `device` has instructions for products in bfloat16, which says nothing yet of their speed.

    A CPU without them computes the same, but converts to float32 first. False where torch cannot tell.
    """
    if device.type == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return torch.backends.mkldnn.is_available() and _any_bf16_products(_capabilities())
    return False


def release_freed_memory() -> None:
    """Give freed memory back to the system (glibc; elsewhere nothing happens).

    Caches that grow with what is generated leave holes of every size behind, which the allocator keeps: measured, 5 of
    7.5 GB after nine minutes.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _capabilities() -> Mapping[str, Any]:
    """The CPU's instruction sets by name, as torch counts them."""
    read = getattr(torch.cpu, "get_capabilities", dict)
    return read()


def _any_bf16_products(capabilities: Mapping[str, Any]) -> bool:
    # x86: AVX-512's dot products or AMX's tiles; `avx_ne_convert` only converts. ARM: BFMMLA, of NEON or of SVE.
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
