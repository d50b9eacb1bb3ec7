"""Loading targets: what they know, that they are frozen, and one line for what cannot be loaded."""

import json
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MptConfig,
    MptForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from draftsmith.errors import BadInput
from draftsmith.models import loading
from draftsmith.models.target import as_target, in_dtype, load_target, without_contents


@pytest.fixture
def folder(tiny_llama, tiny_tokenizer, tmp_path):
    model = tiny_llama(vocab_size=320, eos_token_id=[2, 0])
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def refused(name, match, **options):
    with pytest.raises(BadInput, match=match) as error:
        load_target(str(name), **options)
    assert "\n" not in str(error.value)


def test_a_folder_is_loaded_frozen(folder, capfd):
    target = load_target(str(folder))
    assert capfd.readouterr() == ("", "")
    assert (target.vocab_size, target.hidden_size, target.num_layers, target.context_limit) == (320, 32, 2, 512)
    assert target.eos_token_ids == (2, 0)
    assert target.device.type in ("cpu", "cuda")
    assert target.dtype == torch.float32
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert target.tokenizer is not None
    assert load_target(str(folder), dtype="bfloat16", device="cpu").dtype == torch.bfloat16


def test_eos_comes_from_generation_config_then_config_then_tokenizer(folder, tiny_tokenizer):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_target(str(folder)).eos_token_ids == (7,)
    (folder / "generation_config.json").write_text("{}")
    assert load_target(str(folder)).eos_token_ids == (2, 0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    assert load_target(str(folder)).eos_token_ids == (tiny_tokenizer.eos_token_id,)


def test_a_plain_model_becomes_a_frozen_target(tiny_gpt2):
    model = tiny_gpt2().train()
    target = as_target(model)
    assert target.model is model
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert (target.eos_token_ids, target.tokenizer, target.context_limit) == ((), None, 512)
    assert as_target(target) is target
    with pytest.raises(BadInput, match="got str"):
        as_target("gpt2")
    with pytest.raises(BadInput, match="only decoder-only"):
        as_target(model.transformer)


def test_what_cannot_be_a_target_is_refused_before_weights_are_read(tmp_path):
    T5Config().save_pretrained(tmp_path / "t5")
    refused(tmp_path / "t5", "encoder-decoder model")
    with pytest.raises(BadInput):
        as_target(T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=8, d_ff=8, num_layers=1, num_heads=2)))
    (tmp_path / "odd").mkdir()
    for config, match in (
        ({"model_type": "lama"}, r"unknown model_type 'lama'.*did you mean 'llama'"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "x.Y"}}, "trust_remote_code"),
        ({"model_type": "vit"}, "vit model is not a causal LM"),
    ):
        (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
        refused(tmp_path / "odd", match)
    (tmp_path / "odd" / "config.json").write_text("{")
    refused(tmp_path / "odd", "cannot be loaded")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"no config\.json")


def test_bidirectional_model_is_refused(tmp_path):
    config = BertConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    BertLMHeadModel(config).save_pretrained(tmp_path)
    refused(tmp_path, "BertLMHeadModel|cannot be loaded")


def test_names_that_lead_nowhere(tmp_path, monkeypatch):
    refused(tmp_path / "gone", "no such folder")
    refused("./gone", "no such folder")
    refused("a/b/c", "no such folder")
    refused(tmp_path / "gone.gguf", "no such GGUF file")
    refused("smollm2-135m-instrct", "did you mean 'smollm2-135m-instruct'")
    refused("", "an empty model name")
    (tmp_path / "file.txt").write_text("x")
    refused(tmp_path / "file.txt", "a file; expected a model folder")
    monkeypatch.setattr(loading, "hub_reachable", lambda: False)
    refused("nobody/nothing", "hub cannot be reached")


def test_unknown_dtype_and_device(folder):
    refused(folder, r"dtype: unknown value 'float23'.*did you mean 'float32'", dtype="float23")
    refused(folder, "not a torch device", device="gpu0")
    if not torch.cuda.is_available():
        refused(folder, "there are 0 CUDA devices", device="cuda")


