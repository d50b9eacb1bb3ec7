"""Shipped recipes for real pairs on GPUs: `--dry-run` builds the architectures and counts what is published of them."""

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.configuration_utils import PreTrainedConfig

from draftsmith.recipe import Recipe
from draftsmith.recipe_io import load_recipe, shipped_recipes
from draftsmith.train.dry_run import parameter_lines

VICUNA_7B = LlamaConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
)
LLAMA_31_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
PUBLISHED: dict[str, tuple[PreTrainedConfig, int]] = {
    "vicuna_7b": (VICUNA_7B, 6_738_415_616),
    "llama31_8b": (LLAMA_31_8B, 8_030_261_248),
    "qwen3_8b": (QWEN3_8B, 8_190_735_360),
}

H = 4096
LAYER = 2 * H * H + 2 * H * 1024 + 3 * H * 14336 + 2 * H  # of Llama-3.1-8B
SILU = H * H + H

# Of the drafter alone. Medusa-1 with five heads: 0.74 B. EAGLE for Vicuna-7B: 0.24 B. EAGLE-3 for Llama-3.1-8B: 0.42 B, an
# 850 MB checkpoint in 16 bits. Others have no published count: theirs follow from their layers.
OWN = {
    "medusa_vicuna_7b": 5 * (H * H + H + 32000 * H),
    # Nothing is normed before attention, and the output projection is the target's.
    "eagle_vicuna_7b": (2 * H * H + H) + 4 * H * H + 3 * H * 11008 + H,
    # Three hidden states fused; queries, keys and values read 2 H; four norms; a head over 32,000 ids.
    "eagle3_llama31_8b": 3 * H * H + 2 * H * (H + 2 * 1024) + H * H + 3 * H * 14336 + 4 * H + 32000 * H,
    "early_exit_llama31_8b": 2 * H * H + 2 * H * 1024 + H,
    "layer_skip_vicuna_7b": 0,
    "blockwise_qwen3_8b": (H * 4 * H + 4 * H) + (4 * H * 4 * H + 4 * H),  # all heads share the inner layer
    "lookahead_tokens_qwen3_8b": 4 * H,
    # Four heads over 32,768 ids, and a LoRA of rank 32 on every linear layer of all 32: q and o, k and v, the MLP's three.
    "medusa2_llama31_8b": 4 * (SILU + 32768 * H) + 32 * 32 * (2 * (H + H) + 2 * (H + 1024) + 3 * (H + 14336)),
    # Head k reads 2 + k vectors through two maps; an output layer and three SiLU blocks a head; a layer over the prefix.
    "hydra_llama31_8b": sum(2 * ((2 + k) * H * H + H) + 4 * SILU for k in range(4)) + LAYER,
    "distill_llama31_8b": 2 * LAYER + H + (32768 + 128256) * H,
}
SCORED = {
    "eagle3_llama31_8b": 32000,
    **dict.fromkeys(("medusa2_llama31_8b", "hydra_llama31_8b", "early_exit_llama31_8b", "distill_llama31_8b"), 32768),
}


def pair_of(name):
    return next((pair for pair in PUBLISHED if name.endswith(pair)), None)


def test_every_kind_has_a_recipe_for_a_pair_on_gpus_and_it_is_counted_here():
    names = [name for name in shipped_recipes() if pair_of(name)]
    # A draft model that is loaded from the hub has no configuration here.
    assert {*OWN, "distill_qwen3_8b"} == set(names)
    kinds = {(d.kind, getattr(d, "version", None)) for d in (load_recipe(name).drafter for name in shipped_recipes())}
    assert {(d.kind, getattr(d, "version", None)) for d in (load_recipe(name).drafter for name in names)} == kinds


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_dry_run_counts_what_is_published(name):
    recipe = load_recipe(name)
    config, total = PUBLISHED[pair_of(name) or ""]
    target, drafter = parameter_lines(recipe, config)
    assert target == f"target: {recipe.target.model}, {total:,} parameters"
    assert drafter.startswith(f"drafter: {recipe.drafter.kind}, {OWN[name]:,} parameters, ")
    assert drafter.endswith(f" {SCORED.get(name, config.vocab_size):,} ids scored")


@pytest.mark.parametrize("name", [name for name in sorted(OWN) if name != "layer_skip_vicuna_7b"])
def test_it_trains_in_bf16_with_zero_2(name):
    engine = load_recipe(name).engine
    assert engine.precision == "bf16"
    assert engine.deepspeed is not None
    assert engine.deepspeed["zero_optimization"]["stage"] == 2


ATTENTION = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 4096  # and a norm


@pytest.mark.parametrize(
    ("drafter", "config", "own", "scored"),
    [
        ({"kind": "early_exit", "exit_layer": 3, "adapter": "attention"}, LLAMA_31_8B, ATTENTION, 128256),
        (
            {"kind": "early_exit", "exit_layer": 3, "vocabulary": 32768},
            LLAMA_31_8B,
            ATTENTION + 3 * 4096 * 14336 + 4096,
            32768,
        ),
        ({"kind": "early_exit", "exit_layer": 3, "adapter": "none"}, LLAMA_31_8B, 0, 128256),
        ({"kind": "layer_skip", "num_speculative_tokens": 2}, LLAMA_31_8B, 0, 128256),
        ({"kind": "lookahead_tokens", "num_tokens": 4}, QWEN3_8B, 4 * 4096, 151936),
    ],
    ids=["attention", "block", "none", "skip", "lookahead"],
)
def test_a_dry_run_counts_what_would_be_trained(drafter, config, own, scored):
    """On the meta device, where tensors have shapes and no contents."""
    recipe = Recipe.model_validate(
        {
            "target": {"model": "a pair's target", "dtype": "float32"},
            "drafter": drafter,
            "data": {"prompts": "shipped", "responses": "target"},
            "engine": {"steps": 8},
            "output": "unused",
        }
    )
    target, line = parameter_lines(recipe, config)
    assert ("8,030,261,248" if config is LLAMA_31_8B else "8,190,735,360") in target
    assert f", {own:,} parameters, {own:,} of them trained, {scored:,} ids scored" in line
    assert torch.get_default_device().type == "cpu"
