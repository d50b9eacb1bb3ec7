"""A target that is trained together with its heads: by a low-rank adapter, or in its last layers.

The target's own model is changed in place, so that whoever decodes with it decodes with the changed one: what is lossless
then is relative to that. What it was can be had back for a while (:meth:`AdaptedTarget.original`).
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..decode.packed import unpacked
from ..distill.batch import DistillBatch
from ..distill.chunked import DraftHead
from ..distill.teacher import last_hidden
from ..errors import BadInput
from ..models.cut import layer_list, text_stack
from ..models.head import split
from ..models.loading import load_exactly
from ..models.lora import add_lora, load_adapter, save_adapter
from ..models.quiet import say
from ..models.target import Target
from ..models.weights_sample import remember_weights
from ..recipe import LoraSection

ADAPTER = "adapter"  # the folder of a low-rank adapter inside the drafter's
LAYERS = "target_layers."  # before the names of changed layers' tensors
_CHANGED_BY = "_draftsmith_changed_by"


class Change(NamedTuple):
    """How a target is changed."""

    trained: nn.Module  # what of it is trained
    switch: Callable[[bool], None]  # True: make the model the changed target; False: the original
    happened: Callable[[], bool]  # whether training has made a difference
    save: Callable[[Path], None]  # write what a drafter's tensors do not hold into its folder
    tensors: Callable[[], dict[str, Tensor]]  # what they do hold of it, by name


class AdaptedTarget(nn.Module):
    """What of the target is trained, as a module of its own, and the way back to the original.

    Made by :func:`with_adapter` or :func:`with_trained_layers`.
    """

    def __init__(self, target: Target, change: Change, learning_rate_share: float, start: float = 0.0):
        """`start`: the share of the steps after which the target is trained too."""
        super().__init__()
        self.trained = change.trained
        self.learning_rate_share, self.start = learning_rate_share, start
        self.training_target = True  # until the loop says otherwise: what measures a step shall measure the longer kind
        self._target, self.change = (target,), change

    def begin_step(self, step: int, total_steps: int) -> None:
        """Told before every step: whether it trains the target too."""
        self.training_target = step >= self.start * total_steps

    @contextmanager
    def original(self) -> Iterator[None]:
        """Inside, the target is what it was before training."""
        self.change.switch(False)
        try:
            yield
        finally:
            self.change.switch(True)

    def hidden(self, batch: DistillBatch) -> Float[Tensor, "labels hidden"]:
        """The changed target's last hidden states where labels are predicted from, differentiable."""
        model = self._target[0].model
        if any(not parameter.numel() for parameter in self.trained.parameters()):
            raise BadInput("engine.deepspeed: ZeRO-3 shards what is trained of the target away from it; use stage 2")
        return last_hidden(split(model)[0], batch).flatten(0, 1)[batch.predictors]

    def draft_head(self) -> DraftHead:
        """The target's frozen output head, as the chunked loss takes it."""
        head = split(self._target[0].model)[1]
        return DraftHead(head.weight, head.bias, head.transform)

    def zero(self) -> Tensor:
        """Zero, as a function of all that is trained: ranks of a group must agree on what gets a gradient."""
        return torch.stack([parameter.sum() for parameter in self.trained.parameters()]).sum() * 0.0


def with_adapter(target: Target, lora: LoraSection, learning_rate_share: float, start: float) -> AdaptedTarget:
    """Put a low-rank adapter on the target's linear layers (arXiv:2401.10774, section 2.2); it begins as no change.

    Raises:
        BadInput: no layer has one of the names asked for.
    """
    remember_weights(target)
    add_lora(target.model, lora.rank, lora.alpha, lora.dropout, lora.target_modules)
    tuned = [module for module in target.model.modules() if isinstance(module, BaseTunerLayer)]
    parts = nn.ModuleList(
        nn.ModuleList([getattr(module, name) for name in ("lora_A", "lora_B", "lora_dropout")]) for module in tuned
    ).float()  # whatever the target is in: bf16 cannot hold an optimizer's small steps

    def switch(changed: bool) -> None:
        for module in tuned:
            module._disable_adapters = not changed  # `enable_adapters` would also change what requires gradients

    def happened() -> bool:
        return any(bool(weight.any()) for name, weight in parts.named_parameters() if weight.ndim and ".1." in name)

    def save(folder: Path) -> None:
        (folder / ADAPTER).mkdir()
        save_adapter(target.model, folder / ADAPTER, target.name)

    return AdaptedTarget(target, Change(parts, switch, happened, save, dict), learning_rate_share, start)


def with_trained_layers(target: Target, number: int, learning_rate_share: float) -> AdaptedTarget:
    """Train copies of the target's last `number` layers in their places (arXiv:1811.03115, section 6).

    Raises:
        BadInput: the target has fewer layers.
    """
    layers = _layers(target)
    if number > len(layers):
        raise BadInput(f"drafter.train_layers: {number} layers, the target has {len(layers)}")
    remember_weights(target)
    places = range(len(layers) - number, len(layers))
    before = [layers[place] for place in places]
    after = nn.ModuleList(copy.deepcopy(layer).requires_grad_(True) for layer in before)

    def switch(changed: bool) -> None:
        for place, old, new in zip(places, before, after, strict=True):
            layers[place] = new if changed else old

    def happened() -> bool:
        pairs = zip(nn.ModuleList(before).parameters(), after.parameters(), strict=True)
        return any(not torch.equal(old, new.to(old.dtype)) for old, new in pairs)

    def tensors() -> dict[str, Tensor]:
        return {LAYERS + name: tensor for name, tensor in after.state_dict().items()}

    switch(True)
    return AdaptedTarget(target, Change(after, switch, happened, lambda folder: None, tensors), learning_rate_share)


def change_target(target: Target, folder: Path, layers: dict[str, Tensor]) -> None:
    """Make `target` the one that the drafter in `folder` was trained with: merge its adapter, or take over `layers`
    (a drafter's tensors of the name ``target_layers…``). A target can be changed once.

    Raises:
        BadInput: another drafter has changed it already, or the change does not fit.
    """
    model = target.model
    by = model.__dict__.get(_CHANGED_BY)
    if by == str(folder):
        return
    if by is not None:
        raise BadInput(f"{folder}: changes the target, which {by} has changed already: load them for separate targets")
    say(f"{folder.name} changes the target: output is the changed target's, and so is what it is compared with")
    remember_weights(target)
    with unpacked(model):
        if (folder / ADAPTER).is_dir():
            load_adapter(model, folder / ADAPTER)
        else:
            modules = _layers(target)
            numbers = sorted({int(name.removeprefix(LAYERS).split(".")[0]) for name in layers})
            for number in numbers:
                prefix = f"{LAYERS}{number}."
                state = {name.removeprefix(prefix): value for name, value in layers.items() if name.startswith(prefix)}
                load_exactly(modules[len(modules) - len(numbers) + number], state, str(folder))
    model.requires_grad_(False)
    model.__dict__[_CHANGED_BY] = str(folder)


def _layers(target: Target) -> nn.ModuleList:
    decoder, _, number = text_stack(target.model)
    return layer_list(decoder, number)[1]
