"""Exports to transformers: what is written serves as it is, what cannot be held is refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.errors import BadInput
from draftsmith.export import export, hf
from draftsmith.models.draft_lm import DraftLM, cut_vocabulary, load_draft_lm, save_draft_lm
from draftsmith.models.folder import write_manifest
from draftsmith.models.lora import add_lora
from draftsmith.models.target import Target, as_target

IDS = torch.tensor([[1, 30, 7, 5, 300], [2, 2, 9, 319, 4]])


@pytest.fixture
def final(tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any) -> Path:
    """A run's ``final/`` with a full vocabulary."""
    draft_lm = DraftLM(tiny_llama(vocab_size=320, layers=1, seed=3))
    save_draft_lm(draft_lm, tmp_path / "run" / "final", target_name="some/target", tokenizer=tiny_tokenizer)
    return tmp_path / "run" / "final"


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(BadInput) as caught:
        export(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@torch.no_grad()
def test_the_folder_is_a_model_with_the_checkpoints_logits_and_tokenizer(final, tmp_path, tiny_llama, tiny_tokenizer):
    out = export(final, "hf", tmp_path / "served")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(model(IDS).logits, tiny_llama(vocab_size=320, layers=1, seed=3)(IDS).logits)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == tiny_tokenizer.get_vocab()
    assert not list(out.rglob("*.bin"))
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == [], (
        "nothing half-written is left"
    )


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gpt2"])
def test_transformers_takes_it_as_assistant_and_its_greedy_output_is_the_targets(
    family, request, final, tmp_path, tiny_llama, tiny_tokenizer
):
    make = request.getfixturevalue(family)
    save_draft_lm(DraftLM(make(vocab_size=320, layers=1)), tmp_path / "d", target_name="t", tokenizer=tiny_tokenizer)
    assistant = AutoModelForCausalLM.from_pretrained(export(tmp_path / "d", "hf", tmp_path / "served"))
    target = tiny_llama(vocab_size=320)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    settings["attention_mask"] = torch.ones_like(IDS[:1])
    assistant.generation_config.assistant_confidence_threshold = 0.0
    plain = target.generate(IDS[:1], **settings)
    assert torch.equal(target.generate(IDS[:1], assistant_model=assistant, **settings), plain)


@torch.no_grad()
@pytest.mark.parametrize("named", [True, False])
def test_an_adapter_is_merged(named, tmp_path, tiny_llama, tiny_tokenizer):
    base = tiny_llama(vocab_size=320, layers=1, seed=3)
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    draft_lm = DraftLM(base, base_name=str(tmp_path / "base") if named else None)
    add_lora(base, rank=2, alpha=8.0)
    for name, parameter in base.named_parameters():
        if ".lora_" in name:
            parameter.normal_(0, 0.3)
    save_draft_lm(draft_lm, tmp_path / "final", target_name="t", tokenizer=tiny_tokenizer)
    assert (tmp_path / "final" / "base").exists() != named

    model = AutoModelForCausalLM.from_pretrained(export(tmp_path / "final", "hf", tmp_path / "out"))
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    torch.testing.assert_close(model(IDS).logits, draft_lm(IDS).logits, atol=1e-4, rtol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert (model(IDS).logits - plain(IDS).logits).abs().max() > 0.1, "the adapter changes something"


def test_the_export_is_a_drafter_for_the_target_as_well(final, tmp_path, tiny_llama, tiny_tokenizer):
    target = Target(tiny_llama(vocab_size=320), tiny_tokenizer, "t", ())
    assert load_draft_lm(export(final, "hf", tmp_path / "out"), target).kept_ids is None


def test_half_precision_stays(final, tmp_path, tiny_llama, tiny_tokenizer):
    half = tiny_llama(vocab_size=320, layers=1).to(torch.bfloat16)
    save_draft_lm(DraftLM(half), tmp_path / "half", target_name="t", tokenizer=tiny_tokenizer)
    out = export(tmp_path / "half", "hf", tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(out).dtype is torch.bfloat16
    assert "bfloat16" in (out / "README.md").read_text()


def test_a_cut_vocabulary_is_refused_with_the_reason(tmp_path, tiny_llama, tiny_tokenizer):
    cut = cut_vocabulary(tiny_llama(vocab_size=320), torch.arange(0, 320, 5))
    save_draft_lm(cut, tmp_path / "cut", target_name="t", tokenizer=tiny_tokenizer)
    line = refusal(tmp_path / "cut", "hf", tmp_path / "out")
    assert "scores 64 of 320 ids, and a plain transformers model scores them all" in line
    assert "drafter.vocabulary" in line
    assert not (tmp_path / "out").exists()


def test_another_kind_of_drafter_is_refused_with_the_reason(tmp_path):
    (tmp_path / "heads").mkdir()
    write_manifest(tmp_path / "heads", "medusa", num_heads=4)
    line = refusal(tmp_path / "heads", "hf", tmp_path / "out")
    assert "of kind 'medusa' reads its target's hidden states" in line


def test_what_is_no_drafter_is_refused(final, tmp_path, tiny_llama):
    assert "expected one of hf" in refusal(final, "fh", tmp_path / "out")
    assert "did you mean 'hf'" in refusal(final, "hff", tmp_path / "out")
    assert "no such folder" in refusal(tmp_path / "gone", "hf", tmp_path / "out")
    assert f"did you mean {final}?" in refusal(final.parent, "hf", tmp_path / "out")
    tiny_llama().save_pretrained(tmp_path / "plain")
    assert "holds no draftsmith.json" in refusal(tmp_path / "plain", "hf", tmp_path / "out")
    manifest = json.loads((final / "draftsmith.json").read_text())
    del manifest["sha256"]
    (final / "draftsmith.json").write_text(json.dumps(manifest))
    assert "the key 'sha256' is missing" in refusal(final, "hf", tmp_path / "out")


def test_a_damaged_checkpoint_is_refused(final, tmp_path):
    weights = final / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert "damaged or changed" in refusal(final, "hf", tmp_path / "out")


def test_an_existing_folder_is_left_alone(final, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    assert "not empty" in refusal(final, "hf", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_an_export_that_reads_back_differently_is_not_left(final, tmp_path, monkeypatch, tiny_llama):
    real = hf.load_causal_lm

    def other(name: str, *args: Any) -> Any:
        return real(name, *args) if name == str(final) else tiny_llama(vocab_size=320, layers=1, seed=4)

    monkeypatch.setattr(hf, "load_causal_lm", other)
    assert "read back, the export gives other logits" in refusal(final, "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_sharing_with_the_target_is_undone(tmp_path, tiny_llama, tiny_tokenizer):
    target = as_target(tiny_llama(vocab_size=320))
    save_draft_lm(DraftLM(target.model), tmp_path / "same", target_name="t", tokenizer=tiny_tokenizer)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    export(tmp_path / "same", "hf", tmp_path / "out")
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())
