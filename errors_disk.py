"""What a full disk, a quota or a missing permission makes of each library that writes, as one line."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from .errors import BadInput

# In the messages of torch.save's own writer, which raises plain RuntimeErrors.
_TORCH_WRITER = ("inline_container.cc", "PytorchStreamWriter", "basic_ios")
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raise BadInput, a line that starts with `what`, when the disk refuses what is written inside."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{what}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise BadInput(f"{what}: {_first_line(error)}") from error
    except RuntimeError as error:
        if not any(name in str(error) for name in _TORCH_WRITER):
            raise
        raise BadInput(f"{what}: the disk takes no more ({_first_line(error)})") from error


def is_refusal(error: OSError) -> bool:
    """Whether `error` says that the disk takes no more, wherever it was raised."""
    return error.errno in _REFUSALS


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
