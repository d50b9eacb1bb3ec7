"""Training an early exit's adapter, and its folder."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..decode.sampling import Sampling, served_probabilities
from ..distill.attention import attention_over
from ..distill.batch import DistillBatch
from ..distill.chunked import chunked_loss, label_rows
from ..distill.chunked_targets import TargetHidden
from ..distill.mixture import Mixture, parse_mixture
from ..distill.trainee import LossSums
from ..errors import BadInput
from ..models.head import split
from ..models.loading import load_exactly
from ..models.quiet import one_line_errors
from ..models.target import Target
from ..models.vocabulary import d2t, kept_ids_of, t2d
from ..recipe import EarlyExitDrafter, ObjectiveSection
from .calibration import chances
from .checkpoint import load_head, save_head
from .early_exit import EarlyExit
from .exit_head import ExitHead
from .features import TargetFeatures

KIND = "early_exit"
_MEASURE_EVERY = 32  # steps: the metrics need the target's full head
_ROWS_AT_ONCE = 256
_DRAFTED = 4  # draft tokens of the implied block efficiency


class EarlyExitObjective(nn.Module):
    """An exit's adapter under a divergence from its target, at every supervised label. Nothing else is trained."""

    def __init__(self, head: ExitHead, target: Target, mixture: Mixture, served: Sampling, chunk_tokens: int = 256):
        """`served`: the sampling transforms that decoding will use (greedy: alpha is logged at temperature 1)."""
        super().__init__()
        self.head, self.mixture, self.chunk_tokens = head, mixture, chunk_tokens
        self._features = TargetFeatures(target, (head.exit_layer, -1))
        self._target = (split(target.model)[1], target.model)
        self._served = served_probabilities(served)
        self._rows_of = head.outputs.rows_of_ids()
        self._measures = False

    def begin_step(self, step: int, total_steps: int) -> None:
        """Whole steps are measured, every so many and the last: on all ranks alike, resumed or not."""
        self._measures = step % _MEASURE_EVERY == 0 or step + 1 == total_steps

    def forward(self, batch: DistillBatch) -> LossSums:
        """Sums over the batch's labels; in some steps also the metrics."""
        measure = self._measures or not self.training
        hidden, last = self._states(batch)
        read = self.read_by_head(batch, hidden).flatten(0, 1)[batch.predictors]
        head, outputs = self._target[0], self.head.outputs
        loss = chunked_loss(
            self.mixture,
            read,
            outputs.draft_head(0),
            TargetHidden(last, head, outputs.kept_ids, outputs.base) if self.mixture.needs_target or measure else None,
            label_rows(batch.labels, self._rows_of) if self.mixture.needs_tokens else None,
            batch.weights,
            chunk_tokens=self.chunk_tokens,
            metrics=measure,
            probabilities=self._served,
        )
        metrics: dict[str, tuple[Tensor | int | float, Tensor | int | float]] = {}
        if loss.alpha_sum is not None:
            metrics = {"alpha": (loss.alpha_sum, loss.positions), **self.measure(batch, read.detach(), last)}
        return LossSums(loss.sum, batch.supervised, metrics)

    @torch.no_grad()
    def _states(
        self, batch: DistillBatch
    ) -> tuple[Float[Tensor, "rows length hidden"], Float[Tensor, "labels hidden"]]:
        """The target's hidden states after the exit layer, and its last ones where labels are predicted. Where the latter
        are cached, as they come with the target's answers, only the first layers run.
        """
        exit_layer = self.head.exit_layer
        model: Any = self._target[1]
        if not isinstance(batch.teacher, Tensor):
            states = self._features(batch)
            return states[exit_layer], states[-1].flatten(0, 1)[batch.predictors]
        with attention_over(batch, model.base_model) as masks:
            hidden, _ = self.head.parts.first(
                input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=masks, use_cache=False
            )
        return hidden, self._features.at_labels(batch)

    def read_by_head(
        self, batch: DistillBatch, hidden: Float[Tensor, "rows length hidden"]
    ) -> Float[Tensor, "rows length hidden"]:
        """What the output projection reads at every position, from the hidden states of the exit layer."""
        adapter = self.head.adapter
        assert adapter is not None
        masks = batch.masks(adapter.config, "sdpa", adapter.dtype)
        adapted = adapter(hidden, attention_mask=masks, position_ids=batch.position_ids, use_cache=False)
        return self.head.read_by_head(hidden, adapted)

    @torch.no_grad()
    def measure(
        self, batch: DistillBatch, read: Float[Tensor, "labels hidden"], last: Float[Tensor, "labels hidden"]
    ) -> dict[str, tuple[Tensor | int | float, Tensor | int | float]]:
        """Shares of labels where the most likely token, or one of five, is the target's most likely one; and what a greedy
        chain of four would emit a pass if every position that has four labels began a step.
        """
        five = min(5, self.head.outputs.num_scored)
        parts = []
        for draft, target in zip(read.split(_ROWS_AT_ONCE), last.split(_ROWS_AT_ONCE), strict=True):
            top = self.head.outputs.to_target_ids(self.head.logits(draft).topk(five, -1).indices)
            parts.append(top == self._target[0](target).argmax(-1, keepdim=True))
        hits = torch.cat(parts) if parts else torch.zeros(0, five, dtype=torch.bool, device=read.device)
        following = chances(batch, hits[:, 0].float(), _DRAFTED)
        whole = (following >= 0).all(-1)
        return {
            "top1": (hits[:, 0].sum(), len(hits)),
            "top5": (hits.any(-1).sum(), len(hits)),
            "block_efficiency": ((1.0 + following[whole].cumprod(-1).sum(-1)).sum(), whole.sum()),
        }


