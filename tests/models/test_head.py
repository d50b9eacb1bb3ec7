"""Backbone and head taken apart give the model's own logits, in every family."""

import pytest
import torch
import transformers

from draftsmith.errors import BadInput
from draftsmith.models.head import check_split, split

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 8},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 1.5, "sliding_window": 8},
    "Cohere": {"logit_scale": 0.25},
    "Cohere2": {"logit_scale": 0.25, "sliding_window": 8},
    "Granite": {"logits_scaling": 6.0, "embedding_multiplier": 3.0},
    "GraniteMoe": {"logits_scaling": 6.0, "num_local_experts": 2},
    "Olmo2": {},
    "Phi": {},  # its head has a bias
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 16},
    "NanoChat": {"final_logit_softcapping": 2.0},
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
}


def build(family: str):
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **FAMILIES[family]})
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_head_of_backbone_gives_the_logits_of_every_family(family):
    model = build(family)
    check_split(model)
    ids = torch.randint(0, 64, (2, 11))
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    backbone, head = split(model)
    expected = model(input_ids=ids, attention_mask=mask).logits
    hidden = backbone(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(head(hidden), expected, atol=1e-5, rtol=1e-5)
    kept = torch.tensor([5, 3, 60, 17])
    torch.testing.assert_close(head.rows(kept)(hidden), expected[..., kept], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cap", [None, 2.0])
@torch.no_grad()
def test_gemma3_and_gpt2(tiny_gemma3, tiny_gpt2, cap):
    for model in (tiny_gemma3(final_logit_softcapping=cap), tiny_gpt2()):
        check_split(model)
        _, head = split(model)
        assert head.softcap == (cap if "gemma3" in model.config.model_type else None)


def test_head_shares_the_models_weights(tiny_llama):
    model = tiny_llama()
    _, head = split(model)
    assert head.weight is model.lm_head.weight is model.model.embed_tokens.weight
    kept = head.rows(torch.tensor([1, 2]))
    assert kept.weight.data_ptr() != head.weight.data_ptr()


def test_an_unknown_transform_is_refused(tiny_llama):
    model = tiny_llama()
    model.lm_head.register_forward_hook(lambda module, args, out: out)  # harmless
    check_split(model)
    forward = model.forward

    def shifted(**kwargs):
        out = forward(**kwargs)
        out.logits = out.logits - out.logits.mean(-1, keepdim=True) * 0.5 + 0.3
        return out

    model.forward = shifted
    with pytest.raises(BadInput, match="last hidden state"):
        check_split(model)


def test_a_bidirectional_model_is_refused():
    config = transformers.BertConfig(**{**SMALL, "max_position_embeddings": 64, "is_decoder": False, "pad_token_id": 0})
    model = transformers.BertLMHeadModel(config).eval()
    with pytest.raises(BadInput, match="BertLMHeadModel"):
        check_split(model)


def test_a_model_without_head_is_refused(tiny_llama):
    with pytest.raises(BadInput, match="no backbone"):
        split(tiny_llama().model)
