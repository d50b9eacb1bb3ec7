"""Which blocks to skip: a seeded search over what sets of them are expected to be worth, the best ones then decoded with.

The paper (arXiv:2309.08168, section 3.2) searches by Bayesian optimisation over the measured time a token. Here a trial
weighs a set without a clock: its acceptance over calibration texts in one pass, and the time of its drafting step from
what attention and MLP blocks were measured to take. That is the same in every run, and a trial costs a fraction of
decoding. The search begins with the blocks that change the least of what passes through them (as in arXiv:2403.03853),
some more and some fewer, and goes on from the best set so far by skipping a block more, or fewer, or another one. At the
end the best few decode calibration prompts, and the one with the most tokens a second is taken.
"""

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data.encoded_set import EncodedSet
from ..decode.costs import time_passes
from ..decode.fused import fuse_as
from ..decode.loop import speculative_generate
from ..decode.sampling import Sampling
from ..distill.teacher import last_hidden
from ..models.head import split
from ..models.target import Target
from ..models.views import BlockSkipper, blocks_of, layers_of
from ..recipe import LayerSkipDrafter
from .calibration import Calibration, Worth
from .layer_skip import AdaptiveExit, LayerSkip, Skipped

_FIRST_SHARES = (0.2, 0.35, 0.5, 0.65)  # of all blocks, in the first trials
_TRIES = 50  # changes drawn until one gives a set that was not tried before


class Trial(NamedTuple):
    """A set of skipped blocks, and what it is expected to be worth."""

    skipped: Skipped
    worth: Worth


