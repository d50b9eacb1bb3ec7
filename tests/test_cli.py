"""The command line: what reaches the rooms below, and one line with exit status 2 for what is wrong."""

import errno
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from draftsmith import __version__, cli
from draftsmith.errors import BadInput
from draftsmith.recipe_io import load_recipe

RECIPE = """\
target: {model: some/target}
drafter: {model: some/drafter}
data: {prompts: some/data}
engine: {steps: 10}
output: runs/example
"""
BELOW = ("train.run", "train.launch", "eval.run", "eval.audit", "export", "decode.stream", "models.target")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a recipe; no launcher around."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "file").write_text("")
    (tmp_path / "drafter").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run a command line in this process: (exit status, stdout, stderr)."""

    def command(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["draftsmith", *argv])
        with pytest.raises(SystemExit) as left:
            cli.main()
        code = left.value.code
        assert isinstance(code, int)
        out, err = capsys.readouterr()
        return code, out, err

    return command


@pytest.fixture
def below(monkeypatch: pytest.MonkeyPatch):
    """Put a function in the place of one that a verb calls; returns the list of its calls."""

    def replace(module: str, name: str, answer: Any = None) -> list[Any]:
        calls: list[Any] = []

        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append(SimpleNamespace(args=args, **kwargs))
            if isinstance(answer, BaseException):
                raise answer
            return answer

        fake = ModuleType(f"draftsmith.{module}")
        setattr(fake, name, called)
        monkeypatch.setitem(sys.modules, f"draftsmith.{module}", fake)
        return calls

    return replace


BAD_COMMAND_LINES = {
    "evall": "No such command 'evall'. Did you mean 'eval'? (see draftsmith --help)",
    "--foo": "No such option: --foo (see draftsmith --help)",
    "train": "Missing argument 'RECIPE' (see draftsmith train --help)",
    "train nowhere": "recipe 'nowhere': no such file, and no shipped recipe has this name",
    "train distil_smollm2": "did you mean 'distill_smollm2'?",
    "train r.yaml engine.step=5": "override 'engine.step=5': engine.step: unknown key (did you mean 'steps'?)",
    "train r.yaml engine.steps=x": "engine.steps: got 'x', expected a whole number",
    "train r.yaml data.prompts=./r.yml": "data.prompts: no such file or folder: ./r.yml (did you mean 'r.yaml'?)",
    "train r.yaml target.model=gone.gguf": "target.model: no such file: gone.gguf",
    "train r.yaml drafter={model: ./gone}": "drafter.model: no such file or folder: ./gone",
    "train r.yaml evaluate.prompts=gone.jsonl": "evaluate.prompts: no such file: gone.jsonl",
    "train r.yaml output=file/run": "output: cannot write to file/run (Not a directory)",
    "train r.yaml --num-processes 0": "Invalid value for '--num-processes'",
    "eval": "Missing argument 'TARGET' (see draftsmith eval --help)",
    "eval t": "Missing argument 'DRAFTER'",
    "eval ./gone drafter": "TARGET: no such file or folder: ./gone",
    "eval t ./draftr": "DRAFTER: no such file or folder: ./draftr (did you mean 'drafter'?)",
    "eval t d --prompts gone.jsonl": "--prompts: no such file: gone.jsonl",
    "eval t d --baseline a/b/c": "--baseline: no such file or folder: a/b/c",
    "audit t suffix:max_match=4,corpus=a/b/c.jsonl": "DRAFTER: corpus: no such file: a/b/c.jsonl",
    "eval t d --untrained ./gone": "--untrained: no such file or folder: ./gone",
    "eval t d --out file/x": "--out: cannot write to file/x",
    "eval t d --rule loosless": "--rule: got 'loosless', expected one of lossless, block",
    "eval t d --backend fast": "--backend: got 'fast', expected one of auto, plain, packed",
    "eval t d --dtype fp32": "--dtype: got 'fp32', expected one of auto, float32",
    "eval t d --limit 0": "--limit: got 0, expected a number >= 1",
    "eval t d --num-speculative-tokens 0": "--num-speculative-tokens: got 0, expected a number >= 1",
    "eval t d --num-speculative-tokens heuristics": "--num-speculative-tokens: unknown 'heuristics' "
    "(did you mean 'heuristic'?), expected a number or one of heuristic, confidence, auto",
    "eval t d --num-speculative-tokens 2.5": "unknown '2.5', expected a number or one of heuristic, confidence, auto",
    "audit t d --num-speculative-tokens confidence:treshold=1": "'confidence' has no option 'treshold=1' "
    "(did you mean 'threshold'?)",
    "audit t d --num-speculative-tokens confidence:threshold=2": "threshold is 2.0, expected a number from 0 to 1",
    "generate t --prompt hi --num-speculative-tokens auto:most=0": "most is 0, expected a whole number of at least 1",
    "generate t --prompt hi --num-speculative-tokens auto --tree 2,1": "--num-speculative-tokens: a tree has a depth",
    "eval t d --temperature -1": "--temperature: got -1.0, expected a number >= 0",
    "eval t d --temperature nan": "--temperature: got nan, expected a number >= 0",
    "eval t d --temperature warm": "Invalid value for '--temperature'",
    "eval t d --top-p 1.5": "--top-p: got 1.5, expected a share of the probability between 0 and 1",
    "eval t d --repetition-penalty 0": "--repetition-penalty: got 0.0, expected a number > 0",
    "eval t d --tree wide": "--tree wide: cannot be read",
    "eval t d --tree 3,0": "--tree 3,0: expected widths per depth such as 3,2,1",
    "eval t d --tree r.yaml": "--tree r.yaml: cannot be read",
    "eval t d --rule-option x": "--rule-option 'x': expected name=value",
    "eval t d --rule-option x=y": "--rule-option 'x=y': got 'y', expected a number",
    "audit t d --engine vllm": "--engine: got 'vllm', expected one of draftsmith, transformers",
    "audit t d --significance 2": "--significance: got 2.0, expected a number between 0 and 1",
    "audit t d --samples 0": "--samples: got 0, expected a number >= 1",
    "generate t": "Missing option '--prompt'",
    "generate t ./gone --prompt hi": "DRAFTER: no such file or folder: ./gone",
    "generate t --prompt hi --max-new-tokens 0": "--max-new-tokens: got 0",
    "export ./gone --to hf --out new": "CHECKPOINT: no such folder: gone",
    "export drafter --to hf": "Missing option '--out'",
    "export drafter --to hf --out full": "--out: full is not empty, expected a new folder",
    "export drafter --to hf --out file": "--out: file is a file, expected a new folder",
    "export drafter --to hf --out new --report gone.json": "--report: no such file",
    "recipes nowhere": "recipe 'nowhere': no such file",
}


@pytest.mark.parametrize(("command", "expected"), BAD_COMMAND_LINES.items(), ids=list(BAD_COMMAND_LINES))
def test_bad_input_is_one_line_before_anything_is_loaded(command, expected, run, monkeypatch):
    for module in BELOW:
        monkeypatch.setitem(sys.modules, f"draftsmith.{module}", None)  # importing one is an error now
    words = command.split(" ", 2) if "{" in command else command.split()
    status, out, err = run(*words)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err


def test_several_mistakes_are_several_lines(run):
    status, _, err = run("train", "r.yaml", "seed=x", "engine.steps=y")
    assert status == 2
    assert [line[:7] for line in err.splitlines()] == ["error: ", "error: "]


def test_bad_input_found_below_is_one_line_too(run, below):
    below("eval.run", "evaluate", BadInput("p.jsonl line 3: not valid JSON"))
    assert run("eval", "t", "d") == (2, "", "error: p.jsonl line 3: not valid JSON\n")


def test_a_bug_is_no_bad_input(run, below):
    below("eval.run", "evaluate", ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        run("eval", "t", "d")


def test_a_full_disk_is_one_line_wherever_it_is_met(run, below):
    below("eval.run", "evaluate", OSError(errno.ENOSPC, "No space left on device", "report.json"))
    assert run("eval", "t", "d") == (2, "", "error: report.json: cannot be written: No space left on device\n")
    below("eval.run", "evaluate", OSError(errno.ENOENT, "No such file or directory", "x"))
    with pytest.raises(FileNotFoundError):
        run("eval", "t", "d")


def test_train_hands_over_recipe_and_command(run, below):
    calls = below("train.run", "train", Path("runs/example"))
    status, _, err = run("train", "r.yaml", "optimizer.learning_rate=1e-3", "--resume", "seed=3")
    assert status == 0
    (call,) = calls
    assert call.args == (load_recipe("r.yaml", ["optimizer.learning_rate=1.0e-3", "seed=3"]),)
    assert call.resume is True
    assert call.command == ["draftsmith", "train", "r.yaml", "optimizer.learning_rate=1e-3", "--resume", "seed=3"]
    assert err.startswith("warning: override 'optimizer.learning_rate=1e-3'")
    assert Path("runs/example").is_dir()


def test_a_dry_run_prints_and_leaves_nothing(run, below):
    calls = below("train.run", "dry_run", "target: …")
    assert run("train", "r.yaml", "--dry-run") == (0, "target: …\n", "")
    assert calls[0].args[0].target.model == "some/target"
    assert not Path("runs").exists()


def test_more_processes_are_launched_once(run, below, monkeypatch):
    launched, trained = below("train.launch", "relaunch", 3), below("train.run", "train")
    argv = ["train", "r.yaml", "--num-processes", "2", "seed=1"]
    assert run(*argv)[0] == 3, "the launcher's exit status is ours"
    assert launched[0].args == (2, argv)
    assert not trained
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(*argv)[0] == 0
    assert len(launched) == len(trained) == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "a launcher has started 4 processes already" in run(*argv)[2]


@pytest.mark.parametrize("spelling", [["--local_rank=1"], ["--local_rank", "1"], ["--local-rank=1"]])
def test_the_local_rank_of_a_launcher_may_stand_before_the_verb(run, below, spelling):
    calls = below("train.run", "train")
    assert run(*spelling, "train", "r.yaml")[0] == 0
    assert len(calls) == 1
    assert "local" not in run("--help")[1]


def test_ranks_are_told_apart(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run("train", "nowhere")[2].startswith("error (rank 1): recipe 'nowhere'")


def test_an_interrupt_is_130_with_one_line(run, below):
    below("train.run", "train", KeyboardInterrupt())
    assert run("train", "r.yaml") == (130, "", "interrupted: --resume goes on from the last checkpoint\n")
    below("eval.run", "evaluate", KeyboardInterrupt())
    assert run("eval", "t", "d") == (130, "", "interrupted\n")


def test_eval_hands_over_every_option(run, below):
    calls = below("eval.run", "evaluate")
    Path("p.jsonl").write_text("{}")
    text = "--prompts p.jsonl --limit 5 --max-new-tokens 6 --num-speculative-tokens 7 --rule typical --temperature 0.8"
    text += " --rule-option epsilon=0.1 --top-p 0.9 --top-k 40 --min-p 0.05 --repetition-penalty 1.1 --batch-size 2"
    text += " --backend plain --seed 9 --no-speed --out out --dtype float32 --device cpu --trust-remote-code"
    text += " --drafter-dtype auto"
    assert run("eval", "t", "d", "--baseline", "b", "--untrained", "drafter", *text.split())[0] == 0
    given = calls[0].args[0].settings()
    assert json.loads(json.dumps(given)) == given
    assert given == {
        "target": "t", "drafter": "d", "baseline": "b", "untrained": "drafter", "prompts": "p.jsonl", "limit": 5,
        "max_new_tokens": 6, "num_speculative_tokens": 7, "rule": "typical", "rule_options": {"epsilon": 0.1},
        "tree": None, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1,
        "batch_size": 2, "backend": "plain", "seed": 9, "speed": False, "out": "out", "dtype": "float32",
        "drafter_dtype": "auto", "device": "cpu", "trust_remote_code": True,
    }  # fmt: skip


@pytest.mark.parametrize("given", ["heuristic", "confidence:threshold=0.3,most=6", "auto"])
def test_draft_tokens_a_step_are_a_number_or_decided_by_name(run, below, given):
    calls = [below(module, verb) for module, verb in (("eval.run", "evaluate"), ("cli_generate", "stream"))]
    calls.append(below("eval.audit", "audit", SimpleNamespace(passed=True, lines=[])))
    for words in (("eval", "t", "d"), ("generate", "t", "--prompt", "hi"), ("audit", "t", "d")):
        assert run(*words, "--num-speculative-tokens", given)[0] == 0
        assert run(*words, "--num-speculative-tokens", "3")[0] == 0
        assert run(*words)[0] == 0
    for of_a_verb in calls:
        assert [call.args[0].num_speculative_tokens for call in of_a_verb] == [given, 3, 4]


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("3,2,1", [3, 2, 1]),
        ("[3, 2]", [3, 2]),
        ("[[0], [1], [0, 0]]", [[0], [1], [0, 0]]),
        ("auto", "auto"),
        ("tree.json", [[0], [0, 1]]),
    ],
)
def test_a_tree_is_widths_paths_a_file_or_auto(run, below, text, tree):
    Path("tree.json").write_text("[[0], [0, 1]]\n")
    calls = below("eval.run", "evaluate")
    assert run("eval", "t", "d", "--tree", text)[0] == 0
    assert calls[0].args[0].tree == tree


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1)])
def test_the_verdict_of_an_audit_is_its_exit_status(run, below, passed, status):
    calls = below("eval.audit", "audit", SimpleNamespace(passed=passed, lines=["a", "b"]))
    assert run("audit", "t", "d", "--samples", "7", "--engine", "transformers") == (status, "a\nb\n", "")
    assert (calls[0].args[0].samples, calls[0].args[0].engine) == (7, "transformers")


def test_export_hands_over_the_format(run, below):
    calls = below("export", "export", Path("new"))
    assert run("export", "drafter", "--to", "hf", "--out", "new", "--report", "file") == (0, "new\n", "")
    assert calls == [SimpleNamespace(args=(Path("drafter"), "hf", Path("new")), report=Path("file"))]


def test_recipes_are_listed_by_name_and_printed(run):
    status, out, _ = run("recipes")
    assert status == 0
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()}
    assert listed["distill_smollm2"].startswith("A draft model for SmolLM2")
    status, out, _ = run("recipes", "distill_smollm2")
    assert status == 0
    assert out.startswith("# draftsmith train distill_smollm2\n")


def test_help_is_printed_without_torch():
    program = "import sys; sys.modules['torch'] = None; from draftsmith.cli import main; main()"
    for argv in ([], ["--help"], ["eval", "-h"], ["recipes"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), argv
        assert done.stdout
    assert done.stdout == f"{__version__}\n"


def test_the_module_and_the_script_are_the_same_command(folder):
    environment = {**os.environ, "PYTHONPATH": ""}
    script = Path(sys.executable).parent / "draftsmith"
    commands = [[sys.executable, "-m", "draftsmith"], *([[str(script)]] if script.exists() else [])]
    for command in commands:
        done = subprocess.run(
            [*command, "train", "r.yaml", "seed=x"], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr == "error: override 'seed=x': seed: got 'x', expected a whole number\n"
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="draftsmith")
    assert entry.load() is cli.main


def test_a_drafter_without_training_names_its_corpus(run, below, folder):
    """Its name ends like a file's, and is none."""
    (folder / "c.jsonl").write_text("")
    (folder / "p.jsonl").write_text("")
    name = "suffix:corpus=c.jsonl"
    calls = below("eval.run", "evaluate")
    assert run("eval", "t", name, "--baseline", name, "--prompts", "p.jsonl")[0] == 0
    assert (calls[0].args[0].drafter, calls[0].args[0].baseline) == (name, name)
