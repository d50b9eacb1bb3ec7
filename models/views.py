"""Views of a causal LM: the same modules and parameters on other paths. Nothing is copied and the model never changes.

A view is a model of the same class whose list of layers is another one: some of its layers, stand-ins for others. It
follows whatever happens inside the shared layers (packed weights, say).
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import BadInput
from .cut import layer_list, text_stack
from .head import split

_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_MLP = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
_FINAL_NORM = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f")


class Bypass(nn.Module):
    """Takes a layer's place and returns its input, or (`given`) what it was told to. It remembers its input."""

    def __init__(self, tuple_size: int = 0):
        """`tuple_size`: how many values the layer returns; 0: one, not in a tuple."""
        super().__init__()
        self.tuple_size = tuple_size
        self.given: Tensor | None = None
        self.taken: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.taken = hidden_states
        return _as(self.tuple_size, hidden_states if self.given is None else self.given)


class Nothing(nn.Module):
    """Takes the place of an attention or MLP block and adds nothing to the residual stream."""

    def __init__(self, tuple_size: int = 0):
        """`tuple_size`: as for `Bypass`."""
        super().__init__()
        self.tuple_size = tuple_size

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _as(self.tuple_size, torch.zeros_like(hidden_states))


def _as(tuple_size: int, value: Tensor) -> Any:
    return (value, *[None] * (tuple_size - 1)) if tuple_size else value


class TwoParts:
    """A causal LM cut between two layers: what the first layers make of some tokens, the rest can take on later.

    Both parts write their own layers of one cache, so that no key or value is computed twice.
    """

    def __init__(self, model: Any, num_first: int):
        """`num_first` layers are the first part.

        Raises:
            BadInput: the model has no layers beyond them, or cannot be run in two parts.
        """
        layers = layers_of(model)
        if not 1 <= num_first < len(layers):
            raise BadInput(f"{num_first} first layers: expected 1 to {len(layers) - 1}")
        sizes = tuple_sizes(model, [layers[0]])
        self.num_first = num_first
        self._end, self._entry = Bypass(sizes[0]), Bypass(sizes[0])
        self.first_model = with_layers(model, [*layers[:num_first], self._end])
        before = [Bypass(sizes[0]) for _ in range(num_first - 1)]
        self._rest_model = with_layers(model, [*before, self._entry, *layers[num_first:]])
        self._head = split(model)[1]
        self._check(model)

    def first(self, **inputs: Any) -> tuple[Float[Tensor, "rows length hidden"], Float[Tensor, "rows length hidden"]]:
        """Hidden states after the first layers, and the same after the final norm: what the output head would read."""
        normed = self.first_model.base_model(**inputs).last_hidden_state
        hidden, self._end.taken = self._end.taken, None
        assert hidden is not None
        return hidden, normed

    def rest(
        self, hidden: Float[Tensor, "rows length hidden"], want_logits: bool = True, **inputs: Any
    ) -> tuple[Float[Tensor, "rows length hidden"], Float[Tensor, "rows length vocab"] | None]:
        """The last hidden states and the logits (None unless wanted) from hidden states after the first layers; `inputs`
        are those of the whole model.
        """
        self._entry.given = hidden
        try:
            last = self._rest_model.base_model(**inputs).last_hidden_state
        finally:
            self._entry.given = self._entry.taken = None
        return last, self._head(last) if want_logits else None

    @torch.no_grad()
    def _check(self, model: Any) -> None:
        if model.device.type == "meta":
            return
        ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
        inputs = {"input_ids": ids, "use_cache": False}
        found, expected = self.rest(self.first(**inputs)[0], **inputs)[1], model(**inputs).logits.float()
        if found is None or (found.float() - expected).norm() > 1e-3 * expected.norm():
            raise BadInput(f"{type(model).__name__}: its layers cannot be run in two parts")


def with_layers(model: Any, layers: Sequence[nn.Module]) -> Any:
    """A view of a causal LM that runs these modules as its layers, at most as many as it has.

    Its configuration is the model's own: layer i must be of the kind that the model has in place i.

    Raises:
        BadInput: the layers are not in one list, or the model is spread over several devices.
    """
    stack = layers_of(model)
    name = next(name for name, module in model.named_modules() if module is stack)
    return _replaced(model, name.split("."), nn.ModuleList(layers))


