"""What loading prints and raises, made fit for people: no noise, and one line for an error."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator

from huggingface_hub.utils import enable_progress_bars
from transformers.utils import logging as transformers_logging

from ..errors import BadInput


def say(line: str) -> None:
    """One line about what is going on, on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' warnings and transformers' progress bars and reports; downloads keep their bars."""
    disabled = logging.root.manager.disable
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    logging.disable(logging.WARNING)  # DeepSpeed, imported on the way, and the hub's client have loggers of their own
    transformers_logging.disable_progress_bar()
    enable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Turn what the loaders raise for bad files and unreachable hubs into one line that starts with `name`."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:  # each loader has errors of its own, down to bare ones
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise BadInput(f"{name}: cannot be loaded: {line}") from error
