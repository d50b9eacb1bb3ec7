"""The command line from a recipe to an exported drafter, each verb as a process of its own; and what bad input gets."""

import faulthandler
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith import cli
from draftsmith.eval.report import read_report
from draftsmith.models.cut import cut_layers
from draftsmith.models.draft_lm import cut_vocabulary, save_draft_lm
from draftsmith.models.target import load_target


class Done(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command line in a forked process (imports are paid for once): exit status, stdout, stderr."""
    for name in ("eval.run", "export", "train.run", "decode.stream"):  # what the verbs import last
        importlib.import_module(f"draftsmith.{name}")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def command(*argv):
        out, err = tmp_path / ".out", tmp_path / ".err"
        child = os.fork()
        if child == 0:
            status = 99
            faulthandler.dump_traceback_later(600, exit=True)  # a fork that hangs is a failure that says where
            try:
                sys.stdout, sys.stderr = out.open("w"), err.open("w")
                os.dup2(sys.stdout.fileno(), 1)
                os.dup2(sys.stderr.fileno(), 2)
                sys.argv = ["draftsmith", *map(str, argv)]
                cli.main()
            except SystemExit as left:
                status = left.code if isinstance(left.code, int) else 98
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Done(status, out.read_text(), err.read_text())

    return command


def recipe_text(chat_folder: Path) -> str:
    return yaml.safe_dump(
        {
            "target": {"model": str(chat_folder / "model"), "dtype": "float32"},
            "drafter": {"kind": "model", "init": {"layers": [0]}},
            "data": {
                "prompts": [str(chat_folder / "chats.jsonl"), "self"],
                "num_self_prompts": 8,
                "responses": "target",
                "max_length": 64,
                "max_new_tokens": 12,
                "generation_batch": 8,
                "cache": "hidden",
            },
            "optimizer": {"learning_rate": 1.0e-2},
            "engine": {"steps": 8, "tokens_per_step": 512, "checkpoint_every": 4},
            "evaluate": {"prompts": str(chat_folder / "prompts.jsonl"), "every": 4, "max_new_tokens": 12},
            "output": "runs/example",
        }
    )


@pytest.fixture(scope="module")
def workplace(chat_folder, tmp_path_factory):
    """A folder with ``recipe.yaml`` and the finished run of it, made by the installed program."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "recipe.yaml").write_text(recipe_text(chat_folder))
    program = Path(sys.executable).with_name("draftsmith")
    start = [str(program)] if program.exists() else [sys.executable, "-m", "draftsmith"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [*start, "train", "recipe.yaml"],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    (folder / "log.txt").write_text(done.stdout)
    (folder / "errors.txt").write_text(done.stderr)
    return folder


def test_training_says_what_it_does_from_the_first_line_to_the_last(workplace):
    lines = (workplace / "log.txt").read_text().splitlines()
    assert lines[0] == "engine: one process, ZeRO stage none, world size 1, cpu"
    for start in (
        "target: ",
        "the target writes and answers prompts: 56 prompts",
        "answers: ",
        "the target answers the evaluation prompts: 16 prompts",
        "data: ",
        "drafter: ",
        "training: 8 steps",
        "held-out prompts after step 8: alpha 0.",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert lines[-1] == "finished: the drafter is in runs/example/final"
    assert "Traceback" not in (workplace / "errors.txt").read_text()
    run_folder = workplace / "runs" / "example"
    assert {entry.name for entry in run_folder.iterdir()} >= {
        *("recipe.yaml", "provenance.json", "metrics.jsonl", "tensorboard"),
        *("budget.json", "data", "start", "final", "latest", "step_000004", "step_000008"),
    }
    (session,) = json.loads((run_folder / "provenance.json").read_text())["sessions"]
    assert session["command"] == "draftsmith train recipe.yaml"
    assert session["finished"]
    assert session["versions"]["torch"] == torch.__version__


def test_a_dry_run_counts_and_touches_nothing(run, chat_folder, tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipe_text(chat_folder))
    done = run("train", "recipe.yaml", "--dry-run", "drafter={kind: model, init: {layers: [0]}, vocabulary: 100}")
    assert done.status == 0, done.err
    target = AutoModelForCausalLM.from_pretrained(chat_folder / "model")
    total = sum(parameter.numel() for parameter in target.parameters())
    layer = sum(parameter.numel() for parameter in target.model.layers[0].parameters())
    own = target.model.embed_tokens.weight.numel() + layer + 48 + 100 * 48
    lines = done.out.splitlines()
    assert f"target: {chat_folder}/model, {total:,} parameters" in lines
    trained = own - target.model.embed_tokens.weight.numel()
    assert f"drafter: model, {own:,} parameters, {trained:,} of them trained, 100 ids scored" in lines
    data = "data: 48 given prompts, prompts written by the target: 8; answered by the target with at most 12 tokens"
    assert f"{data} in float32" in lines
    assert "training: in fp32" in lines
    assert "evaluation: 16 prompts" in lines
    assert yaml.safe_load(done.out.split("\n\n")[0])["engine"]["steps"] == 8
    assert not (tmp_path / "runs").exists()


def test_resuming_a_finished_run_says_so(run, workplace):
    done = run("train", workplace / "recipe.yaml", f"output={workplace}/runs/example", "--resume")
    assert done.status == 0, done.err
    assert "is finished: the drafter is in" in done.out.splitlines()[-1]


def test_evaluation_writes_a_report_and_a_table(run, workplace, chat_folder):
    done = run(
        *("eval", chat_folder / "model", workplace / "runs/example/final", "--untrained"),
        *(workplace / "runs/example/start", "--prompts", chat_folder / "prompts.jsonl", "--limit", "6"),
        *("--max-new-tokens", "12", "--num-speculative-tokens", "2", "--out", "report"),
    )
    assert done.status == 0, done.err
    report = read_report("report")
    assert [one["name"] for one in report["runs"]] == ["drafter", "start"]
    assert report["runs"][0]["identical_to_target"] == [6, 6]
    assert report["environment"]["command"].startswith("draftsmith eval ")
    assert Path("report/report.html").stat().st_size > 10_000
    assert "alpha" in done.out


def test_an_exported_drafter_assists_the_target_in_transformers(run, workplace, chat_folder):
    done = run("export", workplace / "runs/example/final", "--to", "hf", "--out", "exported")
    assert done.status == 0, done.err
    target: Any
    target, assistant = (AutoModelForCausalLM.from_pretrained(at) for at in (chat_folder / "model", "exported"))
    tokenizer = AutoTokenizer.from_pretrained("exported")
    chat = [{"role": "user", "content": "How many boats are in the market?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    plain = target.generate(**inputs, **settings)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=assistant), plain)


def test_generate_streams_the_target_s_answer(run, workplace, chat_folder):
    words = ("generate", chat_folder / "model", "--prompt", "How many boats are in the market?")
    plain = run(*words, "--max-new-tokens", "16")
    drafted = run(*words[:2], workplace / "runs/example/final", *words[2:], "--max-new-tokens", "16")
    assert plain.status == drafted.status == 0, plain.err + drafted.err
    assert plain.out == drafted.out
    assert plain.out.startswith("There are")
    assert "draft tokens accepted" in drafted.err


@pytest.fixture(scope="module")
def bad(chat_folder, tokenizer_factory, tiny_llama, tmp_path_factory):
    """Files and folders that are wrong in one way each."""
    folder = tmp_path_factory.mktemp("bad")
    good = (chat_folder / "chats.jsonl").read_text().splitlines()
    question = {"messages": [{"role": "user", "content": "And?"}]}
    files = {
        "broken.jsonl": [*good[:2], '{"messages": [', good[3]],
        "questions.jsonl": [good[0], json.dumps(question)],
        "columns.jsonl": [json.dumps({"mesages": []})],
        "empty.jsonl": [],
    }
    for name, lines in files.items():
        (folder / name).write_text("".join(line + "\n" for line in lines))
    (folder / "file").write_text("")
    (folder / "no_model").mkdir()
    tiny_llama(vocab_size=384).save_pretrained(folder / "other")
    tokenizer_factory(384).save_pretrained(folder / "other")
    (folder / "mystery").mkdir()
    (folder / "mystery" / "draftsmith.json").write_text(json.dumps({"format": 1, "kind": "modle"}))
    target = load_target(str(chat_folder / "model"))
    cut = cut_vocabulary(cut_layers(target.model, [0]), torch.arange(100))
    save_draft_lm(cut, folder / "cut", target_name=target.name, tokenizer=target.tokenizer)
    return folder


TRAIN = {
    "an unknown key": (["engine.step=5"], "engine.step: unknown key (did you mean 'steps'?)"),
    "a wrong type": (["engine.steps=many"], "engine.steps: got 'many', expected a whole number"),
    "no such file": (["data.prompts=gone.jsonl"], "data.prompts: no such file: gone.jsonl"),
    "malformed JSONL": (["data.prompts={bad}/broken.jsonl"], "{bad}/broken.jsonl line 3: not valid JSON"),
    "no assistant turn": (
        ["data.prompts={bad}/questions.jsonl", "data.responses=given"],
        "{bad}/questions.jsonl line 2: no assistant turn",
    ),
    "unknown columns": (["data.prompts={bad}/columns.jsonl"], "line 1: unknown columns: mesages"),
    "no examples": (["data.prompts={bad}/empty.jsonl"], "{bad}/empty.jsonl: no examples in it"),
    "nothing to evaluate": (["evaluate.prompts={bad}/empty.jsonl"], "{bad}/empty.jsonl: no examples in it"),
    "another tokenizer": (
        ["drafter={{kind: model, model: {bad}/other}}"],
        "target and drafter have different tokenizers",
    ),
    "another kind": (["drafter={{kind: model, model: {bad}/mystery}}"], "holds a drafter of kind 'modle'"),
    "no layer of this number": (["drafter={{kind: model, init: {{layers: [7]}}}}"], "7"),
    "more ids than there are": (
        ["drafter={{kind: model, init: {{layers: [0]}}, vocabulary: 9999}}"],
        "drafter.vocabulary: 9999 ids, the target has 384",
    ),
    "no model in the folder": (["target.model={bad}/no_model"], "{bad}/no_model"),
    "a drafter for a target": (["target.model={bad}/cut"], "{bad}/cut"),
    "an unknown loss": (["objective.loss=forward_lk"], "did you mean 'forward_kl'?"),
    "prompts without a number": (["data.num_self_prompts=null"], "data.num_self_prompts: needed for prompts 'self'"),
    "an unwritable folder": (["output={bad}/file/run"], "output: cannot write to {bad}/file/run"),
}
EVAL = {
    "another tokenizer": (["{bad}/other"], "target and drafter have different tokenizers"),
    "another kind": (["{bad}/mystery"], "a drafter of kind 'modle' is not known here (did you mean 'model'?)"),
    "no drafter": (["{bad}/no_model"], "{bad}/no_model"),
    "an unknown name": (["promt_lookup"], "promt_lookup"),
    "malformed JSONL": (["{final}", "--prompts", "{bad}/broken.jsonl"], "{bad}/broken.jsonl line 3: not valid JSON"),
    "no prompts": (["{final}", "--prompts", "{bad}/empty.jsonl"], "{bad}/empty.jsonl: no examples in it"),
    "an unwritable folder": (["{final}", "--out", "{bad}/file/x"], "--out: cannot write to {bad}/file/x"),
    "a damaged drafter": (["{damaged}"], "model.safetensors"),
}
EXPORT = {
    "a cut vocabulary": (["{bad}/cut", "--to", "hf", "--out", "x"], "vocabulary"),
    "another kind": (["{bad}/mystery", "--to", "hf", "--out", "x"], "modle"),
    "an unknown format": (["{final}", "--to", "hff", "--out", "x"], "did you mean 'hf'?"),
    "a folder in use": (["{final}", "--to", "hf", "--out", "{bad}"], "is not empty, expected a new folder"),
}


def assert_one_line(done, expected):
    """Exit status 2, one ``error:`` line that says it, nothing else that looks like trouble."""
    assert done.status == 2, done.err
    errors = [line for line in done.err.splitlines() if line.startswith("error")]
    assert len(errors) == 1, done.err
    assert errors[0].startswith("error: ")
    assert expected in errors[0]
    assert "Traceback" not in done.err + done.out


@pytest.mark.parametrize("case", TRAIN)
def test_bad_input_to_train_gets_one_line(case, run, bad, chat_folder, tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipe_text(chat_folder))
    overrides, expected = TRAIN[case]
    done = run("train", "recipe.yaml", *[override.format(bad=bad) for override in overrides])
    assert_one_line(done, expected.format(bad=bad))


@pytest.mark.parametrize("case", ["an unknown loss", "no examples", "malformed JSONL", "prompts without a number"])
def test_a_dry_run_finds_the_same_without_loading_a_model(case, run, bad, chat_folder, tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipe_text(chat_folder))
    overrides, expected = TRAIN[case]
    done = run("train", "recipe.yaml", "--dry-run", *[override.format(bad=bad) for override in overrides])
    assert_one_line(done, expected.format(bad=bad))


def test_a_folder_with_a_run_in_it_is_not_written_over(run, workplace):
    done = run("train", workplace / "recipe.yaml", f"output={workplace}/runs/example")
    assert_one_line(done, "already holds a run: add --resume, or choose another output")


@pytest.mark.parametrize("case", EVAL)
def test_bad_input_to_eval_gets_one_line(case, run, bad, workplace, chat_folder, tmp_path):
    final = workplace / "runs/example/final"
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in final.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    with (damaged / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")
    arguments, expected = EVAL[case]
    filled = [argument.format(bad=bad, final=final, damaged=damaged) for argument in arguments]
    if "--prompts" not in filled:
        filled += ["--prompts", str(chat_folder / "prompts.jsonl")]
    done = run("eval", chat_folder / "model", *filled, "--limit", "2", "--max-new-tokens", "4")
    assert_one_line(done, expected.format(bad=bad))


@pytest.mark.parametrize("case", EXPORT)
def test_bad_input_to_export_gets_one_line(case, run, bad, workplace):
    arguments, expected = EXPORT[case]
    final = workplace / "runs/example/final"
    done = run("export", *[argument.format(bad=bad, final=final) for argument in arguments])
    assert_one_line(done, expected)
