"""Recipes: reading, overrides, and one line for every mistake."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Discriminator, Tag, ValidationError

from draftsmith.errors import BadInput
from draftsmith.recipe import MedusaDrafter, ModelDrafter, Recipe, Section
from draftsmith.recipe_errors import dotted_keys, error_lines
from draftsmith.recipe_io import load_recipe, resolved_yaml

TEXT = """\
# draftsmith train example.yaml
target: {model: some/target}
drafter:
  init: {layers: [0, 1]}
data:
  prompts: [a.jsonl]
  responses: target
engine: {steps: 10}
output: runs/example
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "example.yaml"
    file.write_text(TEXT)
    return str(file)


@pytest.fixture
def lines(tmp_path: Path):
    """The error lines of a recipe text with overrides, without the folder of the file."""

    def read(text: str = TEXT, *overrides: str) -> list[str]:
        file = tmp_path / "r.yaml"
        file.write_text(text)
        with pytest.raises(BadInput) as caught:
            load_recipe(str(file), overrides)
        return str(caught.value).replace(f"{tmp_path}/", "").splitlines()

    return read


def test_an_override_is_read_as_yaml_and_reaches_its_key(path):
    recipe = load_recipe(path, ["data.prompts=[b.jsonl, c.jsonl]", "engine.tokens_per_step=64", "data.packing=false"])
    assert recipe.data.prompts == ["b.jsonl", "c.jsonl"]
    assert recipe.engine.tokens_per_step == 64
    assert recipe.data.packing is False
    assert recipe.engine.steps == 10, "the rest of the section stays"


def test_a_mapping_replaces_the_whole_mapping(path):
    recipe = load_recipe(path, ["drafter={model: some/draft}", "optimizer.betas=[0.8, 0.9]"])
    assert isinstance(recipe.drafter, ModelDrafter)
    assert recipe.drafter.model == "some/draft"
    assert recipe.drafter.init is None
    assert recipe.optimizer.betas == (0.8, 0.9)


def test_later_overrides_win_and_sections_are_made_on_the_way(path):
    recipe = load_recipe(path, ["evaluate.sampling.top_p=0.5", "seed=1", "seed=2", "data.limit=5", "data.limit="])
    assert recipe.evaluate.sampling.top_p == 0.5
    assert recipe.seed == 2
    assert recipe.data.limit is None


def test_an_override_leaves_an_aliased_mapping_alone(tmp_path):
    file = tmp_path / "alias.yaml"
    file.write_text(TEXT.replace("data:", "data:\n  sampling: &s {top_k: 5}") + "evaluate: {sampling: *s}\n")
    recipe = load_recipe(str(file), ["evaluate.sampling.top_k=7"])
    assert (recipe.data.sampling.top_k, recipe.evaluate.sampling.top_k) == (5, 7)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optimizer.learning_rate=1e-4", "optimizer.learning_rate", 1e-4),
        ("engine.steps=1e3", "engine.steps", 1000),
        ("engine.deepspeed={lr: 1e-4}", "engine.deepspeed.lr", 1e-4),
        ("objective.loss={tvd: 5E-1}", "objective.loss.tvd", 0.5),
    ],
)
def test_a_number_that_yaml_reads_as_a_string_is_read_and_said(path, override, key, value):
    said: list[str] = []
    recipe = load_recipe(path, [override], said.append)
    read = recipe.model_dump()
    for part in key.split("."):
        read = read[part]
    assert read == value
    assert not isinstance(read, str)
    assert len(said) == 1
    assert key in said[0]
    assert override in said[0]


def test_a_string_stays_a_string_where_one_is_wanted(path):
    said: list[str] = []
    assert load_recipe(path, ["output=1e4", "engine.steps=2.0"], said.append).output == "1e4"
    assert not said


def test_the_resolved_recipe_reads_back_equal(path, tmp_path):
    recipe = load_recipe(path, ["optimizer.epsilon=1.0e-12", "objective.loss={jsd: {weight: 1, beta: 0.1}, tvd: 2}"])
    text = resolved_yaml(recipe)
    again = tmp_path / "resolved.yaml"
    again.write_text(text)
    said: list[str] = []
    assert load_recipe(str(again), warn=said.append) == recipe
    assert not said
    assert set(yaml.safe_load(text)) == set(Recipe.model_fields), "every section is written out"


@given(st.floats(1e-12, 1e3), st.integers(1, 10**9), st.text(min_size=1).filter(lambda text: text.isprintable()))
def test_any_values_survive_the_round_trip(rate, steps, output):
    data = yaml.safe_load(TEXT) | {"optimizer": {"learning_rate": rate}, "engine": {"steps": steps}, "output": output}
    recipe = Recipe.model_validate(data)
    assert Recipe.model_validate(yaml.safe_load(resolved_yaml(recipe))) == recipe