class ExitInTraining(NamedTuple):
    """What training needs of an exit with an adapter."""

    objective: EarlyExitObjective
    drafter: EarlyExit


def exit_in_training(
    config: EarlyExitDrafter,
    objective: ObjectiveSection,
    target: Target,
    kept_ids: Int[Tensor, "kept"] | None,
    served: Sampling,
) -> ExitInTraining:
    """A new exit with its objective and the drafter that decodes with it as it is trained.

    Raises:
        BadInput: the target has no layers behind the exit.
    """
    if config.exit_layer >= target.num_layers:
        raise BadInput(
            f"drafter.exit_layer: {config.exit_layer}, the target has {target.num_layers} layers: expected 1 to "
            f"{target.num_layers - 1}"
        )
    head = ExitHead(target, config.exit_layer, config.adapter, config.intermediate_size, kept_ids)
    mixture = parse_mixture(objective.loss, objective.temperature)
    trained = EarlyExitObjective(head, target, mixture, served, objective.chunk_tokens)
    return ExitInTraining(trained, EarlyExit(head))


def save_exit(head: ExitHead, target: Target, folder: str | Path) -> None:
    """Write an exit: its adapter's tensors (``layers.0.…``, as Llama names them) and the ids of a cut vocabulary."""
    kept = head.outputs.kept_ids
    tensors = {} if head.adapter is None else {k: v.to(target.dtype) for k, v in head.adapter.state_dict().items()}
    if kept is not None:
        tensors |= {"d2t": d2t(kept), "t2d": t2d(kept, target.vocab_size)}
    config = {"model_type": KIND, "hidden_size": target.hidden_size, **head.saved_config()}
    save_head(folder, KIND, tensors, config, target)


def load_exit(folder: str | Path, target: Target) -> EarlyExit:
    """The drafter that :func:`save_exit` wrote.

    Raises:
        BadInput: it belongs to another target, or the folder's contents do not fit together.
    """
    folder = Path(folder).expanduser()
    known, tensors = load_head(folder, target)
    kept = None
    if "d2t" in tensors:
        kept = kept_ids_of(tensors.pop("d2t"), target.vocab_size)
        del tensors["t2d"]
    with one_line_errors(str(folder)):
        fields: dict[str, Any] = {key: known[key] for key in ("exit_layer", "adapter", "intermediate_size")}
        section = EarlyExitDrafter(**fields)
    with torch.random.fork_rng(devices=[]):
        head = ExitHead(target, section.exit_layer, section.adapter, section.intermediate_size, kept)
    if head.adapter is not None:
        load_exactly(head.adapter, tensors, str(folder))
        head.adapter.to(target.dtype)
    return EarlyExit(head.requires_grad_(False).eval())
