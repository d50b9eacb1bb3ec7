"""Draft models: cut vocabularies, saving, loading, and what is refused."""

import json
import multiprocessing
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from draftsmith.errors import BadInput
from draftsmith.models.draft_lm import DraftLM, cut_vocabulary, load_draft_lm, save_draft_lm
from draftsmith.models.lora import add_lora, has_lora, merge
from draftsmith.models.target import Target, load_target

KEPT = torch.tensor([0, 1, 2, 7, 30, 31, 200, 319])
IDS = torch.tensor([[1, 30, 7, 5, 300], [2, 2, 9, 319, 4]])


@pytest.fixture
def target(tiny_llama, tiny_tokenizer):
    return Target(tiny_llama(vocab_size=320), tiny_tokenizer, "tiny", (2,))


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen2", "tiny_gemma3", "tiny_gpt2"])
@torch.no_grad()
def test_cut_vocabulary_scores_kept_ids_and_embeds_all(family, request):
    model = request.getfixturevalue(family)(vocab_size=320)
    draft_lm = cut_vocabulary(model, KEPT)
    output = draft_lm(IDS)
    expected = model(IDS).logits
    torch.testing.assert_close(output.logits, expected[..., KEPT], atol=1e-5, rtol=1e-5)
    assert draft_lm(IDS, logits_to_keep=2).logits.shape == (2, 2, len(KEPT))
    torch.testing.assert_close(draft_lm.head(output.last_hidden_state), output.logits)
    full = draft_lm.expand(output.logits)
    assert torch.equal(full[..., KEPT], output.logits)
    assert full.isinf().sum(-1).eq(320 - len(KEPT)).all()
    assert draft_lm.d2t is not None
    assert draft_lm.t2d is not None
    assert torch.equal(torch.arange(len(KEPT)) + draft_lm.d2t, KEPT)
    assert torch.equal(draft_lm.t2d.nonzero().flatten(), KEPT)
    # The model it came from keeps its own tied head.
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert draft_lm.num_parameters_read < draft_lm.model.num_parameters()


def test_expand_to_a_padded_or_shorter_vocabulary(tiny_llama):
    full = DraftLM(tiny_llama(vocab_size=64))
    values = torch.arange(64.0)[None]
    assert full.expand(values) is values
    assert torch.equal(full.expand(values, 70, fill=0.0)[0, 60:], torch.tensor([60.0, 61, 62, 63, 0, 0, 0, 0, 0, 0]))
    assert torch.equal(full.expand(values, 60), values[:, :60])


@pytest.mark.parametrize("ids", [[3, 2], [1, 1], [5, 320], [-1, 4], []])
def test_kept_ids_must_be_increasing_ids(tiny_llama, ids):
    with pytest.raises(BadInput, match="increasing"):
        cut_vocabulary(tiny_llama(vocab_size=320), torch.tensor(ids, dtype=torch.int64))


@torch.no_grad()
def test_cached_steps_equal_one_pass(tiny_llama):
    from transformers import DynamicCache

    draft_lm = cut_vocabulary(tiny_llama(vocab_size=320), KEPT)
    cache = DynamicCache(config=draft_lm.config)
    first = draft_lm(IDS[:, :3], cache=cache)
    second = draft_lm(IDS[:, 3:], cache=first.cache)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), draft_lm(IDS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3", "tiny_gpt2"])
@torch.no_grad()
def test_cut_folder_round_trip_and_from_pretrained_refuses(family, request, target, tmp_path):
    draft_lm = cut_vocabulary(request.getfixturevalue(family)(vocab_size=320, seed=3), KEPT)
    folder = tmp_path / "final"
    save_draft_lm(draft_lm, folder, target_name="tiny", tokenizer=target.tokenizer)
    loaded = load_draft_lm(folder, target)
    assert torch.equal(loaded(IDS).logits, draft_lm(IDS).logits)
    assert loaded.kept_ids is not None
    assert torch.equal(loaded.kept_ids, KEPT)
    manifest = json.loads((folder / "draftsmith.json").read_text())
    assert manifest["kind"] == "model"
    assert manifest["kept"] == len(KEPT)
    with pytest.raises(BadInput, match="a drafter with a cut vocabulary, not a model that stands alone"):
        load_target(str(folder))
    with pytest.raises(ValueError, match="draftsmith_cut_vocabulary"):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(Exception, match=r"model\.safetensors|draftsmith_cut_vocabulary"):
        LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_full_folder_is_a_plain_transformers_folder(tiny_llama, target, tmp_path, tied):
    draft_lm = DraftLM(tiny_llama(vocab_size=320, seed=3, tie_word_embeddings=tied))
    save_draft_lm(draft_lm, tmp_path / "final", target_name="tiny", tokenizer=target.tokenizer)
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "final"),
        load_draft_lm(tmp_path / "final", target).model,
    ):
        assert torch.equal(model(IDS).logits, draft_lm(IDS).logits)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_loaded_in_the_targets_dtype(tiny_llama, tiny_tokenizer, tmp_path):
    save_draft_lm(
        cut_vocabulary(tiny_llama(vocab_size=320), KEPT), tmp_path / "d", target_name="t", tokenizer=tiny_tokenizer
    )
    target = Target(tiny_llama(vocab_size=320).to(torch.bfloat16), tiny_tokenizer, "tiny", ())
    assert load_draft_lm(tmp_path / "d", target).dtype == torch.bfloat16
    assert load_draft_lm(tmp_path / "d", target, dtype=torch.float32).dtype == torch.float32