class BlockSkipper:
    """Views of a causal LM that skip attention and MLP blocks."""

    def __init__(self, model: Any):
        """Raises BadInput for a family whose blocks have other names, or do more than add to the residual stream."""
        self._model, self._names = model, block_names(model)
        layers = layers_of(model)
        self._sizes = tuple_sizes(model, [layers[0], *(_block(layers[0], name) for name in self._names)])
        self.num_layers = len(layers)
        _check_residual(model, self._names, self._sizes)

    def view(self, attention: Iterable[int], mlp: Iterable[int]) -> Any:
        """Without the attention blocks of the layers `attention` and the MLP blocks of `mlp`.

        Raises:
            BadInput: a layer that is not there.
        """
        attention, mlp, views = set(attention), set(mlp), []
        if outside := sorted(i for i in attention | mlp if not 0 <= i < self.num_layers):
            raise BadInput(f"layer {outside[0]} cannot be skipped: expected 0 to {self.num_layers - 1}")
        for i, layer in enumerate(layers_of(self._model)):
            if i in attention and i in mlp:
                views.append(Bypass(self._sizes[0]))
                continue
            for name, size, skipped in zip(self._names, self._sizes[1:], (attention, mlp), strict=True):
                layer = _replaced(layer, [name], Nothing(size)) if i in skipped else layer
            views.append(layer)
        return with_layers(self._model, views)


def blocks_of(model: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Attention and MLP block of every layer. Raises BadInput where they are not found."""
    attention, mlp = block_names(model)
    return [(_block(layer, attention), _block(layer, mlp)) for layer in layers_of(model)]


@torch.no_grad()
def _check_residual(model: Any, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Raise BadInput unless a layer whose blocks give zeros is a layer that changes nothing."""
    if model.device.type == "meta":
        return
    first, *others = layers_of(model)
    for name, size in zip(names, sizes[1:], strict=True):
        first = _replaced(first, [name], Nothing(size))
    ids = torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
    found, expected = (
        with_layers(model, [start, *others])(input_ids=ids, use_cache=False).logits.float()
        for start in (first, Bypass(sizes[0]))
    )
    if (found - expected).norm() > 1e-3 * expected.norm():
        raise BadInput(f"{type(model).__name__}: its attention and MLP blocks cannot be skipped one by one")


def layers_of(model: Any) -> nn.ModuleList:
    """The layers of a causal LM. Raises BadInput where they are not in one list."""
    decoder, _, number = text_stack(model)
    return layer_list(decoder, number)[1]


def block_names(model: Any) -> tuple[str, str]:
    """What a layer calls its attention and its MLP block. Raises BadInput where they are not found."""
    layer = layers_of(model)[0]
    found = [next((name for name in names if hasattr(layer, name)), None) for names in (_ATTENTION, _MLP)]
    if found[0] is None or found[1] is None:
        raise BadInput(f"{type(model).__name__}: no attention and MLP blocks were found in {type(layer).__name__}")
    return found[0], found[1]


@torch.no_grad()
def final_norm(model: Any) -> nn.Module:
    """What stands between a causal LM's last layer and its output head. Raises BadInput where it is not found."""
    decoder, found = text_stack(model)[0], []
    norm = next((getattr(decoder, name) for name in _FINAL_NORM if hasattr(decoder, name)), None)
    if norm is not None and model.device.type == "meta":
        return norm
    if norm is not None:
        hook = norm.register_forward_hook(lambda module, args, output: found.append(output))
        try:
            out = decoder(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
        finally:
            hook.remove()
        if len(found) == 1 and torch.equal(found[0], out.last_hidden_state):
            return norm
    raise BadInput(f"{type(model).__name__}: no norm that makes its last hidden states was found")


def _block(layer: nn.Module, name: str) -> nn.Module:
    return getattr(layer, name)


@torch.no_grad()
def tuple_sizes(model: Any, modules: Sequence[nn.Module]) -> list[int]:
    """How many values each of these modules of the model returns (0: one, not in a tuple), seen in a pass of one token."""
    if model.device.type == "meta":
        return [0] * len(modules)
    sizes: dict[int, int] = {}

    def note(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            sizes[number] = len(output) if isinstance(output, tuple) else 0

        return hook

    hooks = [module.register_forward_hook(note(i)) for i, module in enumerate(modules)]
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [sizes[i] for i in range(len(modules))]


def _replaced(module: nn.Module, path: Sequence[str], new: nn.Module) -> Any:
    """A shallow copy of `module` with `new` at `path`; everything else is shared."""
    if hasattr(module, "_hf_hook"):
        raise BadInput(f"{type(module).__name__}: a model spread over several devices cannot be run in parts")
    view = copy.copy(module)
    children = dict(module.named_children())
    children[path[0]] = new if len(path) == 1 else _replaced(children[path[0]], path[1:], new)
    view.__dict__["_modules"] = children
    return view
