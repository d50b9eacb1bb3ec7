"""The command line. Every verb checks its input first and imports torch last; ``--help`` never does."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from . import __version__, checks
from . import cli_options as options
from .errors import BadInput
from .errors_disk import is_refusal

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # "[section.key=value]" is not markup
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Typer carries its own click in newer releases and imports it in older ones; this is the same class in both.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(__version__)
        raise typer.Exit
    return wanted


@app.callback()
def draftsmith(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """Train, measure and export drafters for lossless speculative decoding."""
    # The deepspeed launcher passes local_rank; it sets LOCAL_RANK too, which is what counts.


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A shipped recipe's name, or a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.key=value]...", help="Replace values of the recipe; read as YAML."),
    ] = None,
    num_processes: Annotated[int, typer.Option(min=1, help="Processes to train with on this machine.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Resolve, count and print; train nothing.")] = False,
) -> None:
    """Train a drafter as a recipe says."""
    from .recipe_io import load_recipe

    settings = load_recipe(recipe, overrides or (), _warn)
    checks.check_recipe_files(settings)
    if dry_run:
        from .train.run import dry_run as describe

        print(describe(settings, num_processes))
        return
    checks.check_writable(Path(settings.output).expanduser(), "output")
    if num_processes > 1 and _under_no_launcher(num_processes):
        from .train.launch import relaunch

        raise typer.Exit(relaunch(num_processes, sys.argv[1:]))
    from .train.run import train as run

    run(settings, resume=resume, command=["draftsmith", *sys.argv[1:]])


def _under_no_launcher(num_processes: int) -> bool:
    """True when this is the only process. Raises BadInput when a launcher started another number than asked for."""
    started = os.environ.get("WORLD_SIZE")
    if started not in (None, str(num_processes)):
        raise BadInput(f"--num-processes {num_processes}: a launcher has started {started} processes already")
    return started is None


@app.command("eval")
def evaluate(
    target: options.Target,
    drafter: options.Drafter,
    baseline: Annotated[str | None, typer.Option(metavar="DRAFTER", help="Another drafter, measured alike.")] = None,
    untrained: Annotated[
        str | None, typer.Option(metavar="DIR", help="The drafter before training, for alpha.")
    ] = None,
    prompts: options.Prompts = "shipped",
    limit: options.Limit = None,
    max_new_tokens: options.MaxNewTokens = 64,
    num_speculative_tokens: options.NumSpeculativeTokens = "4",
    rule: options.Rule = "lossless",
    rule_option: options.RuleOptions = None,
    tree: options.Tree = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    batch_size: options.BatchSize = 1,
    backend: options.Backend = "auto",
    seed: options.Seed = 0,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Decode and measure time, or alpha only.")] = True,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for report.json and report.html.")] = None,
    dtype: options.Dtype = "auto",
    drafter_dtype: options.DrafterDtype = "target",
    device: options.Device = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Measure a drafter: acceptance, tokens a target pass, speed-up, identity with the target."""
    from .eval.options import EvalOptions

    asked = EvalOptions(**options.decoding_options(locals(), EvalOptions))
    for name, what in ((asked.baseline, "--baseline"), (asked.untrained, "--untrained")):
        if name is not None:
            checks.check_drafter(name, what)
    if out is not None:
        checks.check_writable(out, "--out")
    from .eval.run import evaluate as run

    run(asked)


