"""What an evaluation, an audit and a generation are asked to do: plain data, checked when made. Imports no torch."""

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..decode.length_names import parse_policy
from ..decode.rules import RULES, rule_options
from ..decode.tree_names import TREES, parse_tree_name
from ..errors import BadInput, nearest

Tree = list[int] | list[list[int]] | str
BACKENDS = ("auto", "plain", "packed")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DRAFTER_DTYPES = ("target", *DTYPES)
LENGTHS = "--num-speculative-tokens"
ENGINES = ("draftsmith", "transformers")


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """How the target and the drafter decode together.

    Raises:
        BadInput: when made with a value out of range or a name that does not exist.
    """

    target: str  # hub id, folder, .gguf, or the demo target's name
    num_speculative_tokens: int | str = 4  # draft tokens a step, or the name of what decides them ("confidence")
    rule: str = "lossless"
    rule_options: dict[str, Any] = field(default_factory=dict)
    tree: Tree | None = None  # widths per depth, root-to-node paths, "dynamic:…", "auto"; None: a chain
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    max_new_tokens: int = 64
    backend: str = "auto"
    seed: int = 0
    dtype: str = "auto"
    drafter_dtype: str = "target"  # of a draft model
    device: str | None = None  # None: CUDA when there is one
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _among("--rule", self.rule, tuple(RULES))
        rule_options(self.rule, self.rule_options)
        if self.rule == "block" and self.tree is not None:
            raise BadInput("--rule block: block verification is defined on a chain, use multi with a tree")
        _among("--backend", self.backend, BACKENDS)
        _among("--dtype", self.dtype, DTYPES)
        _among("--drafter-dtype", self.drafter_dtype, DRAFTER_DTYPES)
        if isinstance(self.num_speculative_tokens, int):
            _at_least("num_speculative_tokens", self.num_speculative_tokens, 1)
        else:
            parse_policy(self.num_speculative_tokens, LENGTHS)
            if self.tree is not None:
                raise BadInput(f"{LENGTHS}: a tree has a depth of its own, expected a number beside --tree")
        counts = ("max_new_tokens", "top_k", "batch_size", "limit", "samples", "joint_tokens")
        for name in counts:
            _at_least(name, getattr(self, name, None), 1)
        for name in ("temperature", "min_p", "seed"):
            _at_least(name, getattr(self, name), 0)
        for name, value in (("top-p", self.top_p), ("min-p", self.min_p)):
            if value is not None and not (0 < value <= 1 or (value == 0 and name == "min-p")):
                raise BadInput(f"--{name}: got {value}, expected a share of the probability between 0 and 1")
        if not self.repetition_penalty > 0:
            raise BadInput(f"--repetition-penalty: got {self.repetition_penalty}, expected a number > 0")

    def settings(self) -> dict[str, Any]:
        """Everything as JSON-ready data, for the report."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class EvalOptions(DecodingOptions):
    """What ``draftsmith eval`` measures. The prompts are read before any model is loaded."""

    drafter: str  # a drafter's folder, a hub id, or the name of a drafter that needs no training
    prompts: str = "shipped"  # "shipped": our evaluation prompts; else a file or a `datasets` id
    limit: int | None = None  # at most this many prompts
    batch_size: int = 1
    baseline: str | None = None  # another drafter, measured in the same way
    untrained: str | None = None  # a drafter's folder before training: measured teacher-forced only
    speed: bool = True  # False: teacher-forced figures only, nothing is decoded and timed
    out: Path | None = None  # folder for report.json and report.html


@dataclass(frozen=True, kw_only=True)
class AuditOptions(DecodingOptions):
    """What ``draftsmith audit`` proves.

    At temperature 0: token identity with plain decoding. Above: a two-sample test on the joint distribution of the
    first tokens after fixed prompts (exact enumeration where the vocabulary is tiny).
    """

    drafter: str
    prompts: str = "shipped"
    limit: int | None = None
    batch_size: int = 1
    samples: int = 2000  # per prompt and side
    joint_tokens: int = 2  # how many first tokens the joint distribution is over
    significance: float = 0.01  # over all tests together (Holm)
    engine: str = "draftsmith"  # or "transformers": check generate(assistant_model=...) itself

    def __post_init__(self) -> None:
        super().__post_init__()
        _among("--engine", self.engine, ENGINES)
        if not 0 < self.significance < 1:
            raise BadInput(f"--significance: got {self.significance}, expected a number between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(DecodingOptions):
    """What ``draftsmith generate`` answers, and with which drafter (None: plain decoding)."""

    prompt: str
    drafter: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree == "auto":
            raise BadInput("--tree auto: `draftsmith eval` chooses and names a tree, generate takes its paths")


def _among(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise BadInput(f"{option}: got {value!r}, expected one of {', '.join(known)}{nearest(value, known)}")


def _at_least(name: str, value: int | float | None, least: int) -> None:
    if value is not None and not least <= value < float("inf"):
        raise BadInput(f"--{name.replace('_', '-')}: got {value}, expected a number >= {least}")


def parse_lengths(text: str) -> int | str:
    """Draft tokens a step from the command line: a number, or a name with options, which are not looked at here."""
    return int(text) if re.fullmatch(r"\s*[+-]?\d+\s*", text, re.ASCII) else text


def parse_tree(text: str | None) -> Tree | None:
    """A tree from the command line.

    Widths per depth (``3,2,1``), a YAML or JSON list of root-to-node paths, a file that holds either, ``dynamic`` (with
    options: ``dynamic:num_nodes=16,width=4``), or ``auto``.

    Raises:
        BadInput: neither of these, or the file cannot be read.
    """
    if text is None or text == "auto":
        return text
    if text.partition(":")[0] in TREES:
        parse_tree_name(text, "--tree")
        return text
    inline = re.fullmatch(r"\s*(\[.*|[\d,\s]+)", text, re.DOTALL)
    try:
        source = text if inline else Path(text).expanduser().read_text("utf-8")
        value = yaml.safe_load(source if source.lstrip().startswith("[") else f"[{source}]")
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        raise BadInput(f"--tree {text}: cannot be read ({' '.join(str(problem).split())})") from problem
    if _all_ints(value, least=1) or (isinstance(value, list) and value and all(_all_ints(item) for item in value)):
        return value
    expected = "widths per depth such as 3,2,1, a list of root-to-node paths, a file with either, dynamic, or auto"
    raise BadInput(f"--tree {text}: expected {expected}")


def _all_ints(value: Any, least: int = 0) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) and item >= least for item in value)


def parse_rule_options(texts: list[str]) -> dict[str, Any]:
    """``name=value`` options of a verification rule, values read as YAML.

    Raises:
        BadInput: not of this form, or a value that is not a number.
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value_text = text.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput(f"--rule-option {text!r}: expected name=value")
        try:
            options[name] = float(value_text)
        except ValueError:
            raise BadInput(f"--rule-option {text!r}: got {value_text!r}, expected a number") from None
    return options
