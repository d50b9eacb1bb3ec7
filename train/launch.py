"""``--num-processes N``: the command runs itself once more under torchrun, on this machine."""

import logging
import os
from collections.abc import Sequence

from ..errors import BadInput

# Workers that were told to stop finish their step and write a checkpoint: torchrun's 30 seconds can be too few, while a
# worker whose peer died may wait this long for nothing.
_SHUTDOWN_SECONDS = 120


def already_launched() -> bool:
    """Whether this process is a worker of torchrun, deepspeed or accelerate launch."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def relaunch(num_processes: int, argv: Sequence[str], module: str = "draftsmith") -> int:
    """Runs ``python -m module *argv`` in `num_processes` processes and returns the exit code for the shell.

    The workers' own first failing code is returned, or 128 + the signal that ended the group. A signal to this process
    is passed on, and the workers get two minutes to save. Raises BadInput for a worker and for fewer than one process.
    """
    if already_launched():
        raise BadInput("--num-processes: this process already runs under a launcher, which decides their number")
    if num_processes < 1:
        raise BadInput(f"--num-processes: {num_processes}, expected at least 1")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    # One machine: neither the rendezvous nor gloo should depend on how the host's name resolves.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_processes)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={num_processes}"]
    options += [f"--shutdown-timeout={_SHUTDOWN_SECONDS}", "--module", module, *argv]
    try:
        run(get_args_parser().parse_args(options))
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
