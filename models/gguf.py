"""GGUF files, converted once into plain model folders in the user's cache."""

import contextlib
import hashlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from ..errors import BadInput
from ..paths import home
from .folder import locked, written_whole
from .quiet import one_line_errors, quiet, say

# Values of tokenizer.ggml.pre that stand for byte-level BPE after every digit was split off. transformers ignores the
# key when it reads a GGUF tokenizer, and so loses the splitter.
_DIGIT_SPLITTERS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def converted_folder(path: Path, tell: Callable[[str], None] = say) -> Path:
    """The folder that holds `path` as a plain model, converted on first use (a minute or so).

    Raises:
        BadInput: not a GGUF file, or of an architecture that transformers cannot read.
    """
    folder = home() / "models" / f"{path.stem}-{_fingerprint(path)[:12]}"
    with locked(folder):
        if not (folder / "config.json").is_file():
            convert(path, folder, tell)
    return folder


def convert(path: Path, folder: Path, tell: Callable[[str], None] = say) -> None:
    """Unpack the weights of a GGUF file to float32 and save them, with tokenizer and chat template, as `folder`.

    Raises:
        BadInput: not a GGUF file, or of an architecture that transformers cannot read.
    """
    pre_tokenizer = _pre_tokenizer(path)
    tell(f"converting {path.name} into {folder} (once, a minute or so)")
    # The dequantizer draws its bar whatever it is told; off a terminal it would be a screenful of fragments.
    bar = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    with quiet(), bar, one_line_errors(str(path)):
        # Without `dequantize` the weights stay packed and cannot be saved.
        model = AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    restore_digit_splitter(tokenizer, pre_tokenizer)
    with written_whole(folder) as partial, quiet():
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def restore_digit_splitter(tokenizer: Any, pre_tokenizer: str | None) -> None:
    """Put the digit splitter back that the GGUF key ``tokenizer.ggml.pre`` names, in place."""
    if pre_tokenizer in _DIGIT_SPLITTERS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _pre_tokenizer(path: Path) -> str | None:
    try:
        field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    except (OSError, ValueError, LookupError, OverflowError) as error:
        raise BadInput(f"{path}: not a GGUF file, or a damaged one") from error
    return None if field is None else str(field.contents())


def _fingerprint(path: Path) -> str:
    """Tells files of one name apart without reading gigabytes: by the size and both ends, where header and data lie."""
    digest, size, end = hashlib.sha256(), path.stat().st_size, 4 << 20
    digest.update(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(end))
        file.seek(max(size - end, 0))
        digest.update(file.read(end))
    return digest.hexdigest()
