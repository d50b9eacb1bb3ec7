"""Where downloads, conversions and caches go. Nothing is ever written into the package."""

import os
from pathlib import Path


def home() -> Path:
    """The cache folder: ``$DRAFTSMITH_HOME``, else ``$XDG_CACHE_HOME/draftsmith``, else ``~/.cache/draftsmith``."""
    if explicit := os.environ.get("DRAFTSMITH_HOME"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "draftsmith"