@app.command()
def audit(
    target: options.Target,
    drafter: options.Drafter,
    prompts: options.Prompts = "shipped",
    limit: options.Limit = None,
    max_new_tokens: options.MaxNewTokens = 64,
    num_speculative_tokens: options.NumSpeculativeTokens = "4",
    rule: options.Rule = "lossless",
    rule_option: options.RuleOptions = None,
    tree: options.Tree = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    samples: Annotated[int, typer.Option(help="Samples a prompt, each side.")] = 2000,
    joint_tokens: Annotated[int, typer.Option(help="Compare the joint distribution of this many first tokens.")] = 2,
    significance: Annotated[float, typer.Option(help="Chance of a false alarm, over all tests.")] = 0.01,
    engine: Annotated[str, typer.Option(help="draftsmith, or transformers: check its generate.")] = "draftsmith",
    batch_size: options.BatchSize = 1,
    backend: options.Backend = "auto",
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    drafter_dtype: options.DrafterDtype = "target",
    device: options.Device = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Is the output really the target's? Exit status 0 if so, 1 if not."""
    from .eval.options import AuditOptions

    asked = AuditOptions(**options.decoding_options(locals(), AuditOptions))
    from .eval.audit import audit as run

    result = run(asked)
    for line in result.lines:
        print(line)
    raise typer.Exit(0 if result.passed else 1)


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A drafter's folder, such as a run's final/.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="hf: a transformers model folder.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The new folder.")],
    report: Annotated[
        Path | None, typer.Option(metavar="REPORT.json", help="Measured acceptance for the model card.")
    ] = None,
) -> None:
    """Write a drafter in the format of the engine that will serve it."""
    if not checkpoint.is_dir():
        raise BadInput(f"CHECKPOINT: no such folder: {checkpoint}")
    if report is not None:
        checks.check_exists(str(report.absolute()), "--report")
    checks.check_new_folder(out, "--out")
    from .export import export as run

    print(run(checkpoint, to, out, report=report))


@app.command()
def generate(
    target: options.Target,
    drafter: Annotated[str | None, typer.Argument(metavar="[DRAFTER]", help="None: plain decoding.")] = None,
    *,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What to say to the target.")],
    max_new_tokens: options.MaxNewTokens = 256,
    num_speculative_tokens: options.NumSpeculativeTokens = "4",
    rule: options.Rule = "lossless",
    rule_option: options.RuleOptions = None,
    tree: options.Tree = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    backend: options.Backend = "auto",
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    drafter_dtype: options.DrafterDtype = "target",
    device: options.Device = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Answer a prompt as it is decoded; accepted draft tokens are coloured."""
    from .eval.options import GenerateOptions

    asked = GenerateOptions(**options.decoding_options(locals(), GenerateOptions))
    from .cli_generate import stream

    stream(asked)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Print this one.")] = None,
) -> None:
    """List the shipped recipes, or print one."""
    from .recipe_io import described_recipes, recipe_text

    if name is not None:
        print(recipe_text(name)[0], end="")
        return
    listed = described_recipes()
    width = max(map(len, listed), default=0)
    for each, description in listed.items():
        print(f"{each:{width}}  {description}".rstrip())


def _warn(line: str) -> None:
    if _rank() == 0:
        print(f"warning: {line}", file=sys.stderr)


def _rank() -> int:
    """This process among those of a launcher; 0 alone."""
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


def main() -> NoReturn:
    """Run the command line and exit: 0, 1 (a failed audit), 2 (bad input, one line an error), or 130 (interrupted)."""
    arguments = sys.argv[1:] or ["--help"]
    try:
        status = app(arguments, prog_name="draftsmith", standalone_mode=False) or 0
    except BadInput as error:
        status = _complain(str(error).splitlines())
    except OSError as error:
        if not is_refusal(error):
            raise
        status = _complain([f"{error.filename or 'a file'}: cannot be written: {error.strerror}"])
    except UsageError as error:
        status = _complain([_usage(error)])
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    if status == 130 and _rank() == 0:
        hint = ": --resume goes on from the last checkpoint" if "train" in arguments else ""
        print(f"interrupted{hint}", file=sys.stderr)
    sys.exit(status)


def _complain(lines: list[str]) -> int:
    who = f"error (rank {_rank()})" if _rank() else "error"
    for line in lines:
        print(f"{who}: {line}", file=sys.stderr)
    return 2


def _usage(error: Any) -> str:
    """A usage error in one line, with the command whose help explains it."""
    message = " ".join(error.format_message().split()).rstrip(".")
    command = error.ctx.command_path if error.ctx else "draftsmith"
    return f"{message} (see {command} --help)"