def test_other_tokenizer_is_refused_with_what_differs(tiny_llama, tokenizer_factory, target, tmp_path):
    other = tokenizer_factory(texts=["zebra quartz vexing jumbled"] * 9)
    for number, draft_lm in enumerate([DraftLM(tiny_llama(320)), cut_vocabulary(tiny_llama(320), KEPT)]):
        folder = tmp_path / str(number)
        save_draft_lm(draft_lm, folder, target_name="tiny", tokenizer=other)
        with pytest.raises(BadInput, match=r"different tokenizers: \d+ of \d+ ids differ, the first is 259") as error:
            load_draft_lm(folder, target)
        assert one_line(error).startswith(str(folder))
    plain = tmp_path / "plain"
    tiny_llama(vocab_size=320).save_pretrained(plain)
    other.save_pretrained(plain)
    with pytest.raises(BadInput, match="different tokenizers"):
        load_draft_lm(plain, target)


def test_plain_folder_without_tokenizer(tiny_llama, target, tmp_path):
    tiny_llama(vocab_size=320).save_pretrained(tmp_path / "same")
    assert load_draft_lm(tmp_path / "same", target).kept_ids is None
    tiny_llama(vocab_size=64).save_pretrained(tmp_path / "other")
    with pytest.raises(BadInput, match="no tokenizer"):
        load_draft_lm(tmp_path / "other", target)


def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_tampered_folders_are_refused_in_one_line(tiny_llama, tokenizer_factory, target, tmp_path):
    def saved(name):
        folder = tmp_path / name
        save_draft_lm(
            cut_vocabulary(tiny_llama(vocab_size=320), KEPT), folder, target_name="t", tokenizer=target.tokenizer
        )
        return folder, folder / "draftsmith.json", folder / "cut_vocabulary.safetensors"

    def refused(folder, match):
        with pytest.raises(BadInput, match=match) as error:
            load_draft_lm(folder, target)
        assert str(folder) in one_line(error)

    folder, manifest, _ = saved("kind")
    change_json(manifest, kind="medusa")
    refused(folder, "kind 'medusa', expected 'model'")
    folder, manifest, _ = saved("format")
    change_json(manifest, format=99)
    refused(folder, "format 99")
    folder, manifest, _ = saved("json")
    manifest.write_text("{")
    refused(folder, "not valid JSON")
    folder, manifest, _ = saved("key")
    manifest.write_text(json.dumps({"format": 1, "kind": "model"}))
    refused(folder, "'base' is missing")
    folder, manifest, _ = saved("types")
    change_json(manifest, sha256=[])
    refused(folder, "sha256 an object")
    folder, manifest, _ = saved("hash")
    change_json(manifest, tokenizer_hash="0" * 64)
    refused(folder, "not the one")
    folder, _, weights = saved("truncated")
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(folder, "damaged or changed")
    folder, _, weights = saved("gone")
    weights.unlink()
    refused(folder, "missing")
    folder, manifest, weights = saved("offsets")
    tensors = load_file(weights)
    save_file({**tensors, "d2t": tensors["d2t"] + 1}, weights)
    refused(folder, "damaged or changed")
    change_json(manifest, sha256={})
    refused(folder, "sha256")


def test_inconsistent_cut_vocabulary_is_refused(tiny_llama, target, tmp_path):
    from draftsmith.models.folder import hash_files

    folder = tmp_path / "d"
    save_draft_lm(cut_vocabulary(tiny_llama(320), KEPT), folder, target_name="t", tokenizer=target.tokenizer)
    weights = folder / "cut_vocabulary.safetensors"
    tensors = load_file(weights)
    for change, match in (
        ({"t2d": ~tensors["t2d"]}, "contradict"),
        ({"d2t": tensors["d2t"] - 1}, "increasing"),
        ({"lm_head.weight": tensors["lm_head.weight"][:3].clone()}, r"shape \(3, 32\), expected \(8, 32\)"),
        ({"extra": torch.ones(1)}, "extra is not one of"),
    ):
        save_file({**tensors, **change}, weights)
        change_json(folder / "draftsmith.json", sha256=hash_files(folder))
        with pytest.raises(BadInput, match=match):
            load_draft_lm(folder, target)


