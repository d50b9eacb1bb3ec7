"""The packed backend: other products and fused passes inside, the same figures outside."""

from typing import Any

import pytest
import torch

from draftsmith.decode import packed as packed_module
from draftsmith.decode.draft_model import DraftModel
from draftsmith.decode.forward import CachedLM
from draftsmith.decode.fused import fuse, is_fused
from draftsmith.decode.loop import plain_generate, speculative_generate
from draftsmith.decode.onednn import PackedProduct, supported
from draftsmith.decode.packed import is_packed, unpack, unpacked, use_backend, use_backend_of
from draftsmith.decode.sampling import Sampling
from draftsmith.heads.load import load_drafter
from draftsmith.models.draft_lm import DraftLM, cut_vocabulary, save_draft_lm
from draftsmith.models.target import Target

pytestmark = pytest.mark.skipif(not supported(), reason="this build of torch has no packed products")
FUSABLE = ("tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_mistral")
OTHERS = ("tiny_gemma3", "tiny_gpt2")


@pytest.fixture(params=FUSABLE)
def fusable(request: pytest.FixtureRequest) -> Any:
    """A factory of models whose layers are shaped like Llama's."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=FUSABLE + OTHERS)
def any_model(request: pytest.FixtureRequest) -> Any:
    """A factory of models of every family of the suite."""
    return request.getfixturevalue(request.param)


@torch.no_grad()
def fed(lm: Any, reference: Any) -> list[torch.Tensor]:
    """Logits of a ragged batch: prompts past a window of 8, a chain, a tree grown in two levels, a chain after its path."""
    cached = CachedLM(lm, 3)
    prompts = [reference.prompt_of(length, seed) for seed, length in enumerate((5, 14, 9))]
    ids, _ = reference.batch_of(prompts, "right")
    cached.prefill(ids, [len(prompt) for prompt in prompts])
    token = torch.tensor([[3, 9], [4, 11], [60, 0]])
    outputs = [cached.feed(token).logits]
    cached.keep(torch.tensor([2, 1, 2]), [2, 1, 2])
    outputs.append(cached.feed(token, torch.tensor([[-1, -1]] * 3)).logits)
    outputs.append(cached.feed(token.flip(1), torch.tensor([[0, 1], [1, 1], [0, 0]])).logits)
    cached.keep_paths(torch.tensor([[0, 2], [1, 2], [0, 3]]), torch.tensor([2, 2, 2]), [2, 2, 2])
    outputs.append(cached.feed(token[:, :1]).logits)
    return [logits for logits in outputs if logits is not None]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-4) -> None:
    """Equal up to rounding."""
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).norm() <= tolerance * other.float().norm()


def test_packed_products_change_nothing_but_rounding(reference: Any, any_model: Any) -> None:
    model = any_model()
    expected = fed(model, reference)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert use_backend(model, "packed") == "packed"
    assert is_packed(model)
    assert_same(fed(model, reference), expected)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    unpack(model)
    assert not is_packed(model)
    for one, other in zip(fed(model, reference), expected, strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
def test_products_of_few_rows_may_stay_plain(any_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = any_model()
    ids = torch.arange(8)[None]
    few, many = model(ids[:, :2]).logits, model(ids).logits
    packed_rows = []
    inside = PackedProduct.__call__
    monkeypatch.setattr(
        PackedProduct, "__call__", lambda self, x: packed_rows.append(x.shape[:-1].numel()) or inside(self, x)
    )
    assert use_backend(model, "packed", plain_rows=2) == "packed"
    assert torch.equal(model(ids[:, :2]).logits, few)
    assert not packed_rows
    assert torch.allclose(model(ids).logits, many, atol=1e-4)
    assert set(packed_rows) == {8}


def test_a_drafter_and_changed_weights_keep_the_rows_that_stay_plain(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = tiny_llama(), tiny_llama(seed=1)
    used = []
    inside = packed_module._pack
    monkeypatch.setattr(packed_module, "_pack", lambda layer, rows: used.append(rows) or inside(layer, rows))
    use_backend(target, "packed", plain_rows=3)
    assert use_backend_of(target, drafter) == "packed"
    with unpacked(target):
        assert not is_packed(target)
    assert is_packed(target)
    assert set(used) == {3}
    unpack(target)
    assert use_backend_of(target, drafter) == "plain"
    with unpacked(target):
        pass
    assert not is_packed(target)


@pytest.mark.parametrize("faster", [0, 3, 16])
def test_auto_measures_up_to_how_many_rows_plain_products_are_faster(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch, faster: int
) -> None:
    now = 0.0

    def ticking() -> float:
        return now

    def plain(x: torch.Tensor, weight: torch.Tensor) -> None:
        nonlocal now
        now += 1.0 if x.shape[0] <= faster else 3.0

    def packed(self: PackedProduct, x: torch.Tensor) -> None:
        nonlocal now
        now += 2.0

    model = tiny_llama()
    monkeypatch.setattr(packed_module.time, "perf_counter", ticking)
    monkeypatch.setattr(torch.nn.functional, "linear", plain)
    monkeypatch.setattr(PackedProduct, "__call__", packed)
    assert use_backend(model, "auto") == ("plain" if faster == 16 else "packed")
    assert model.__dict__.get("_draftsmith_plain_rows", 16) == faster


def test_a_packed_target_is_not_fused(reference: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    use_backend(model, "packed")
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("kept", [None, 40])
def test_fused_passes_of_a_draft_model_change_nothing_but_rounding(
    reference: Any, fusable: Any, kept: int | None
) -> None:
    model = fusable()
    lm = DraftLM(model) if kept is None else cut_vocabulary(model, torch.arange(0, kept))
    lm.eval()
    expected = fed(lm, reference)
    names = list(lm.state_dict())
    assert use_backend(lm, "packed") == "packed"
    assert is_fused(lm)
    assert list(lm.state_dict()) == names
    assert_same(fed(lm, reference), expected)
    unpack(lm)
    assert not is_fused(lm)
    for one, other in zip(fed(lm, reference), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_packed_and_not_fused(reference: Any, family: str, request: pytest.FixtureRequest) -> None:
    lm = DraftLM(request.getfixturevalue(family)())
    expected = fed(lm, reference)
    assert use_backend(lm, "packed") == "packed"
    assert not is_fused(lm)
    assert_same(fed(lm, reference), expected)


def test_a_model_that_only_looks_like_llama_is_not_fused(reference: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    layer = model.model.layers[0]
    plain = layer.mlp.forward
    layer.mlp.forward = lambda hidden: 0.5 * plain(hidden)  # as families with residual multipliers do
    lm = DraftLM(model)
    assert not fuse(lm)
    assert "forward" not in lm.__dict__


def test_gradients_pass_beside_the_fused_layers(reference: Any, tiny_llama: Any) -> None:
    lm = DraftLM(tiny_llama())
    use_backend(lm, "packed")
    assert is_fused(lm)
    ids = torch.tensor([reference.prompt_of(6, 0)])
    lm(input_ids=ids).logits.logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in lm.parameters())


def test_new_weights_count_once_the_backend_is_set_again(reference: Any, tiny_llama: Any) -> None:
    lm = DraftLM(tiny_llama())
    use_backend(lm, "packed")
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(1.1)
    use_backend(lm, "packed")
    found = fed(lm, reference)
    unpack(lm)
    assert_same(found, fed(lm, reference))


@pytest.mark.parametrize("tree", [None, [[0], [0, 0], [1]]])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_decoding_with_a_fused_drafter_is_greedy_decoding(
    reference: Any, tiny_llama: Any, fusable: Any, tree: Any, batch_size: int
) -> None:
    target = tiny_llama(layers=3, seed=1)
    lm = DraftLM(fusable(seed=2))
    use_backend(lm, "packed")
    ids, mask = reference.batch_of([reference.prompt_of(length, length) for length in (4, 11, 7)][:batch_size])
    settings: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": []}
    plain = plain_generate(target, ids, mask, **settings)
    drafted = speculative_generate(
        target, DraftModel(lm, 64), ids, mask, num_speculative_tokens=3, tree=tree, **settings
    )
    assert torch.equal(drafted.tokens, plain.tokens)


@pytest.mark.skipif(not supported(torch.bfloat16), reason="this processor has no products in bfloat16")
class TestBfloat16:
    """A draft model in bfloat16 beside a target in float32."""

    def test_products_and_passes_agree_with_plain_modules(self, reference: Any, fusable: Any) -> None:
        lm = DraftLM(fusable().bfloat16())
        expected = fed(lm, reference)
        assert use_backend(lm, "packed") == "packed"
        assert is_fused(lm)
        assert_same(fed(lm, reference), expected, 5e-2)

    def test_what_it_drafts_is_verified_by_the_probabilities_it_was_drawn_from(
        self, reference: Any, tiny_llama: Any
    ) -> None:
        target, sampling = tiny_llama(vocab_size=8, seed=1), Sampling(1.0)
        lm = DraftLM(tiny_llama(vocab_size=8, seed=2).bfloat16())
        use_backend(lm, "packed")
        prompt = reference.prompt_of(5, 3, vocab_size=8)
        ids, mask = reference.batch_of([prompt] * 1500)
        output = speculative_generate(
            target, DraftModel(lm, 8), ids, mask, max_new_tokens=2, num_speculative_tokens=2, temperature=1.0, seed=5
        )
        reference.check_joint(
            output.tokens[:, len(prompt) :].tolist(), reference.joint_distribution(target, prompt, 2, sampling)
        )

    def test_it_is_loaded_so_when_asked(self, reference: Any, tiny_llama: Any, tmp_path: Any) -> None:
        target = Target(tiny_llama(layers=3), None, "tiny", ())
        save_draft_lm(DraftLM(tiny_llama()), tmp_path / "final", target_name="tiny", tokenizer=None)
        for asked, dtype in (("target", torch.float32), ("bfloat16", torch.bfloat16)):
            drafter = load_drafter(tmp_path / "final", target, asked)
            assert isinstance(drafter, DraftModel)
            assert drafter.lm.dtype is dtype