def test_an_unknown_key_names_file_line_and_the_nearest_key(lines):
    assert lines(TEXT.replace("responses", "respones")) == [
        "r.yaml line 7: data.respones: unknown key (did you mean 'responses'?)"
    ]
    assert lines(TEXT, "engine.learning_rate=1") == [
        "override 'engine.learning_rate=1': engine.learning_rate: unknown key (did you mean 'optimizer.learning_rate'?)"
    ]
    (line,) = lines(TEXT + "zzz: 1\n")
    assert line.startswith("r.yaml line 10: zzz: unknown key; expected one of target, drafter, data")


WRONG_TYPES = {
    "engine.steps=ten": "engine.steps: got 'ten', expected a whole number",
    "engine.steps=2.5": "engine.steps: got 2.5, expected a whole number",
    "engine.steps=0": "engine.steps: got 0, expected a whole number >= 1",
    "engine.steps=yes": "engine.steps: got true, expected a number",
    "data.packing=1": "data.packing: got 1, expected true or false",
    "data.prompts=3": "data.prompts: got 3, expected a string or a list of strings",
    "data.prompts=[]": "data.prompts: got [], expected at least one item",
    "data.prompts=[a.jsonl, 3]": "data.prompts[1]: got 3, expected a string",
    "output=": "output: got null, expected a string",
    "output=''": "output: got '', expected a string that is not empty",
    "target=some/target": "target: got 'some/target', expected a mapping",
    "engine.precision=bf61": "engine.precision: got 'bf61', expected one of fp32, bf16, auto (did you mean 'bf16'?)",
    "data.dtype=bf16": "data.dtype: got 'bf16', expected one of auto, float32, bfloat16, float16 (did you mean 'bfloat16'?)",
    "optimizer.betas=[0.9]": "optimizer.betas: got [0.9], expected a list of 2 numbers",
    "optimizer.betas=[0.9, 1.0]": "optimizer.betas[1]: got 1.0, expected a number < 1",
    "optimizer.betas=[-0.1, 0.9]": "optimizer.betas[0]: got -0.1, expected a number >= 0",
    "optimizer.clip=.inf": "optimizer.clip: got inf, expected a finite number",
    "drafter.init={layers: [0, -1]}": "drafter.init.layers[1]: got -1, expected a whole number >= 0",
    "drafter.kind=medusa": "drafter.init: unknown key; expected one of " + ", ".join(MedusaDrafter.model_fields),
    "drafter={kind: medusa, num_heads: 0}": "drafter.num_heads: got 0, expected a whole number >= 1",
    "objective.loss=[a]": "objective.loss: got ['a'], expected a string or a mapping",
    "objective.loss={}": "objective.loss: got {}, expected at least one key",
    "objective.loss={jsd: {beta: x}}": "objective.loss.jsd.beta: got 'x', expected a number",
    "objective.loss={jsd: []}": "objective.loss.jsd: got [], expected a number or a mapping",
    "engine.deepspeed=[]": "engine.deepspeed: got [], expected a mapping",
    "drafter.init={num_layers: 2, layers: [0]}": "drafter.init: give exactly one of layers, num_layers, config",
    "drafter.init={config: {num_hidden_layers: 2}, fit_head: true}": "drafter.init: fit_head is for layers and num_layers: "
    "weights from scratch say nothing to fit a head to",
    "drafter={kind: hydra, output_rank: 8}": "drafter: output_rank is for output low_rank, and output is shared",
    "drafter={kind: blockwise, target_weight: 1.0}": "drafter: target_weight is of the target's layers that are trained too, "
    "and train_layers is 0",
    "drafter={kind: early_exit, exit_layer: 2, adapter: attention, intermediate_size: 8}": "drafter: intermediate_size is of "
    "a block's MLP, and adapter is attention",
    "data.max_prompt_length=1024": "data: max_prompt_length must be below max_length, which counts the answer too",
}


@pytest.mark.parametrize(("override", "expected"), WRONG_TYPES.items(), ids=list(WRONG_TYPES))
def test_a_wrong_value_names_key_value_and_what_was_expected(lines, override, expected):
    (line,) = lines(TEXT, override)
    assert line.endswith(f": {expected}")
    assert line.startswith(("override '", 'override "', "r.yaml line "))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["drafter={kind: layer_skip}", "engine={minutes: 1, max_epochs: 2}"],
            "engine.max_epochs: a search has no epochs",
        ),
        (["drafter={kind: layer_skip}", "engine={epochs: 1}"], "engine.epochs: a search has no epochs"),
        (
            ["drafter={kind: early_exit, exit_layer: 1, adapter: none}", "engine={epochs: 1}"],
            "engine.epochs: a search has no epochs",
        ),
        (
            ["drafter={kind: medusa}", "engine.gradient_checkpointing=true"],
            "engine.gradient_checkpointing: a medusa drafter has no stack of layers to recompute",
        ),
        (
            ["drafter={kind: lookahead_tokens}", "data.cache=hidden"],
            "data.cache: a drafter of kind lookahead_tokens runs the target itself and reads nothing cached",
        ),
        (
            ["drafter={kind: model, init: {layers: [0]}, lora: {}, train_embeddings: true}"],
            "drafter: train_embeddings does not go with lora",
        ),
        (
            ["drafter={kind: model, init: {layers: [0], embeddings: random}}"],
            "drafter.init: embeddings is for config",
        ),
        (
            ["drafter={kind: eagle, version: 1, train_output: false}"],
            "drafter: version 1 has no output head of its own to train",
        ),
    ],
)
def test_what_a_kind_of_drafter_cannot_do_is_refused_with_the_recipe(lines, overrides, expected):
    (line,) = lines(TEXT, *overrides)
    assert f": {expected}" in line


