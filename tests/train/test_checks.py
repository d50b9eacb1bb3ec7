"""What is wrong with a run is found before any data is made, by a dry run too, and costs no output folder."""

import re

import pytest
import torch

from draftsmith.errors import BadInput
from draftsmith.models.cut import cut_layers
from draftsmith.models.draft_lm import cut_vocabulary, save_draft_lm
from draftsmith.models.target import load_target
from draftsmith.recipe import Recipe
from draftsmith.train import data, run
from draftsmith.train.checks import check_dtype, check_recipe
from draftsmith.train.dry_run import dry_run
from draftsmith.train.run import train

ONE_LAYER = {"kind": "model", "init": {"layers": [0]}}
SEARCHED = {"kind": "layer_skip"}
ZERO_3 = {"zero_optimization": {"stage": 3}}


@pytest.fixture
def recipe(chat_folder, tmp_path):
    """``recipe(**sections)``: of a run that would write answers first."""

    def make(**sections):
        base = {
            "target": {"model": str(chat_folder / "model"), "dtype": "float32"},
            "drafter": ONE_LAYER,
            "data": {"prompts": str(chat_folder / "chats.jsonl"), "responses": "target", "max_new_tokens": 8},
            "engine": {"steps": 2, "tokens_per_step": 256},
            "evaluate": {"prompts": str(chat_folder / "prompts.jsonl"), "limit": 2, "max_new_tokens": 4},
            "output": str(tmp_path / "run"),
        }
        for key, section in sections.items():
            base[key] = section if key == "drafter" else {**base.get(key, {}), **section}
        return Recipe.model_validate(base)

    return make


@pytest.fixture
def start(toy):
    def begin(recipe):
        toy.reset()
        return train(recipe, resume=False, command=["draftsmith", "train", "x"])

    return begin


BY_THE_RECIPE = {
    "an unknown loss": ({"objective": {"loss": "forward_lk"}}, "did you mean 'forward_kl'"),
    "a temperature beside a top-k cache": (
        {"objective": {"temperature": 2.0}, "data": {"cache": "topk"}},
        r"objective\.temperature: must be 1 with a top-k cache of the target, got 2",
    ),
    "a changed target under ZeRO-3": (
        {"drafter": {"kind": "medusa2"}, "engine": {"deepspeed": ZERO_3}},
        r"engine\.deepspeed: ZeRO-3 shards what is trained of the target away",
    ),
    "an unknown key of DeepSpeed's": (
        {"engine": {"deepspeed": {"zero_optimisation": {"stage": 2}}}},
        r"engine\.deepspeed: expected zero_optimization",
    ),
    "a drafter that imitates its own tokens": (
        {"objective": {"loss": {"forward_kl": 1.0, "cross_entropy": 0.1}, "rollouts": {"source": "drafter"}}},
        "cross_entropy learns the tokens as they stand, and those of rollouts from the drafter are its own",
    ),
}


@pytest.mark.parametrize("case", BY_THE_RECIPE)
def test_what_the_recipe_alone_shows_is_found_in_a_dry_run(case, recipe):
    sections, expected = BY_THE_RECIPE[case]
    with pytest.raises(BadInput, match=expected):
        dry_run(recipe(**sections))


def test_a_temperature_is_fine_where_the_loss_takes_tokens_alone(recipe):
    check_recipe(recipe(objective={"temperature": 2.0, "loss": "cross_entropy"}, data={"cache": "topk"}))
    # The tokens of served answers are the target's.
    check_recipe(recipe(objective={"loss": "cross_entropy", "rollouts": {"source": "online"}}))


def test_a_search_takes_one_process(recipe):
    check_recipe(recipe(drafter=SEARCHED))
    with pytest.raises(
        BadInput, match=r"drafter\.kind: layer_skip is searched for, not trained: start it in one process"
    ):
        dry_run(recipe(drafter=SEARCHED), 2)


