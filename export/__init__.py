"""Checkpoints for serving engines, one module per destination format."""

from pathlib import Path

from ..checks import check_new_folder
from ..errors import BadInput, nearest

FORMATS = ("hf",)


def export(checkpoint: Path, to: str, out: Path, *, report: Path | None = None) -> Path:
    """Write the drafter in `checkpoint` as the new folder `out`, in the format `to`; returns `out`.

    ``hf`` is a plain transformers folder, usable as ``assistant_model``. The folder appears under its name only when it
    has been read back and gave the checkpoint's logits.

    Args:
        checkpoint: a drafter's folder, such as a run's ``final/``.
        report: the ``report.json`` of an evaluation of this drafter, for the model card; None: one found with the run.

    Raises:
        BadInput: no such checkpoint or format, a drafter that the format cannot hold (the line says why), `out` is not
            empty or cannot be written.
    """
    checkpoint, out = Path(checkpoint).expanduser(), Path(out).expanduser()
    if not checkpoint.is_dir():
        raise BadInput(f"{checkpoint}: no such folder, expected a drafter's, such as a run's final/")
    check_new_folder(out, "out")
    match to:
        case "hf":
            from .hf import export_hf

            return export_hf(checkpoint, out, report)
        case _:
            raise BadInput(f"format {to!r}{nearest(to, FORMATS)}: expected one of {', '.join(FORMATS)}")
