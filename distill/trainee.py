"""What the loop trains and what it is fed: four small protocols, so that draft models and heads share one loop."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class LossSums(NamedTuple):
    """What a trainee returns for one micro-batch: sums, divided only when the whole step is known.

    ``loss_sum`` is a differentiable scalar that depends on every trainable parameter, also where nothing is supervised
    (then it is zero). ``count`` must equal the micro-batch's ``supervised``. A metric is a pair (sum, count): the log
    shows sum / count over the whole step and all ranks; the progress line leaves out those with a ``/`` in their name.
    """

    loss_sum: Tensor
    count: Tensor | int | float
    metrics: dict[str, tuple[Tensor | int | float, Tensor | int | float]]


@runtime_checkable
class MicroBatch(Protocol):
    """What one forward pass takes; the trainee knows the rest of it. Its tensors are on the engine's device."""

    @property
    def supervised(self) -> int | float:
        """Supervised positions (or the sum of their weights): the divisor of the loss."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens the forward pass reads, for the tokens/s that are shown."""
        ...


@runtime_checkable
class Staged(Protocol):
    """A trainee that does not train all of itself in every step."""

    def begin_step(self, step: int, total_steps: int) -> None:
        """Told before every optimizer step how many are done and how many there will be."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """Anything a resumed run needs again. The state holds tensors, numbers, strings, None, lists, tuples and dicts."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@runtime_checkable
class StepSource(Stateful, Protocol):
    """Yields this rank's micro-batches (at least one) for each optimizer step, for as long as it is asked."""

    def __next__(self) -> Sequence[MicroBatch]: ...