class LayerSkipSearch:
    """Looks for blocks to skip, a trial at a time. Trials depend on the seed and the trials before, not on how often the
    search was interrupted.
    """

    def __init__(
        self,
        config: LayerSkipDrafter,
        target: Target,
        encoded: EncodedSet,
        served: Sampling,
        seed: int,
        seconds: float = 8.0,
    ):
        """`encoded`: the training set, of which calibration texts are taken; `seconds` to measure costs for."""
        self.config, self.target, self.encoded, self.served, self.seed = config, target, encoded, served, seed
        self.seconds = seconds
        self.skipper = BlockSkipper(target.model)
        self.drafter = LayerSkip(target, Skipped(), self._exit(), self.skipper)
        self.found: dict[str, Any] = {}  # for the checkpoint
        self.exhausted = False  # whether every set within reach was tried
        self.trials: list[Trial] = []
        self._ready: _Measured | None = None

    @property
    def best(self) -> Trial | None:
        """The best trial so far."""
        return max(self.trials, key=lambda trial: trial.worth.speedup, default=None)

    def prepare(self) -> None:
        """Measure what all trials need: costs, the target's predictions, every block's influence."""
        if self._ready is None:
            self._make_ready(None)

    def trial(self) -> dict[str, float]:
        """Weigh one set more; figures for the log, none if there is no other set."""
        self.prepare()
        skipped = self._next()
        if skipped is None:
            self.exhausted = True
            return {}
        trial = Trial(skipped, self._weigh(skipped))
        self.trials.append(trial)
        best = self.best or trial
        self.drafter.skip(best.skipped)
        return {
            "expected_speedup": trial.worth.speedup,
            "acceptance": trial.worth.acceptance,
            "blocks_skipped": len(skipped.attention) + len(skipped.mlp),
            "best_expected_speedup": best.worth.speedup,
        }

    def finish(self) -> dict[str, Any]:
        """Decode calibration prompts with the best few sets and take the fastest; what was found out."""
        self.prepare()
        ranked = sorted(self.trials, key=lambda trial: -trial.worth.speedup)[: self.config.finalists]
        rates = self._tokens_per_second(ranked)
        chosen = max(range(len(ranked)), key=lambda i: rates[i])
        self.drafter.skip(ranked[chosen].skipped)
        worth = ranked[chosen].worth
        self.found |= {
            "trials": len(self.trials),
            "expected_speedup": worth.speedup,
            "acceptance": worth.acceptance,
            "num_speculative_tokens": worth.num_tokens,
            "tokens_per_second": rates[chosen],
            "finalists": [
                {"skip_attention": trial.skipped.attention, "skip_mlp": trial.skipped.mlp, "tokens_per_second": rate}
                for trial, rate in zip(ranked, rates, strict=True)
            ],
        }
        return self.found

    def state_dict(self) -> dict[str, Any]:
        """The trials so far and what they were weighed by, in JSON."""
        costs = None if self._ready is None else self._ready.costs._asdict()
        trials = [[list(trial.skipped.attention), list(trial.skipped.mlp), *trial.worth] for trial in self.trials]
        return {"costs": costs, "trials": trials}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after these trials, with the costs that they were weighed by."""
        if state["costs"] is not None:
            self._make_ready(_Costs(**state["costs"]))
        self.trials = [
            Trial(Skipped(tuple(attention), tuple(mlp)), Worth(*worth)) for attention, mlp, *worth in state["trials"]
        ]
        self.exhausted = False
        if self.best is not None:
            self.drafter.skip(self.best.skipped)

    def _make_ready(self, costs: "_Costs | None") -> None:
        if self._ready is not None:
            self._ready = self._ready if costs is None else self._ready._replace(costs=costs)
            return
        calibration = Calibration(self.target, self.encoded, self.config.calibration_tokens, self.served, self.seed)
        costs = costs or _costs(calibration, self.skipper, self.config.num_speculative_tokens, self.seconds)
        self._ready = _Measured(calibration, costs, _influence(self.target, calibration))

    def _exit(self) -> AdaptiveExit | None:
        return None if self.config.draft_exit is None else AdaptiveExit(self.config.draft_exit)

    def _next(self) -> Skipped | None:
        """A set that was not tried before; None: none was found."""
        assert self._ready is not None
        tried, number = {trial.skipped for trial in self.trials}, len(self.trials)
        influence = self._ready.influence
        blocks = sorted(influence, key=lambda block: influence[block])
        if number < len(_FIRST_SHARES):
            first = _skipped(set(blocks[: max(1, round(_FIRST_SHARES[number] * len(blocks)))]))
            if first not in tried:
                return first
        rng = random.Random(f"{self.seed}-{number}")
        best = self.best.skipped if self.best is not None else Skipped()
        current = {(layer, 0) for layer in best.attention} | {(layer, 1) for layer in best.mlp}
        for attempt in range(_TRIES):
            # The longer nothing new is found, the more blocks change at a time.
            changed = _skipped(_changed(current, blocks, rng, 1 + attempt // 10))
            if changed not in tried:
                return changed
        return None

    @torch.no_grad()
    def _weigh(self, skipped: Skipped) -> Worth:
        assert self._ready is not None
        calibration, costs = self._ready.calibration, self._ready.costs
        view = self.skipper.view(skipped.attention, skipped.mlp)
        backbone, head = split(view)
        hidden = last_hidden(backbone, calibration.batch).flatten(0, 1)[calibration.batch.predictors]
        seconds = costs.whole - len(skipped.attention) * costs.attention - len(skipped.mlp) * costs.mlp
        return calibration.worth(calibration.acceptance(hidden, head), max(seconds, 0.0), costs.verification)

    def _tokens_per_second(self, ranked: list[Trial]) -> list[float]:
        """Each one's, decoding a few calibration prompts in turns."""
        assert self._ready is not None
        emitted, seconds = [0] * len(ranked), [0.0] * len(ranked)
        most = self.config.num_speculative_tokens
        drafters = [LayerSkip(self.target, trial.skipped, self._exit(), self.skipper) for trial in ranked]
        for example in self._ready.calibration.examples[: self.config.calibration_prompts]:
            prompt = torch.tensor([example.input_ids[: example.loss_mask.index(True)]], device=self.target.device)
            for i, (drafter, trial) in enumerate(zip(drafters, ranked, strict=True)):
                start = time.perf_counter()
                stats = speculative_generate(
                    self.target,
                    drafter,
                    prompt,
                    max_new_tokens=self.config.calibration_new_tokens,
                    num_speculative_tokens=most if self.config.draft_exit else trial.worth.num_tokens,
                    seed=self.seed,
                    **self.served._asdict(),
                ).stats
                seconds[i] += time.perf_counter() - start
                emitted[i] += stats.emitted
        return [count / max(spent, 1e-9) for count, spent in zip(emitted, seconds, strict=True)]


