"""The report of an evaluation: built from records, validated, written as ``report.json`` and ``report.html``."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from ..errors import BadInput
from . import cost_model, stats
from .html import render
from .records import PromptRecord, RunRecord
from .schema import Report


def build_report(
    *,
    target: str,
    drafter: str,
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
    runs: Sequence[RunRecord],
    training: Mapping[str, Sequence[Any]] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """The report as plain, JSON-ready data (keys: :class:`~draftsmith.eval.schema.Report`), without a NaN.

    `training` is {"steps": …, "loss": …, "alpha": …}, lists of one length; `seed` drives the bootstrap. Runs over the
    same prompts share their resamples. Raises ValueError when records contradict each other (more accepted than
    drafted, two runs of one name) or a run holds no prompt.
    """
    report = {
        "schema": 1,
        "target": target,
        "drafter": drafter,
        "settings": dict(settings),
        "environment": dict(environment),
        "runs": [run_figures(run, seed) for run in runs],
    }
    if training is not None:
        report["training"] = {name: list(values) for name, values in training.items()}
    report = without_nan(report)
    Report.model_validate(report)
    return report


def run_figures(run: RunRecord, seed: int = 0) -> dict[str, Any]:
    """All that the report says of one run. Raises ValueError for a run without prompts."""
    if not run.prompts:
        raise ValueError(f"run {run.name!r} has no prompts")
    categories: dict[str, list[PromptRecord]] = {}
    for prompt in run.prompts:
        categories.setdefault(prompt.category, []).append(prompt)
    return {
        "name": run.name,
        "label": run.label,
        "num_speculative_tokens": run.num_speculative_tokens,
        "tree_nodes": run.tree_nodes,
        "verification_cost": run.verification_cost,
        "passes_per_step": run.passes,
        "drafter_parameters_read": run.drafter_parameters_read,
        "target_parameters_read": run.target_parameters_read,
        **_figures(run, run.prompts, seed),
        "categories": {name: _figures(run, prompts, seed) for name, prompts in categories.items()},
        "prompts": [dataclasses.asdict(prompt) for prompt in run.prompts],
    }


def _figures(run: RunRecord, prompts: Sequence[PromptRecord], seed: int) -> dict[str, Any]:
    weights = stats.resampling_weights(len(prompts), seed=seed)
    figures = stats.summarise(prompts, weights)
    figures |= {"cost_ratio": run.cost_ratio, **_expectations(run, prompts, weights)}
    figures |= {"mbsu": None, "mbsu_ci": None}
    tau, passes = figures["block_efficiency"], run.passes
    drafter, target = run.drafter_parameters_read, run.target_parameters_read
    if tau is not None and passes is not None and drafter is not None and target:
        figures["mbsu"] = cost_model.mbsu(tau, passes, drafter, target)
        if ends := figures["block_efficiency_ci"]:
            figures["mbsu_ci"] = [cost_model.mbsu(end, passes, drafter, target) for end in ends]
    return figures


def _expectations(run: RunRecord, prompts: Sequence[PromptRecord], weights: np.ndarray) -> dict[str, Any]:
    """What the cost model expects; None where acceptance or costs were not measured.

    A tree verifies its nodes and one token more. How other trees would fare does not follow from one tree's acceptance,
    so only a chain gets a best length and a break-even alpha.
    """
    names = ("expected_speedup", "expected_speedup_ci", "expected_speedup_by_length")
    expected: dict[str, Any] = dict.fromkeys((*names, "best_num_speculative_tokens", "break_even_alpha"))
    n, ratio, curve, counts = (
        run.num_speculative_tokens,
        run.cost_ratio,
        run.verification_cost,
        stats.positions(prompts),
    )
    if not n or ratio is None or not curve:
        return expected
    passes = None if run.sequential else run.passes
    if run.tree_nodes is None:
        expected["break_even_alpha"] = cost_model.break_even_alpha(n, ratio, curve, run.passes)
    if counts is None:
        return expected
    steps = np.array([float(prompt.target_calls or 0) for prompt in prompts])[:, None]
    own = passes if run.tree_nodes is None else run.passes
    nodes = np.array([float(prompt.drafted_nodes or 0) for prompt in prompts])[:, None]

    def speedup(accepted: np.ndarray, drafted: np.ndarray, steps: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        of_all = None if run.tree_nodes is None else nodes[..., 0]
        return cost_model.counted_speedup(accepted, drafted, steps[..., 0], ratio, curve, own, of_all)

    found = stats.estimate(speedup, weights, counts.accepted, counts.drafted, steps, nodes)
    expected["expected_speedup"] = stats.nullable(found.pooled)
    expected["expected_speedup_ci"] = stats.intervals(found.low, found.high)
    if run.tree_nodes is None:
        conditional = stats.ratio(counts.accepted.sum(axis=0), counts.tested.sum(axis=0))
        drafting = float(counts.drafted[:, 0].sum() / max(steps.sum(), 1.0))
        by_length = cost_model.speedup_by_length(conditional, ratio, curve, passes, drafting)
        expected["expected_speedup_by_length"] = stats.nullable(by_length)
        if np.isfinite(by_length).any():
            expected["best_num_speculative_tokens"] = cost_model.best_num_speculative_tokens(
                conditional, ratio, curve, passes, drafting
            )
    return expected


def without_nan(value: Any) -> Any:
    """The same data in JSON's types: no NaN or infinity (None instead), no numpy scalar, no tuple, no path."""
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [without_nan(item) for item in value]
    if isinstance(value, np.generic):
        return without_nan(value.item())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def write_report(report: Mapping[str, Any], out_dir: str | Path) -> tuple[Path, Path]:
    """Write ``report.json`` and ``report.html`` into `out_dir` (made if missing); returns their paths.

    Each file is complete or absent, never half written. Raises BadInput when the folder cannot be written, ValueError
    for a report that does not satisfy the schema.
    """
    Report.model_validate(report)
    folder = Path(out_dir)
    texts = {"report.json": json.dumps(report, indent=1, allow_nan=False) + "\n", "report.html": render(report)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            _write_atomically(folder / name, text)
    except OSError as error:
        raise BadInput(f"{folder}: cannot write the report there ({error.strerror or error})") from error
    return folder / "report.json", folder / "report.html"


def read_report(path: str | Path) -> dict[str, Any]:
    """A report from ``report.json`` or the folder that holds it. Raises BadInput when it is missing or not schema 1."""
    path = Path(path)
    path = path / "report.json" if path.is_dir() else path
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        Report.model_validate(report)
    except OSError as error:
        raise BadInput(f"{path}: cannot read the report ({error.strerror or error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "report"
        raise BadInput(f"{path}: not a report of schema 1, {where}: {first['msg']}") from error
    except ValueError as error:
        raise BadInput(f"{path}: not JSON ({error})") from error
    return report


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
