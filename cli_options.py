"""Arguments and options that several verbs share, and what is read from them. Imports no torch."""

from typing import Annotated, Any

import typer

from . import checks
from .eval.options import parse_lengths, parse_rule_options, parse_tree

Target = Annotated[str, typer.Argument(metavar="TARGET", help="Hub id, folder, .gguf file, or smollm2-135m-instruct.")]
Drafter = Annotated[
    str, typer.Argument(metavar="DRAFTER", help="A drafter's folder, a hub id, or one that needs no training.")
]
Prompts = Annotated[str, typer.Option(metavar="NAME|FILE.jsonl", help="'shipped', a file, or a datasets id.")]
Limit = Annotated[int | None, typer.Option(help="At most this many prompts.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to emit at most, per prompt.")]
NumSpeculativeTokens = Annotated[
    str,
    typer.Option(metavar="N|NAME", help="Draft tokens a step; heuristic, confidence or auto decide them step by step."),
]
Rule = Annotated[str, typer.Option(help="Verification rule.")]
RuleOptions = Annotated[
    list[str] | None, typer.Option("--rule-option", metavar="NAME=VALUE", help="An option of the rule; repeatable.")
]
Tree = Annotated[
    str | None,
    typer.Option(metavar="WIDTHS|FILE|dynamic|auto", help="Draft a tree: widths per depth (3,2,1) or paths."),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this share.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many tokens.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens above this share of the most likely one's.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: make seen tokens less likely.")]
BatchSize = Annotated[int, typer.Option(help="Prompts decoded side by side.")]
Backend = Annotated[str, typer.Option(help="Linear layers: auto, plain or packed.")]
Seed = Annotated[int, typer.Option(help="Of every random choice.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
DrafterDtype = Annotated[
    str,
    typer.Option(
        help="target (its dtype); auto: 16-bit weights where this CPU is faster with them; of a draft model also one by name."
    ),
]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; default: a GPU if there is one.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with a model.")]


def decoding_options(given: dict[str, Any], options: type) -> dict[str, Any]:
    """A verb's parameters as the fields of `options` (a dataclass), after a look at the files they name.

    Raises:
        BadInput: a file is missing, or a tree or a rule's option does not read.
    """
    for name, what in (("target", "TARGET"), ("drafter", "DRAFTER"), ("prompts", "--prompts")):
        if isinstance(given.get(name), str):
            (checks.check_drafter if name == "drafter" else checks.check_exists)(given[name], what)
    given = given | {
        "num_speculative_tokens": parse_lengths(given["num_speculative_tokens"]),
        "tree": parse_tree(given["tree"]),
        "rule_options": parse_rule_options(given["rule_option"] or []),
    }
    return {name: given[name] for name in options.__dataclass_fields__ if name in given}
