"""Views run other paths through the very modules of a model, and leave the model alone."""

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from draftsmith.errors import BadInput
from draftsmith.models.views import BlockSkipper, TwoParts, final_norm, with_layers

FAMILIES = ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])


@pytest.fixture(params=FAMILIES)
def model(request):
    return request.getfixturevalue(request.param)(layers=4)


@torch.no_grad()
def test_two_parts_make_the_whole(model):
    inputs = {"input_ids": IDS, "use_cache": False}
    expected = model(**inputs, output_hidden_states=True)
    for num_first in (1, 3):
        parts = TwoParts(model, num_first)
        hidden, normed = parts.first(**inputs)
        torch.testing.assert_close(hidden, expected.hidden_states[num_first])
        torch.testing.assert_close(parts.rest(hidden, **inputs)[1], expected.logits)
        torch.testing.assert_close(final_norm(model)(hidden), normed)
        last, _ = parts.first(input_ids=IDS[:, :5], use_cache=False)
        torch.testing.assert_close(last, hidden[:, :5], atol=1e-5, rtol=1e-4)  # nothing is left of an earlier call


@torch.no_grad()
def test_skipped_blocks_are_as_if_their_last_weights_were_zero(model, request):
    view = BlockSkipper(model).view(attention=[0, 2], mlp=[2, 3])
    found, before = view(input_ids=IDS, use_cache=False).logits, model(input_ids=IDS, use_cache=False).logits
    silenced = {"self_attn": (0, 2), "attn": (0, 2), "mlp": (2, 3)}
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for block, numbers in silenced.items():
        for i in numbers:
            for name, parameter in getattr(layers[i], block, torch.nn.Module()).named_parameters():
                if name.split(".")[0] in ("o_proj", "down_proj", "c_proj"):
                    parameter.zero_()
    torch.testing.assert_close(found, model(input_ids=IDS, use_cache=False).logits, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found, before, atol=1e-2)


@torch.no_grad()
def test_a_view_shares_every_parameter_and_leaves_no_trace(tiny_llama):
    model = tiny_llama(layers=3)
    before = model(input_ids=IDS, output_hidden_states=True)
    view = BlockSkipper(model).view(attention=[1], mlp=[1, 2])
    own = {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for parameter in view.parameters()} < own
    assert sum(p.numel() for p in view.parameters()) < sum(p.numel() for p in model.parameters())
    assert [type(layer).__name__ for layer in model.model.layers] == ["LlamaDecoderLayer"] * 3
    view(input_ids=IDS)
    after = model(input_ids=IDS, output_hidden_states=True)
    assert len(after.hidden_states) == 4
    assert torch.equal(after.logits, before.logits)
    model.model.layers[0].mlp.down_proj.weight.add_(1.0)
    assert not torch.equal(view(input_ids=IDS).logits, BlockSkipper(tiny_llama(layers=3)).view([1], [1, 2])(IDS).logits)


def test_layers_that_are_not_there_and_families_that_cannot_are_refused(tiny_llama):
    model = tiny_llama(layers=3)
    with pytest.raises(BadInput, match=r"layer 3 cannot be skipped: expected 0 to 2"):
        BlockSkipper(model).view([3], [])
    for number in (0, 3):
        with pytest.raises(BadInput, match=rf"{number} first layers: expected 1 to 2"):
            TwoParts(model, number)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=3, n_head=4)).eval()
    with pytest.raises(BadInput, match="cannot be skipped one by one"):
        BlockSkipper(bloom)
    TwoParts(bloom, 1)  # its layers return tuples
    with_layers(bloom, list(bloom.transformer.h))(input_ids=IDS)
    model.model._hf_hook = object()
    with pytest.raises(BadInput, match="spread over several devices"):
        TwoParts(model, 1)