BY_SIZES = {
    "a draft model of fewer positions than the examples": (
        {"kind": "model", "init": {"config": {"max_position_embeddings": 48, "num_hidden_layers": 1}}},
        r"data\.max_length: \d+ tokens, but the drafter reads 48: set it to at most 48",
    ),
    "more ids than there are": ({**ONE_LAYER, "vocabulary": 999}, r"drafter\.vocabulary: 999 ids, the target has 384"),
    "more ids for heads": ({"kind": "medusa", "vocabulary": 999}, r"drafter\.vocabulary: 999 ids, the target has 384"),
    "an exit behind the last layer": (
        {"kind": "early_exit", "exit_layer": 3},
        r"drafter\.exit_layer: 3, the target has 3 layers",
    ),
    "no layer of this number": (
        {"kind": "model", "init": {"layers": [7]}},
        r"init\.layers: \[7\]: expected layers from 0",
    ),
    "more layers than there are": ({"kind": "model", "init": {"num_layers": 4}}, "expected layers from 0 to 2"),
    "more trained layers": (
        {"kind": "blockwise", "train_layers": 4},
        r"drafter\.train_layers: 4 layers, the target has 3",
    ),
    "key-value heads that do not divide": (
        {"kind": "eagle", "num_key_value_heads": 3},
        r"drafter\.num_key_value_heads: 3 does not divide the target's 4 attention heads",
    ),
    "states of no layer": ({"kind": "eagle", "layers": [1, 9]}, "layer 9 do not exist: the target has 3 layers"),
}


@pytest.mark.parametrize("case", BY_SIZES)
def test_sizes_beyond_the_targets_are_found_before_data_is_made(case, recipe, start, monkeypatch):
    drafter, expected = BY_SIZES[case]
    with pytest.raises(BadInput, match=expected):
        dry_run(recipe(drafter=drafter))
    monkeypatch.setattr(run, "prepare_data", lambda *args: pytest.fail("data was made"))
    with pytest.raises(BadInput, match=expected):
        start(recipe(drafter=drafter))


def test_a_loaded_drafter_s_tokenizer_is_compared_before_data_is_made(
    recipe, start, tokenizer_factory, tiny_llama, tmp_path, monkeypatch
):
    tiny_llama(vocab_size=384).save_pretrained(tmp_path / "other")
    tokenizer_factory(384).save_pretrained(tmp_path / "other")
    asked = recipe(drafter={"kind": "model", "model": str(tmp_path / "other")})
    with pytest.raises(BadInput, match="target and drafter have different tokenizers"):
        dry_run(asked)
    monkeypatch.setattr(run, "prepare_data", lambda *args: pytest.fail("data was made"))
    with pytest.raises(BadInput, match="target and drafter have different tokenizers"):
        start(asked)


@pytest.mark.parametrize("kept", [None, 100])
def test_a_loaded_drafter_is_counted_without_its_weights(kept, recipe, chat_folder, tmp_path):
    target = load_target(str(chat_folder / "model"))
    model = cut_layers(target.model, [0])
    save_draft_lm(
        cut_vocabulary(model, torch.arange(kept or 384)), tmp_path / "cut", target_name="x", tokenizer=target.tokenizer
    )
    model.save_pretrained(tmp_path / "whole")
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(tmp_path / "whole")
    folder = tmp_path / ("cut" if kept else "whole")
    own = sum(parameter.numel() for parameter in model.parameters()) + (kept or 0) * 48
    lines = dry_run(recipe(drafter={"kind": "model", "model": str(folder)})).splitlines()
    assert f"drafter: model, {own:,} parameters, {own:,} of them trained, {kept or 384} ids scored" in lines


def test_embeddings_may_stay_when_the_head_is_cut(recipe):
    found = dry_run(recipe(drafter={**ONE_LAYER, "vocabulary": 100, "train_embeddings": False}))
    assert "100 ids scored" in found


@pytest.mark.parametrize("responses", ["target", "given"])
def test_a_target_without_a_tokenizer_is_refused_by_a_dry_run_too(responses, recipe, chat_folder, tmp_path):
    load_target(str(chat_folder / "model")).model.save_pretrained(tmp_path / "bare")
    asked = recipe(target={"model": str(tmp_path / "bare")}, data={"responses": responses})
    with pytest.raises(BadInput, match="the folder holds no tokenizer"):
        dry_run(asked)


