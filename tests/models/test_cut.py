"""Cutting layers out of a target, measuring which matter, and building from a changed configuration."""

import copy
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from draftsmith.errors import BadInput
from draftsmith.models.cut import block_influence, choose_layers, cut_layers, from_config, project_rows

IDS = torch.randint(0, 64, (2, 14), generator=torch.Generator().manual_seed(5))
FAMILIES = ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]


def tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def layers_of(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def check_cut(model: Any, layers: list[int]) -> Any:
    """The cut model computes what the target computes when it skips the other layers, cached or reloaded too."""
    cut: Any = cut_layers(model, layers)
    skipping = copy.deepcopy(model)
    stack = layers_of(skipping)
    kept = nn.ModuleList([stack[i] for i in layers])
    owner = skipping.transformer if hasattr(skipping, "transformer") else skipping.model
    setattr(owner, "h" if hasattr(skipping, "transformer") else "layers", kept)
    skipping.config.num_hidden_layers = len(layers)
    if getattr(skipping.config, "layer_types", None):
        skipping.config.layer_types = [model.config.layer_types[i] for i in layers]
    expected = skipping(IDS, use_cache=False).logits
    torch.testing.assert_close(cut(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    cache = DynamicCache(config=cut.config)
    steps = [cut(IDS[:, i : i + 1], cache=cache, use_cache=True).logits for i in range(IDS.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), expected, atol=1e-4, rtol=1e-4)
    assert cut.config.num_hidden_layers == len(layers)
    return cut


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_cut_layers_computes_what_skipping_the_others_does(family, request, tmp_path):
    model = request.getfixturevalue(family)(layers=4)
    cut = check_cut(model, [0, 1, 3])
    assert tied(cut)
    assert cut.get_input_embeddings().weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    assert all(parameter.requires_grad for parameter in cut.parameters())
    numbers = [m.layer_idx for m in layers_of(cut).modules() if hasattr(m, "layer_idx")]
    assert sorted(set(numbers)) == [0, 1, 2]
    cut.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(reloaded(IDS).logits, cut(IDS).logits)
    assert tied(reloaded)


@torch.no_grad()
def test_layer_types_follow_their_layers(tiny_gemma3):
    model = tiny_gemma3(layers=4)
    assert model.config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert check_cut(model, [1, 2]).config.layer_types == ["full_attention", "sliding_attention"]
    assert check_cut(model, [3, 3, 0]).config.layer_types == ["full_attention"] * 2 + ["sliding_attention"]


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gpt2"])
def test_untied_stays_untied(family, request, tmp_path):
    model: Any = request.getfixturevalue(family)(layers=3, tie_word_embeddings=False)
    cut: Any = cut_layers(model, [0])
    assert not tied(cut)
    assert not cut.config.tie_word_embeddings
    cut.save_pretrained(tmp_path)
    reloaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not tied(reloaded)
    assert torch.equal(reloaded.get_output_embeddings().weight, model.get_output_embeddings().weight)


def test_frozen_target_gives_a_trainable_cut_and_rng_is_left_alone(tiny_llama):
    model = tiny_llama(layers=3).requires_grad_(False)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    cut: Any = cut_layers(model, [2])
    assert torch.equal(torch.get_rng_state(), before)
    cut(IDS).logits.sum().backward()
    assert cut.model.layers[0].mlp.up_proj.weight.grad is not None
    assert model.model.layers[2].mlp.up_proj.weight.grad is None


def small(family, **config):
    settings = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**{**settings, **config})
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@torch.no_grad()
def test_other_per_layer_settings_follow_their_layers():
    model = small("SmolLM3", no_rope_layers=[1, 1, 1, 0])
    assert check_cut(model, [0, 3]).config.no_rope_layers == [1, 0]
    model = small("Qwen2Moe", mlp_only_layers=[1, 3], num_experts=4, moe_intermediate_size=16)
    assert check_cut(model, [0, 3]).config.mlp_only_layers == [1]
    check_cut(small("Phi"), [1, 2])


def test_layers_that_cannot_move_are_refused():
    model = small("DeepseekV3", first_k_dense_replace=1, n_routed_experts=4, n_group=1, topk_group=1, kv_lora_rank=8,
                  q_lora_rank=None, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, moe_intermediate_size=16,
                  num_key_value_heads=4)  # fmt: skip
    cut_layers(model, [0, 2])
    with pytest.raises(BadInput, match=r"init\.layers"):
        cut_layers(model, [2, 3])


@torch.no_grad()
def test_only_the_language_model_of_a_multimodal_target_is_taken():
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, image_token_index=63)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    cut: Any = cut_layers(model, [0, 1, 2])
    assert type(cut).__name__ == "Gemma3ForCausalLM"
    ids = IDS % 60
    torch.testing.assert_close(cut(ids).logits, model(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    assert tied(cut) == tied(model)


@pytest.mark.parametrize("layers", [[], [0, 4], [-1]])
def test_layers_that_are_not_there(tiny_llama, layers):
    with pytest.raises(BadInput, match="from 0 to 3"):
        cut_layers(tiny_llama(layers=4), layers)


@torch.no_grad()
def test_block_influence_is_one_minus_the_cosine(tiny_llama):
    model = tiny_llama(layers=4)
    identity = model.model.layers[2]
    identity.self_attn.o_proj.weight.zero_()
    identity.mlp.down_proj.weight.zero_()
    influence = block_influence(model, [IDS[:1], IDS[1:, :6]])
    hidden = [[h[0] for h in model(batch, output_hidden_states=True).hidden_states] for batch in (IDS[:1], IDS[1:, :6])]
    for layer in range(3):  # the last hidden state that transformers gives is already normalised
        cosines = torch.cat([torch.cosine_similarity(h[layer], h[layer + 1], dim=-1) for h in hidden])
        assert influence[layer] == pytest.approx(1 - cosines.mean().item(), abs=1e-5)
    assert influence[2] == pytest.approx(0, abs=1e-6)
    assert choose_layers(model, 3, [IDS]) == [0, 1, 3]
    assert choose_layers(model, 4, [IDS]) == [0, 1, 2, 3]


def test_choose_layers_needs_layers_and_texts(tiny_gpt2):
    with pytest.raises(BadInput, match="expected 1 to 2"):
        choose_layers(tiny_gpt2(), 3, [IDS])
    with pytest.raises(BadInput, match="calibration"):
        choose_layers(tiny_gpt2(), 1, [])
    assert choose_layers(tiny_gpt2(), 2, [IDS]) == [0, 1]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_from_config_copies_embeddings(family, request):
    model = request.getfixturevalue(family)(layers=4)
    made: Any = from_config(model, {"num_hidden_layers": 1}, embeddings="copy")
    assert torch.equal(made.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert tied(made)
    assert not torch.equal(
        next(layers_of(made)[0].parameters()).flatten()[:9], next(layers_of(model)[0].parameters()).flatten()[:9]
    )
    assert made(IDS).logits.shape == (2, 14, 64)
    assert len(getattr(made.config, "layer_types", None) or [0]) == 1


@torch.no_grad()
def test_from_config_projects_embeddings(tiny_llama):
    model = tiny_llama(layers=2, tie_word_embeddings=False)
    changes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 5}
    made: Any = from_config(model, changes, embeddings="project")
    torch.testing.assert_close(made.lm_head.weight, project_rows(model.lm_head.weight, 16))
    assert not tied(made)
    assert made.config.num_hidden_layers == 5
    random: Any = from_config(model, changes, embeddings="random")
    assert not torch.allclose(random.lm_head.weight, made.lm_head.weight)
    with pytest.raises(BadInput, match="use embeddings: project"):
        from_config(model, changes, embeddings="copy")


def test_from_config_refuses_what_cannot_be(tiny_llama):
    model = tiny_llama()
    for overrides, match in (
        ({"hiden_size": 16}, r"no key 'hiden_size' \(did you mean 'hidden_size'"),
        ({"num_key_value_heads": 3}, r"init\.config"),
        ({"num_hidden_layers": 0}, "positive"),
        ({"vocab_size": 32}, "drafter.vocabulary"),
    ):
        with pytest.raises(BadInput, match=match) as error:
            from_config(model, overrides)
        assert "\n" not in str(error.value)
    assert from_config(model, {"vocab_size": 80}).config.vocab_size == 80  # padding


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 12), st.integers(1, 16), st.integers(0, 1000))
def test_projection_is_the_best_of_its_size(width, size, seed):
    weight = torch.randn(20, width, generator=torch.Generator().manual_seed(seed))
    projected = project_rows(weight, size)
    assert projected.shape == (20, size)
    values = torch.linalg.svdvals(weight)
    lost = (weight @ weight.T - projected @ projected.T).norm().item()
    assert lost == pytest.approx((values[size:] ** 2).norm().item(), abs=1e-2)