def test_pickled_weights_are_never_read(tiny_llama, target, tmp_path):
    model = tiny_llama(vocab_size=320)
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadInput) as error:
        load_draft_lm(tmp_path, target)
    assert "safetensors" in one_line(error)


@pytest.mark.parametrize("cut", [True, False])
@torch.no_grad()
def test_adapter_is_saved_with_its_base_and_loaded_merged(tiny_llama, target, tmp_path, cut):
    draft_lm = cut_vocabulary(tiny_llama(320), KEPT) if cut else DraftLM(tiny_llama(320))
    start = draft_lm(IDS).logits
    train_adapter(draft_lm)
    assert not torch.allclose(draft_lm(IDS).logits, start, atol=1e-3)
    save_draft_lm(draft_lm, tmp_path / "d", target_name="t", tokenizer=target.tokenizer)
    assert (tmp_path / "d" / "base").is_dir()
    loaded = load_draft_lm(tmp_path / "d", target)
    assert not has_lora(loaded)
    torch.testing.assert_close(loaded(IDS).logits, draft_lm(IDS).logits, atol=1e-5, rtol=1e-5)
    merge(draft_lm.model)
    assert not has_lora(draft_lm)
    torch.testing.assert_close(loaded(IDS).logits, draft_lm(IDS).logits, atol=1e-5, rtol=1e-5)


def train_adapter(draft_lm: DraftLM) -> None:
    add_lora(draft_lm.model, rank=4, alpha=8.0)
    trained = [name for name, p in draft_lm.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora_" in name for name in trained)
    generator = torch.Generator().manual_seed(0)
    for p in draft_lm.parameters():
        if p.requires_grad:
            p.copy_(0.2 * torch.randn(p.shape, generator=generator))


@torch.no_grad()
def test_adapter_on_a_named_base_is_a_peft_folder(tiny_llama, target, tmp_path):
    from peft import PeftModel

    tiny_llama(vocab_size=320).save_pretrained(tmp_path / "base_model")
    target.tokenizer.save_pretrained(tmp_path / "base_model")
    draft_lm = load_draft_lm(tmp_path / "base_model", target)
    train_adapter(draft_lm)
    save_draft_lm(draft_lm, tmp_path / "d", target_name="t", tokenizer=target.tokenizer)
    assert not (tmp_path / "d" / "base").exists()
    expected = draft_lm(IDS).logits
    torch.testing.assert_close(load_draft_lm(tmp_path / "d", target)(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base_model")
    torch.testing.assert_close(PeftModel.from_pretrained(base, tmp_path / "d")(IDS).logits, expected)
    (tmp_path / "d" / "draftsmith.json").unlink()  # as peft itself would have left it
    torch.testing.assert_close(load_draft_lm(tmp_path / "d", target)(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    (tmp_path / "d" / "adapter_model.safetensors").rename(tmp_path / "d" / "adapter_model.bin")
    with pytest.raises(BadInput, match="safetensors only"):
        load_draft_lm(tmp_path / "d", target)


def test_unknown_lora_layers(tiny_llama):
    with pytest.raises(BadInput, match=r"lora\.target_modules"):
        add_lora(tiny_llama(), rank=2, alpha=2.0, target_modules=["nope"])


def test_state_dict_carries_the_kept_ids(tiny_llama):
    draft_lm, other = (cut_vocabulary(tiny_llama(320, seed=seed), KEPT + 0) for seed in (0, 1))
    other.load_state_dict(draft_lm.state_dict())
    assert torch.equal(other(IDS).logits, draft_lm(IDS).logits)
    assert torch.equal(draft_lm.state_dict()["kept_ids"], KEPT)


def save_forever(draft_lm, folder):
    while True:
        save_draft_lm(draft_lm, folder, target_name="t", tokenizer=None)


def test_killed_while_saving_leaves_a_whole_folder(tiny_llama, tmp_path):
    folder, target = tmp_path / "final", tiny_llama(layers=1)
    for attempt in range(8):
        process = multiprocessing.get_context("fork").Process(target=save_forever, args=(DraftLM(target), folder))
        process.start()
        time.sleep(0.1 + 0.013 * attempt)
        process.kill()
        process.join()
        process.close()
        if folder.exists():  # between two renames it is absent, and the next save heals that
            assert torch.equal(load_draft_lm(folder, target)(IDS % 64).logits, DraftLM(target)(IDS % 64).logits)
    save_draft_lm(DraftLM(target), folder, target_name="t", tokenizer=None)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_unwritable_place(tiny_llama, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="there is a file of that name"):
        save_draft_lm(DraftLM(tiny_llama()), tmp_path / "file", target_name="t", tokenizer=None)
    with pytest.raises(BadInput, match="cannot be written"):
        save_draft_lm(DraftLM(tiny_llama()), tmp_path / "file" / "d", target_name="t", tokenizer=None)