@pytest.mark.parametrize(
    ("kept", "line"),
    [
        ({"cache": "hidden"}, "answers: 96 bytes an answer token, at most"),
        ({"cache": "topk", "cache_top_k": 5}, "teacher cache: 44 bytes a label, at most"),
        ({"cache": "topk", "responses": "given"}, "teacher cache: 516 bytes a label, "),
        ({"cache": "hidden", "responses": "given"}, "teacher cache: 96 bytes a label, "),
    ],
)
def test_a_dry_run_says_what_is_kept_of_the_target(kept, line, recipe, start, capsys):
    """As the run itself says before it writes; of answers that are still to come, the most."""
    asked = recipe(data=kept)
    (planned,) = [found for found in dry_run(asked).splitlines() if found.startswith(line)]
    start(asked)
    said = capsys.readouterr().out.splitlines()
    if "teacher cache" in line and "at most" in line:
        (rows,) = re.findall(r"label, ([\d,]+) labels", "\n".join(said))
        (most,) = re.findall(r"at most ([\d,]+)", planned)
        assert 0 < int(rows.replace(",", "")) <= int(most.replace(",", ""))
    else:
        assert planned in said


@pytest.mark.parametrize(
    "broken", [{"drafter": {"kind": "model", "init": {"layers": [7]}}}, {"objective": {"loss": "kl"}}]
)
def test_a_first_start_that_fails_does_not_take_the_folder(broken, recipe, start, tmp_path):
    with pytest.raises(BadInput):
        start(recipe(**broken))
    assert start(recipe()) == tmp_path / "run" / "final"
    with pytest.raises(BadInput, match="already holds a run"):
        start(recipe())


def test_evaluation_prompts_are_read_before_data_is_made(recipe, start, tmp_path, monkeypatch):
    (tmp_path / "long.jsonl").write_text('{"question_id": 7, "turns": ["' + "apples " * 300 + '"]}\n')
    monkeypatch.setattr(run, "prepare_data", lambda *args: pytest.fail("data was made"))
    with pytest.raises(BadInput, match=r"evaluate\.prompts: prompt 7 has \d+ tokens, the target's context is 256"):
        start(recipe(evaluate={"prompts": str(tmp_path / "long.jsonl")}))


def test_layers_are_not_trained_in_a_16_bit_type(recipe, start):
    """DeepSpeed's bf16 keeps copies in float32; nothing else does."""
    layers, bf16 = {"kind": "blockwise", "train_layers": 1}, {"target": {"dtype": "bfloat16"}}
    refused = r"drafter\.train_layers: the target is in bfloat16, too coarse .* set target\.dtype to float32"
    for engine in ({}, {"precision": "bf16"}, {"deepspeed": {"zero_optimization": {"stage": 2}}}):
        with pytest.raises(BadInput, match=refused):
            dry_run(recipe(drafter=layers, engine=engine, **bf16))
    with pytest.raises(BadInput, match=refused):
        start(recipe(drafter=layers, **bf16))
    masters = {"precision": "bf16", "deepspeed": {"zero_optimization": {"stage": 2}}}
    check_dtype(recipe(drafter=layers, engine=masters), torch.bfloat16, torch.device("cpu"))
    check_dtype(recipe(drafter=layers, engine={"precision": "bf16"}), torch.float32, torch.device("cpu"))
    with pytest.raises(
        BadInput, match=r"DeepSpeed would train these layers in bfloat16, .* set target\.dtype to bfloat16"
    ):
        check_dtype(recipe(drafter=layers, engine=masters), torch.float32, torch.device("cpu"))
    check_dtype(recipe(drafter={"kind": "medusa"}), torch.bfloat16, torch.device("cpu"))


def test_answers_of_the_same_prompts_but_other_words_are_other_data(recipe, start, chat_folder, tmp_path):
    """A top-k cache belongs to the tokens it was made for, not to the prompts."""
    made = recipe(data={"cache": "topk", "cache_top_k": 8})
    start(made)
    target = load_target(str(chat_folder / "model"), "float32")
    again = data.prepare_data(made, target, tmp_path / "run" / "data", None)
    assert again.cached is not None
    assert again.cached.fingerprint["data"] == again.encoded.content_hash()
