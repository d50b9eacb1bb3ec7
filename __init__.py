"""draftsmith: train, measure and export drafters for lossless speculative decoding."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from draftsmith.decode.loop import speculative_generate
    from draftsmith.heads import load_drafter
    from draftsmith.models.target import load_target

# Resolved on first use: importing the package (and `draftsmith --help`) must not import torch.
_EXPORTS = {
    "load_target": "draftsmith.models.target",
    "load_drafter": "draftsmith.heads",
    "speculative_generate": "draftsmith.decode.loop",
}

__all__ = ["__version__", "load_drafter", "load_target", "speculative_generate"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
