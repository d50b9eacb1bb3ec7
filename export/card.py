"""The model card of an export: what it is, how to serve it, and what was measured. Nothing is stated unmeasured."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BadInput
from ..eval.report import read_report
from ..eval.wording import cell, find, headline, number, rows, title
from ..models.folder import MANIFEST
from ..recipe_io import print_warning

Report = Mapping[str, Any]

_SETTINGS = {
    "prompts": "prompts",
    "max_new_tokens": "new tokens at most",
    "num_speculative_tokens": "draft tokens a step",
    "rule": "verification rule",
    "temperature": "temperature",
    "top_k": "top-k",
    "top_p": "top-p",
    "min_p": "min-p",
    "batch_size": "batch size",
    "dtype": "dtype",
    "backend": "backend",
}


class Facts(NamedTuple):
    """What a card says of the model itself."""

    target: str
    architecture: str
    num_parameters: int
    num_layers: int
    dtype: str


def find_report(checkpoint: Path) -> Report | None:
    """The report of this drafter that lies with its run: in the folder, beside it, or in a folder beside it.

    One that measured another drafter, or is older than the checkpoint, is left out; the latter is said on stderr.
    """
    run = checkpoint.resolve().parent
    for path in (checkpoint / "report.json", run / "report.json", *sorted(run.glob("*/report.json"))):
        if not path.is_file():
            continue
        try:
            report = read_report(path)
        except BadInput as problem:
            print_warning(f"{problem}; left out of the model card")
            continue
        if not is_about(report, checkpoint):
            continue
        if path.stat().st_mtime < (checkpoint / MANIFEST).stat().st_mtime:
            print_warning(f"{path} is older than the drafter; left out of the model card")
            continue
        return report
    return None


def is_about(report: Report, checkpoint: Path) -> bool:
    """Whether the drafter measured is this one; a relative path may have been relative to another folder."""
    measured = Path(report["drafter"]).expanduser()
    here = checkpoint.resolve().parts
    return measured.resolve().parts == here or (
        not measured.is_absolute() and ".." not in measured.parts and here[-len(measured.parts) :] == measured.parts
    )


def run_recipe(checkpoint: Path) -> str | None:
    """The resolved recipe of the run that a ``final/`` folder belongs to, if it lies beside it."""
    path = checkpoint.resolve().parent / "recipe.yaml"
    return path.read_text("utf-8") if path.is_file() else None


def served_length(report: Report | None) -> int | None:
    """Draft tokens a step: how many were best where it was measured, else how many were used; None for a tree."""
    run = None if report is None else find(report, "drafter")
    if run is None or run["tree_nodes"] is not None:
        return None
    return run["best_num_speculative_tokens"] or run["num_speculative_tokens"]


def model_card(facts: Facts, report: Report | None, recipe: str | None, other: str | None = None) -> str:
    """The text of ``README.md``. `other`: the drafter that `report` is about, where it is not this one."""
    parts = [_front_matter(facts), _introduction(facts), _usage(facts), _measured(report, facts, other)]
    if recipe is not None:
        parts.append(f"## Training\n\nWith draftsmith, from this recipe:\n\n```yaml\n{recipe.rstrip()}\n```\n")
    return "\n".join(parts)


def _front_matter(facts: Facts) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation"]
    lines.append("tags: [speculative-decoding, assisted-generation, draft-model]")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", facts.target) and not facts.target.startswith("."):
        lines.append(f"base_model: {facts.target}")
    return "\n".join(["---", *lines, "---", ""])


def _introduction(facts: Facts) -> str:
    return (
        f"# A draft model for {facts.target}\n\n"
        f"It proposes tokens that the target, {facts.target}, verifies in one forward pass (speculative decoding, "
        f"arXiv:2211.17192). {facts.architecture}, {facts.num_layers} layers, {facts.num_parameters:,} parameters, "
        f"{facts.dtype}; it shares the target's tokenizer. It was trained to be accepted by this target, not to answer "
        "on its own.\n"
    )


def _usage(facts: Facts) -> str:
    return f"""## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained({facts.target!r})
drafter = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
inputs = tokenizer("Once upon a time", return_tensors="pt")
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=64)
```
"""


def _measured(report: Report | None, facts: Facts, other: str | None) -> str:
    if report is None:
        return (
            "## Acceptance\n\nNot measured. `draftsmith eval TARGET DRAFTER --out DIR` measures it, and "
            "`draftsmith export ... --report DIR/report.json` writes it here.\n"
        )
    lines = ["## Acceptance", "", *headline(report), ""]
    if other is not None:
        lines += [f"What was measured is another drafter, {other}.", ""]
    if report["target"] != facts.target:
        lines += [f"Measured with {report['target']} as the target.", ""]
    runs = [run for run in (find(report, "start"), find(report, "drafter")) if run is not None]
    lines.append(" | ".join(["|", *(title(run) for run in runs), ""]).strip())
    lines.append("|---" * (len(runs) + 1) + "|")
    lines += [
        f"| {row.title} | {' | '.join(' '.join(cell(run, row)).rstrip() for run in runs)} |" for row in rows(report)
    ]
    for run in runs:
        if positions := run["per_position_acceptance"]:
            shares = ", ".join(number(share, 2) for share in positions)
            lines += ["", f"Acceptance by position ({title(run)}): {shares}."]
    asked = report["settings"]
    said = [f"{words} {asked[key]}" for key, words in _SETTINGS.items() if asked.get(key) is not None]
    machine = report["environment"].get("machine")
    where = f"; machine: {machine if isinstance(machine, str) else _flat(machine)}" if machine else ""
    lines += ["", f"Intervals are 95 % bootstrap intervals over {len(runs[-1]['prompts'])} prompts. Settings: "]
    lines[-1] += f"{', '.join(said)}{where}."
    return "\n".join(lines) + "\n"


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    return str(value)