def test_incomplete_or_damaged_weights(folder):
    from safetensors.torch import load_file, save_file

    weights = folder / "model.safetensors"
    tensors, whole = load_file(weights), weights.read_bytes()
    removed = {k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}
    save_file(removed, weights, metadata={"format": "pt"})
    refused(folder, "1 weights are missing, the first is model.layers.1.mlp.up_proj.weight")
    weights.write_bytes(whole[: len(whole) // 2])
    refused(folder, "cannot be loaded")
    save_file({**tensors, "model.norm.weight": torch.ones(31)}, weights, metadata={"format": "pt"})
    refused(folder, "cannot be loaded")
    weights.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    refused(folder, "safetensors")


def test_no_tokenizer(tiny_llama, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    refused(tmp_path, "holds no tokenizer")


def test_recurrent_state_is_refused(tmp_path, tiny_tokenizer):
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=16, state_size=4, num_hidden_layers=1))
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    refused(tmp_path, "recurrent state")


def test_a_real_target(shared_data):
    target = load_target(str(shared_data / "models" / "stories260K"))
    assert (target.vocab_size, target.num_layers, target.eos_token_ids) == (512, 5, (2,))
    assert target.tokenizer is not None
    ids = torch.tensor([target.tokenizer("Once upon a time, there was a little")["input_ids"]])
    model: Any = target.model
    text = target.tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0])
    assert "girl" in text


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3", "tiny_gpt2"])
def test_a_copy_in_another_dtype_is_what_would_have_been_loaded(family, tied, request, tmp_path):
    request.getfixturevalue(family)(tie_word_embeddings=tied).save_pretrained(tmp_path)
    target = as_target(loading.load_causal_lm(str(tmp_path), "float32", "cpu"))
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    copied = in_dtype(target, torch.bfloat16)
    loaded = loading.load_causal_lm(str(tmp_path), "bfloat16", "cpu")
    found, expected = (dict(model.named_parameters()) for model in (copied.model, loaded))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert (copied.dtype, copied.name, copied.eos_token_ids) == (torch.bfloat16, target.name, target.eos_token_ids)
    embeddings, head = (getattr(copied.model, f"get_{end}_embeddings")().weight for end in ("input", "output"))
    assert (embeddings is head) is tied
    assert not copied.model.training
    assert not any(parameter.requires_grad for parameter in copied.model.parameters())
    ids = torch.tensor([[5, 20, 40, 3]])
    assert torch.equal(copied.model(input_ids=ids).logits, loaded(input_ids=ids).logits)
    for parameter in copied.model.parameters():
        parameter.data.zero_()
    assert target.dtype == torch.float32
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name]), "the copy shares nothing with the target"


def test_what_a_family_keeps_in_float32_stays_so(tiny_llama):
    target = as_target(tiny_llama())
    target.model._keep_in_fp32_modules_strict = {"layers.0.input_layernorm"}
    target.model._keep_in_fp32_modules = {"norm"}
    for dtype, kept in ((torch.bfloat16, "layers.0.input_layernorm"), (torch.float16, "norm")):
        for name, parameter in in_dtype(target, dtype).model.named_parameters():
            assert parameter.dtype == (torch.float32 if kept in name else dtype), name


def test_a_model_with_packed_weights_is_not_copied(tiny_llama):
    """Its modules' own forwards would multiply by the packed weights of the model they were made for."""
    target = as_target(tiny_llama())
    layer = target.model.lm_head
    layer.__dict__["forward"] = layer.forward
    with pytest.raises(ValueError, match="unpack it"):
        in_dtype(target, torch.bfloat16)


def test_a_target_without_contents_has_all_the_shapes_and_shares_nothing(tiny_llama):
    target = as_target(tiny_llama())
    empty: Any = without_contents(target)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in target.model.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in empty.model.state_dict().items()} == shapes
    assert empty.device.type == "meta"
    assert all(buffer.is_meta for buffer in empty.model.buffers())
    assert empty.model.get_output_embeddings().weight is empty.model.get_input_embeddings().weight, "tied as it was"
    assert (empty.vocab_size, empty.num_layers) == (target.vocab_size, target.num_layers)
    assert target.device.type == "cpu"


BY_COLUMN = {
    "bloom": lambda: BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=32)),
    "mpt": lambda: MptForCausalLM(MptConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=32)),
    "gpt_neo": lambda: GPTNeoForCausalLM(
        GPTNeoConfig(
            hidden_size=16, num_layers=2, num_heads=2, vocab_size=32, attention_types=[[["global", "local"], 1]]
        )
    ),
}


@pytest.mark.parametrize("family", BY_COLUMN)
def test_positions_by_column_cannot_verify_drafts(family):
    with pytest.raises(BadInput, match="by columns of the cache"):
        as_target(BY_COLUMN[family]())


def test_frequencies_that_change_with_length_end_the_context(tiny_llama):
    model = tiny_llama()
    limit = as_target(model).context_limit
    model.config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    assert limit is not None
    assert as_target(model).context_limit == 16 < limit