def test_an_unknown_kind_of_drafter_is_named_with_the_nearest_one(lines):
    (line,) = lines(TEXT, "drafter={kind: medussa}")
    assert ": drafter: unknown kind 'medussa' (did you mean 'medusa'?); expected one of model, medusa, " in line


def test_heads_need_hidden_states_from_the_cache(lines):
    (line,) = lines(TEXT, "drafter={kind: medusa}", "data.cache=topk")
    assert "data.cache: topk keeps no hidden states, which a drafter of kind medusa reads" in line


def test_every_mistake_gets_its_own_line(lines):
    found = lines(TEXT.replace("output: runs/example\n", "").replace("10", "[1]"), "seed=-1", "data.limit=0")
    assert found == [
        "override 'data.limit=0': data.limit: got 0, expected a whole number >= 1",
        "r.yaml line 8: engine.steps: got [1], expected a whole number",
        "r.yaml: output: missing, expected a string",
        "override 'seed=-1': seed: got -1, expected a whole number >= 0",
    ]


def test_what_lives_on_the_target_learns_what_the_target_says_by_default(path):
    def responses(*more):
        return load_recipe(path, ["data={prompts: a.jsonl}", *more]).data.responses

    assert responses() == "given"
    assert responses("drafter={kind: medusa}") == "target"
    assert responses("drafter={kind: medusa}", "data.responses=given") == "given"


def test_prompts_without_answers_cannot_be_given(lines):
    (line,) = lines(TEXT, "data.prompts=[a.jsonl, self]", "data.responses=given")
    assert "'self' come without answers" in line
    assert "data.responses" in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TEXT + "output: again\n", "r.yaml line 10: output: this key is given twice"),
        (TEXT.replace("[0, 1]}", "[0], layers: [1]}"), "r.yaml line 4: drafter.init.layers: this key is given twice"),
        ("a: [1\nb: 2\n", "r.yaml line 2: not valid YAML"),
        ("\ta: 1\n", "r.yaml line 1: not valid YAML"),
        ("a: 2024-99-99\n", "not valid YAML: month must be in 1..12"),
        ("a: !!python/object/apply:os.system [ls]\n", "not valid YAML: could not determine a constructor"),
        ("a: &a [*a]\n", "a: unknown key"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("", "r.yaml: is empty, expected a mapping"),
        ("- 1\n", "r.yaml: holds [1], expected a mapping"),
        ("3: 1\n" + TEXT, "r.yaml line 1: 3: got a key that is not a name"),
    ],
)
def test_a_broken_file_is_one_line_with_its_place(lines, text, expected):
    assert expected in lines(text)[-1]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        ("data..limit=3", "expected section.key=value"),
        ("drafter={kind:", "not valid YAML"),
        ("drafter={model: a, model: b}", "drafter={model: a, model: b}': model: this key is given twice"),
        ("output.folder=x", "output is 'runs/example', expected a mapping to set 'folder' in"),
    ],
)
def test_a_broken_override_is_one_line(lines, override, expected):
    (line,) = lines(TEXT, override)
    assert line.startswith("override ")
    assert expected in line


def test_a_missing_recipe_suggests_the_nearest_shipped_one(tmp_path):
    with pytest.raises(BadInput, match=r"no such file.*did you mean 'distill_smollm2'"):
        load_recipe("distil_smollm2")
    with pytest.raises(BadInput, match="this is a folder"):
        load_recipe(str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="cannot be read as text"):
        load_recipe(str(tmp_path / "binary.yaml"))


class _Left(Section):
    kind: Literal["left"] = "left"
    size: int


class _Right(Section):
    kind: Literal["right"] = "right"
    size: str


class _Either(Section):
    part: Annotated[
        Annotated[_Left, Tag("left")] | Annotated[_Right, Tag("right")],
        Discriminator(lambda value: value.get("kind", "left")),
    ]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"size": "x"}, "here: part.size: got 'x', expected a whole number"),
        ({"kind": "right", "size": 1}, "here: part.size: got 1, expected a string"),
        ({"kind": "right", "size": "a", "siz": 1}, "here: part.siz: unknown key (did you mean 'size'?)"),
        ({"kind": "rihgt"}, "here: part: unknown kind 'rihgt' (did you mean 'right'?); expected one of left, right"),
    ],
)
def test_sections_of_several_kinds_are_told_apart(part, expected):
    data = {"part": part}
    with pytest.raises(ValidationError) as caught:
        _Either.model_validate(data)
    assert error_lines(caught.value, _Either, data, lambda _: "here") == [expected]
    assert ("part", "size") in set(dotted_keys(_Either))