class _Costs(NamedTuple):
    """Seconds."""

    whole: float  # of a pass over one token
    attention: float  # of one attention block in it
    mlp: float
    verification: list[float]  # [n]: of a pass over n + 1 tokens


class _Measured(NamedTuple):
    calibration: Calibration
    costs: _Costs
    influence: dict[tuple[int, int], float]  # of (layer, 0: attention or 1: MLP)


def _costs(calibration: Calibration, skipper: BlockSkipper, most: int, seconds: float) -> _Costs:
    every, whole = range(skipper.num_layers), calibration.target.model
    views = {"whole": whole, "attention": skipper.view(every, []), "mlp": skipper.view([], every)}
    for view in (views["attention"], views["mlp"]):
        fuse_as(view, whole)
    times = time_passes(views, calibration.prompt, seconds / 2)
    verification = calibration.costs(most, seconds / 2).verification
    spared = {block: max(times["whole"] - times[block], 0.0) / skipper.num_layers for block in ("attention", "mlp")}
    return _Costs(times["whole"], spared["attention"], spared["mlp"], [verification[n] for n in sorted(verification)])


@torch.no_grad()
def _influence(target: Target, calibration: Calibration) -> dict[tuple[int, int], float]:
    """How much every block changes the residual stream: |what it adds| / |what it is added to|, a mean over tokens."""
    found: dict[tuple[int, int], float] = {}
    stream: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream.append(args[0] if args else kwargs["hidden_states"])

    def added(block: tuple[int, int]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            update = (output[0] if isinstance(output, tuple) else output).float()
            share = update.norm(dim=-1) / stream[-1].float().norm(dim=-1).clamp(min=1e-9)
            found[block] = float(share[calibration.batch.segment_ids >= 0].mean())

        return hook

    hooks = []
    for number, (layer, blocks) in enumerate(zip(layers_of(target.model), blocks_of(target.model), strict=True)):
        hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        hooks += [module.register_forward_hook(added((number, kind))) for kind, module in enumerate(blocks)]
    try:
        last_hidden(split(target.model)[0], calibration.batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _skipped(blocks: set[tuple[int, int]]) -> Skipped:
    attention, mlp = (tuple(sorted(layer for layer, kind in blocks if kind == wanted)) for wanted in (0, 1))
    return Skipped(attention, mlp)


def _changed(
    current: set[tuple[int, int]], blocks: list[tuple[int, int]], rng: random.Random, count: int
) -> set[tuple[int, int]]:
    """`current` with `count` blocks skipped more, no longer, or exchanged. `blocks` go by influence, the least first;
    blocks of little influence are likelier to be skipped, those of much to be taken back.
    """
    changed = set(current)
    for _ in range(count):
        outside, inside = [b for b in blocks if b not in changed], [b for b in blocks if b in changed]
        move = rng.choice(("more", "fewer", "exchange"))
        if move != "more" and inside:
            changed.discard(inside[-1 - _near_first(rng, len(inside))])
        if move != "fewer" and outside:
            changed.add(outside[_near_first(rng, len(outside))])
    return changed


def _near_first(rng: random.Random, length: int) -> int:
    """An index, small ones likelier."""
    return min(int(length * rng.random() ** 2), length - 1)
