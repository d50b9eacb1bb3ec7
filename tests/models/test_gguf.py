"""GGUF files become plain folders, once, with chat template and digit splitter."""

import copy
import json

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import pre_tokenizers

from draftsmith.errors import BadInput
from draftsmith.models.gguf import converted_folder, restore_digit_splitter
from draftsmith.models.target import load_target

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(weight, heads):
    """Rotary halves side by side, as GGUF keeps query and key rows."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write_gguf(path, model, tokenizer, pre):
    config, writer = model.config, GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token.startswith("<|") else 1 for token, _ in vocab])
    writer.add_token_merges([" ".join(pair) for pair in merges_of(tokenizer)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy().astype(np.float32)
        parts = name.split(".")
        if parts[1] == "layers":
            kind = ".".join(parts[3:-1])
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
            values = interleaved(values, heads[kind]) if kind in heads else values
            writer.add_tensor(f"blk.{parts[2]}.{NAMES[kind]}.weight", np.ascontiguousarray(values))
        elif name != "lm_head.weight":
            writer.add_tensor("token_embd.weight" if "embed" in name else "output_norm.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def merges_of(tokenizer):
    return json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]


@torch.no_grad()
def test_gguf_target_is_converted_once(tiny_llama, tiny_tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "cache"))
    model = tiny_llama(vocab_size=320)
    file = tmp_path / "tiny.gguf"
    write_gguf(file, model, tiny_tokenizer, "smollm")
    target = load_target(str(file))
    ids = torch.tensor([[1, 30, 7, 5, 300]])
    torch.testing.assert_close(target.model(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    assert target.eos_token_ids == (2,)
    assert target.tokenizer is not None
    assert target.tokenizer.chat_template == tiny_tokenizer.chat_template
    restored = copy.deepcopy(tiny_tokenizer)
    restore_digit_splitter(restored, "smollm")
    for text in ("In 1234 the 56 ships", "x = 10\n", "<|im_start|>user\nHi<|im_end|>"):
        assert target.tokenizer(text)["input_ids"] == restored(text)["input_ids"]
    assert f"converting {file.name}" in capsys.readouterr().err
    folder = converted_folder(file)
    assert folder.is_relative_to(tmp_path / "cache")
    assert capsys.readouterr().err == ""


def test_digit_splitter_only_where_the_file_names_it(tokenizer_factory):
    tokenizer = tokenizer_factory(texts=["1234 1234 1234 1234"], vocab_size=270)
    whole = len(tokenizer("1234")["input_ids"])
    restore_digit_splitter(tokenizer, "llama-bpe")
    assert len(tokenizer("1234")["input_ids"]) == whole < 4
    restore_digit_splitter(tokenizer, "smollm")
    assert len(tokenizer("1234")["input_ids"]) == 4
    assert isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.Sequence)


def test_not_a_gguf_file(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "cache"))
    file = tmp_path / "bad.gguf"
    for content in (
        b"",
        b"something else entirely, long enough to have a header",
        b"GGUF" + b"\x03\0\0\0" + b"\xff" * 64,
    ):
        file.write_bytes(content)
        with pytest.raises(BadInput, match="not a GGUF file") as error:
            load_target(str(file))
        assert "\n" not in str(error.value)
