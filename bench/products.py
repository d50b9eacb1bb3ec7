"""Products of 1 to 16 rows with a model's weight matrices: the ways a CPU can do what a verification pass needs.

    python bench/products.py                                      the shapes of SmolLM2: 8 of its layers and its head
    python bench/products.py --compile-seconds 0                  without torch.compile

Every turn multiplies all matrices once, so that weights come from memory as they do in a model. Random weights, float32.
"half" keeps them in float16, which is for drafters only: a target's are never rounded.
"""

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from _common import Timings, arguments, begin, print_table, take_turns
from torch import Tensor, nn

from draftsmith.decode.half import HalfProduct, half_supported
from draftsmith.decode.onednn import supported as packing_supported
from draftsmith.decode.packed import use_backend

Product = Callable[[Tensor], Tensor]
All = Callable[[list[Tensor]], list[Tensor]]


class Shape(NamedTuple):
    """A weight matrix."""

    inputs: int
    outputs: int


def shapes(options: argparse.Namespace) -> list[Shape]:
    """The linear layers of `limit` decoder layers, and the head."""
    hidden, inner, keys = options.hidden, options.intermediate, options.key_size
    layer = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]
    layer += [(hidden, inner), (hidden, inner), (inner, hidden)]
    return [Shape(*sizes) for sizes in layer * options.limit + [(hidden, options.vocab)]]


def plain(weight: Tensor) -> Product:
    """What nn.Linear does."""
    return lambda x: nn.functional.linear(x, weight)


def packed(weight: Tensor) -> Product:
    """The product's packed backend."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    use_backend(layer, "packed")
    return layer


def transposed(weight: Tensor) -> Product:
    """The weight stored as [in, out]."""
    stored = weight.t().contiguous()
    return lambda x: x @ stored


def turned(weight: Tensor) -> Product:
    """(W xᵀ)ᵀ: the rows become columns."""
    return lambda x: (weight @ x.t()).t()


def blocked(weight: Tensor, blocks: int = 8) -> Product:
    """The outputs in blocks, side by side as a batch of products."""
    outputs, inputs = weight.shape
    if outputs % blocks:
        return plain(weight)
    stored = weight.view(blocks, outputs // blocks, inputs).transpose(1, 2)

    def product(x: Tensor) -> Tensor:
        return torch.bmm(x.expand(blocks, *x.shape), stored).transpose(0, 1).reshape(len(x), outputs)

    return product


WAYS: dict[str, Callable[[Tensor], Product]] = {
    "plain": plain,
    "packed": packed,
    "half": HalfProduct,
    "transposed": transposed,
    "turned": turned,
    "blocked": blocked,
}


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError inside when it takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Layers(nn.Module):
    """All products at once, the way torch.compile sees a model."""

    def __init__(self, weights: list[Tensor]):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [nn.functional.linear(x, weight) for x, weight in zip(inputs, self.weights, strict=True)]


def one_by_one(products: list[Product]) -> All:
    """Every product with its own input."""
    return lambda inputs: [product(x) for product, x in zip(products, inputs, strict=True)]


def compiled(weights: list[Tensor], rows: list[int], seconds: int) -> All | str:
    """torch.compile with freezing, run once with every number of rows; or why there is none."""
    import torch._inductor.config as inductor

    inductor.freezing = True
    try:
        with time_limit(seconds), torch.no_grad():
            layers = torch.compile(Layers(weights).eval(), dynamic=True)
            for count in rows:
                layers([torch.randn(count, weight.shape[1]) for weight in weights])
    except Exception as error:  # whatever a compiler says: the table then has no such column
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return layers


def measure(ways: dict[str, All], sizes: list[Shape], rows: list[int], rounds: int) -> dict[int, Timings]:
    """Timings of all ways, by number of rows."""

    def turn_of(way: All) -> Callable[[list[Tensor]], float]:
        return lambda inputs: float(len(way(inputs)))

    contestants = {name: turn_of(way) for name, way in ways.items()}
    inputs = {count: [torch.randn(count, shape.inputs) for shape in sizes] for count in rows}
    return {count: take_turns(contestants, [inputs[count]], rounds) for count in rows}


def differences(ways: dict[str, All], sizes: list[Shape]) -> dict[str, float]:
    """Largest difference from the plain products, for 5 rows."""
    inputs = [torch.randn(5, shape.inputs) for shape in sizes]
    expected = ways["plain"](inputs)
    return {
        name: max(float((mine - right).abs().max()) for mine, right in zip(way(inputs), expected, strict=True))
        for name, way in ways.items()
    }


@torch.no_grad()
def main() -> None:
    parser = arguments(__doc__, rounds=15, limit=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 8, 16])
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--key-size", type=int, default=192, help="outputs of the key and the value projection")
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument(
        "--compile-seconds", type=int, default=120, help="time limit for torch.compile; 0: leave it out"
    )
    options = parser.parse_args()
    begin(options)
    torch.manual_seed(0)
    sizes = shapes(options)
    weights = [torch.randn(shape.outputs, shape.inputs) / shape.inputs**0.5 for shape in sizes]
    there = {"packed": packing_supported(), "half": half_supported()}
    supported = {name: way for name, way in WAYS.items() if there.get(name, True)}
    ways = {name: one_by_one([way(weight) for weight in weights]) for name, way in supported.items()}
    if options.compile_seconds:
        products = compiled(weights, options.rows, options.compile_seconds)
        if isinstance(products, str):
            print(f"torch.compile with freezing: left out ({products})")
        else:
            ways["compiled"] = products
    off = differences(ways, sizes)
    timings = measure(ways, sizes, options.rows, options.rounds)
    one = timings[options.rows[0]].seconds("plain")
    table = [
        [str(count), *(f"{1000 * found.seconds(name):.1f} ({found.seconds(name) / one:.2f})" for name in ways)]
        for count, found in timings.items()
    ]
    table.append(["off by", *(f"{off[name]:.1e}" for name in ways)])
    title = f"ms for {options.limit} layers and the head (in units of {options.rows[0]} row, plain)"
    print_table(title, ["rows", *ways], table)


if __name__ == "__main__":
    main()
