"""The packed backend: other products and fused passes inside, the same figures outside."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import Ministral3Config, Ministral3ForCausalLM

from draftsmith.decode import packed as packed_module
from draftsmith.decode.draft_model import DraftModel
from draftsmith.decode.forward import OWN_PASSES, CachedLM
from draftsmith.decode.fused import FusedPasses, fuse, is_fused
from draftsmith.decode.half import HalfProduct, fits_half, half_supported
from draftsmith.decode.loop import plain_generate, speculative_generate
from draftsmith.decode.onednn import PackedProduct, supported
from draftsmith.decode.packed import is_packed, unpack, unpacked, use_backend, use_backend_of
from draftsmith.decode.sampling import Sampling
from draftsmith.heads import load as load_module
from draftsmith.heads.load import load_drafter, load_served
from draftsmith.models.draft_lm import DraftLM, cut_vocabulary, save_draft_lm
from draftsmith.models.target import Target
from draftsmith.models.views import BlockSkipper, TwoParts, layers_of, with_layers

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


def check_samples(reference: Any, target: Any, lm: DraftLM) -> None:
    """What is sampled with this drafter, of a vocabulary of 8, has the target's distribution."""
    prompt = reference.prompt_of(5, 3, vocab_size=8)
    ids, mask = reference.batch_of([prompt] * 1500)
    output = speculative_generate(
        target, DraftModel(lm, 8), ids, mask, max_new_tokens=2, num_speculative_tokens=2, temperature=1.0, seed=5
    )
    reference.check_joint(
        output.tokens[:, len(prompt) :].tolist(), reference.joint_distribution(target, prompt, 2, Sampling(1.0))
    )


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
    packed_rows.clear()
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
    monkeypatch.setattr(
        packed_module, "_pack", lambda layer, packing: used.append(packing.plain_rows) or inside(layer, packing)
    )
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
    layers: list[Any] = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert packed_module._measured_plain_rows(layers) == faster


@pytest.mark.parametrize(("faster", "backend"), [(3, "packed"), (16, "plain")])
def test_auto_stays_plain_where_packed_products_are_never_faster(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch, faster: int, backend: str
) -> None:
    model = tiny_llama()
    monkeypatch.setattr(packed_module, "_measured_plain_rows", lambda layers: faster)
    assert use_backend(model, "auto") == backend
    assert is_packed(model) is (backend == "packed")
    used = []
    inside = packed_module._pack
    monkeypatch.setattr(
        packed_module, "_pack", lambda layer, packing: used.append(packing.plain_rows) or inside(layer, packing)
    )
    with unpacked(model):
        pass
    assert set(used) == ({faster} if backend == "packed" else set())


@torch.no_grad()
def states_fed(model: Any, reference: Any) -> list[torch.Tensor]:
    """Hidden states of every layer, of a chain after prompts of two lengths, and embeddings in the place of two tokens."""
    cached = CachedLM(model, 2, range(model.config.num_hidden_layers + 1))
    ids, _ = reference.batch_of([reference.prompt_of(length, length) for length in (4, 9)], "right")
    cached.prefill(ids, [4, 9])
    chain = cached.feed(torch.tensor([[3, 9], [4, 11]]))
    ahead = cached.feed(torch.tensor([[5, 0, 0], [6, 0, 0]]), last_embeddings=0.02 * torch.ones(2, 2, 32))
    assert ahead.logits is not None
    return [*chain.hidden_states.values(), *ahead.hidden_states.values(), ahead.logits]


@pytest.mark.parametrize("backend", ["plain", "packed"])
def test_a_target_on_either_backend_is_fused(reference: Any, fusable: Any, backend: Any) -> None:
    model = fusable()
    logits, states = fed(model, reference), states_fed(model, reference)
    assert use_backend(model, backend) == backend
    assert is_fused(model)
    ids = torch.tensor([reference.prompt_of(9, 0)])
    generated = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert_same(fed(model, reference), logits)
    for one, other in zip(states_fed(model, reference), states, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()
    unpack(model)
    assert not is_fused(model)
    assert torch.equal(
        model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None), generated
    )
    for one, other in zip(fed(model, reference), logits, strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fused passes that ran, by name. Without them all of this would compare a model with itself."""
    names: list[str] = []

    def counted(name: str) -> Any:
        inside = getattr(FusedPasses, name)
        return lambda self, *given, **more: names.append(name) or inside(self, *given, **more)

    for name in ("run", "first", "rest"):
        monkeypatch.setattr(FusedPasses, name, counted(name))
    return names


def test_fused_passes_run_instead_of_the_models_own(reference: Any, tiny_llama: Any, ran: list[str]) -> None:
    model = tiny_llama()
    use_backend(model, "plain")
    ran.clear()
    fed(model, reference)
    assert ran == 5 * ["run"], "a prompt and four feeds"
    ids = torch.arange(65)[None] % 64
    for length, fused in ((64, True), (65, False)):
        ran.clear()
        CachedLM(model, 1).feed(ids[:, :length])
        assert bool(ran) is fused


def test_a_view_of_a_fused_model_runs_its_own_layers(reference: Any, tiny_llama: Any) -> None:
    model = tiny_llama(layers=3)
    layers = list(layers_of(model))
    expected = fed(with_layers(model, [layers[2], layers[0], layers[1]]), reference)
    use_backend(model, "plain")
    assert_same(fed(with_layers(model, [layers[2], layers[0], layers[1]]), reference), expected)


@pytest.mark.parametrize("backend", ["plain", "packed"])
def test_passes_without_some_blocks_are_fused_too(reference: Any, fusable: Any, backend: Any, ran: list[str]) -> None:
    model = fusable()
    expected = fed(DraftLM(BlockSkipper(model).view([1], [0])), reference)
    bypassed = fed(DraftLM(BlockSkipper(model).view([0], [0])), reference)
    use_backend(model, backend)
    for (attention, mlp), logits in ((([1], [0]), expected), (([0], [0]), bypassed)):
        lm = DraftLM(BlockSkipper(model).view(attention, mlp))
        assert fuse(lm)
        ran.clear()
        assert_same(fed(lm, reference), logits)
        assert ran == 5 * ["run"]
        liked = DraftLM(BlockSkipper(model).view(attention, mlp))
        assert fuse(liked, like=model)
        assert_same(fed(liked, reference), logits)


@torch.no_grad()
def test_passes_in_two_parts_are_fused_too(reference: Any, fusable: Any, ran: list[str]) -> None:
    model = fusable()
    parts = TwoParts(model, 1)

    def begun() -> list[torch.Tensor]:
        cached = CachedLM(model, 2, (1, -1))
        ids, _ = reference.batch_of([reference.prompt_of(length, length) for length in (4, 9)], "right")
        cached.prefill(ids, [4, 9])
        first = cached.begin(torch.tensor([[3], [4]]), parts)
        second = cached.begin(torch.tensor([[7], [8]]), parts)
        out = cached.feed(torch.tensor([[3, 7, 5], [4, 8, 6]]))
        cached.keep(torch.tensor([3, 1]), [3, 1])
        assert out.logits is not None
        after = cached.feed(torch.tensor([[9], [9]])).logits
        assert after is not None
        return [*first, *second, out.logits, *out.hidden_states.values(), after]

    expected = begun()
    use_backend(model, "plain")
    ran.clear()
    found = begun()
    assert ran == ["run", "first", "first", "first", "rest", "run"]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()


def test_a_copy_of_a_fused_model_runs_its_own_weights(reference: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    use_backend(model, "plain")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.1)
    assert is_fused(model)
    assert not is_fused(copied)
    found = fed(copied, reference)
    assert not torch.allclose(found[0], fed(model, reference)[0], rtol=1e-3)
    use_backend(copied, "plain")
    assert is_fused(copied)
    assert_same(fed(copied, reference), found)


def with_adapters(model: Any) -> None:
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False), model)


def with_another_layer(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])


def with_another_head(model: Any) -> None:
    model.set_output_embeddings(torch.nn.Linear(32, 64, bias=False))


@pytest.mark.parametrize("change", [with_adapters, with_another_layer, with_another_head])
def test_modules_that_are_replaced_end_fused_passes(reference: Any, tiny_llama: Any, change: Any) -> None:
    model = tiny_llama()
    use_backend(model, "plain")
    assert is_fused(model)
    before = fed(model, reference)[0]
    torch.manual_seed(0)
    change(model)
    assert not is_fused(model)
    found = fed(model, reference)
    assert not torch.allclose(found[0], before, rtol=1e-3)
    unpack(model)
    for one, other in zip(fed(model, reference), found, strict=True):
        assert torch.equal(one, other)


def test_a_fused_model_is_freed_with_its_last_reference(reference: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    use_backend(model, "plain")
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_cut_vocabulary_of_a_fused_model_scores_what_was_kept(reference: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    use_backend(model, "plain")
    lm = cut_vocabulary(model, torch.arange(10))
    ids = torch.tensor([[3, 4]])
    for inside in (lm, lm.model):
        logits = CachedLM(inside, 1).feed(ids).logits
        assert logits is not None
        assert logits.shape[-1] == 10


def test_a_drafter_that_is_the_target_leaves_it_alone(tiny_llama: Any) -> None:
    model = tiny_llama()
    use_backend(model, "packed", 3)
    assert use_backend_of(model, model, half=True) == "plain"
    assert is_packed(model)
    assert is_fused(model)
    with unpacked(model):
        assert not is_packed(model)
    assert is_packed(model)


def test_weights_that_change_are_followed_by_plain_fused_passes(reference: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    use_backend(model, "plain")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = 1.1 * parameter.data
    assert is_fused(model)
    found = fed(model, reference)
    unpack(model)
    assert_same(found, fed(model, reference))


@pytest.mark.parametrize(
    "other",
    [
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.1},
    ],
)
def test_another_activation_or_dropout_is_not_fused(tiny_llama: Any, other: dict[str, Any]) -> None:
    model = tiny_llama(**other)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()  # nothing to be seen in what comes out
    use_backend(model, "plain")
    assert not is_fused(model)


def test_a_family_that_differs_only_at_far_positions_is_not_fused() -> None:
    """Its queries grow with the position, beyond the original length."""
    config = Ministral3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Ministral3ForCausalLM(config).eval()
    use_backend(model, "plain")
    assert not is_fused(model)


def test_a_model_that_is_watched_is_not_fused(tiny_llama: Any) -> None:
    model = tiny_llama()
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    use_backend(model, "plain")
    assert not is_fused(model)
    hook.remove()
    use_backend(model, "plain")
    assert is_fused(model)
    plain = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: 0.5 * plain(hidden)
    use_backend(model, "plain")
    assert not is_fused(model)


def test_afterwards_unpacked_leaves_what_was_set(tiny_llama: Any) -> None:
    model = tiny_llama()
    for backend in ("plain", "packed"):
        use_backend(model, backend)
        with unpacked(model):
            assert not is_fused(model)
        assert is_fused(model)
        assert is_packed(model) is (backend == "packed")


@pytest.mark.skipif(not half_supported(), reason="this build of torch has no products with weights in float16")
class TestHalf:
    """Weights in float16, everything else in float32."""

    def test_products_and_passes_agree_with_plain_modules(self, reference: Any, fusable: Any) -> None:
        target, lm = fusable(seed=3), DraftLM(fusable())
        expected = fed(lm, reference)
        forced = lm(input_ids=torch.arange(9)[None]).logits
        assert use_backend_of(target, lm, half=True) == "packed"
        assert is_fused(lm)
        found = fed(lm, reference)
        assert_same(found, expected, 2e-3)
        assert any(
            not torch.allclose(one, other, rtol=1e-6, atol=1e-7) for one, other in zip(found, expected, strict=True)
        )
        with torch.no_grad():
            assert (lm(input_ids=torch.arange(9)[None]).logits - forced).norm() <= 2e-3 * forced.norm()
        assert not is_packed(target)

    def test_what_is_the_targets_stays_as_it_is(self, reference: Any, tiny_llama: Any) -> None:
        target, own = tiny_llama(), torch.nn.Linear(32, 32)
        drafter = torch.nn.ModuleList([own, target.lm_head, torch.nn.ModuleList([target.model.layers[0]])])
        for backend in ("plain", "packed"):
            use_backend(target, backend)
            ids = torch.arange(6)[None]
            with torch.no_grad():
                expected, passes = target(ids).logits, fed(target, reference)
                use_backend_of(target, drafter, half=True)
                assert is_packed(own)
                assert is_packed(target) is (backend == "packed")
                assert torch.equal(target(ids).logits, expected)
                assert is_fused(target)
                for one, other in zip(fed(target, reference), passes, strict=True):
                    assert torch.equal(one, other)

    def test_weights_that_do_not_fit_stay_in_float32(self, reference: Any, tiny_llama: Any) -> None:
        target, lm = tiny_llama(), DraftLM(tiny_llama(seed=1))
        with torch.no_grad():
            lm.model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
        assert not fits_half(lm.model.model.layers[0].mlp.up_proj.weight)
        assert not fits_half(torch.tensor([[1.0, 1.0], [1e-9, 1e-9]])), "a row of a rare token, say"
        assert fits_half(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
        assert use_backend_of(target, lm, half=True) == "plain"
        use_backend(target, "packed")
        expected = fed(lm, reference)
        assert use_backend_of(target, lm, half=True) == "packed"
        assert_same(fed(lm, reference), expected)

    def test_it_stays_so_through_a_change_of_weights(self, reference: Any, tiny_llama: Any) -> None:
        target, lm = tiny_llama(), DraftLM(tiny_llama(seed=1))
        use_backend_of(target, lm, half=True)
        with unpacked(lm), torch.no_grad():
            lm.model.lm_head.weight.mul_(1.5)
            expected = fed(lm, reference)
        assert isinstance(lm.__dict__[OWN_PASSES].product, HalfProduct)
        assert_same(fed(lm, reference), expected, 2e-3)

    def test_what_is_shared_is_not_joined_with_its_own(self, reference: Any, tiny_llama: Any) -> None:
        target, lm = tiny_llama(), DraftLM(tiny_llama(seed=1))
        lm.model.lm_head = target.lm_head
        expected = fed(lm, reference)
        use_backend_of(target, lm, half=True)
        assert is_fused(lm)
        assert not isinstance(lm.__dict__[OWN_PASSES].product, HalfProduct)
        assert not is_packed(target)
        assert_same(fed(lm, reference), expected, 2e-3)

    def test_many_rows_stay_plain(self) -> None:
        target, layer = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        x = torch.randn(65, 8)
        with torch.no_grad():
            plain = layer(x)
            use_backend_of(target, layer, half=True)
            assert torch.equal(layer(x), plain)
            assert not torch.equal(layer(x[:64]), plain[:64])

    def test_what_it_drafts_is_verified_by_the_probabilities_it_was_drawn_from(
        self, reference: Any, tiny_llama: Any
    ) -> None:
        target = tiny_llama(vocab_size=8, seed=1)
        lm = DraftLM(tiny_llama(vocab_size=8, seed=2))
        assert use_backend_of(target, lm, half=True) == "packed"
        check_samples(reference, target, lm)

    def test_it_is_used_where_the_clock_says_so(
        self, tiny_llama: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = Target(tiny_llama(layers=3), None, "tiny", ())
        save_draft_lm(DraftLM(tiny_llama()), tmp_path / "final", target_name="tiny", tokenizer=None)
        for asked, quickest, half in (
            ("auto", torch.float16, True),
            ("auto", torch.float32, False),
            ("target", torch.float16, False),
        ):
            monkeypatch.setattr(load_module, "quickest_weights", lambda dtype, device, quickest=quickest: quickest)
            # Where a draft model wholly in bfloat16 is fast too, if not as fast.
            other = torch.bfloat16 if half else torch.float32
            monkeypatch.setattr(load_module, "quick_dtype", lambda *_, other=other, **__: other)
            drafter = load_served(tmp_path / "final", target, asked)
            assert isinstance(drafter, DraftModel)
            assert drafter.lm.dtype is torch.float32
            products = [module.__dict__.get("_draftsmith_packed") for module in drafter.lm.modules()]
            assert any(isinstance(product, HalfProduct) for product in products) is half


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
    model = request.getfixturevalue(family)()
    for lm in (DraftLM(model), model):
        expected = fed(lm, reference)
        assert use_backend(lm, "packed") == "packed"
        assert not is_fused(lm)
        assert_same(fed(lm, reference), expected)
        unpack(lm)


def test_a_model_that_only_looks_like_llama_is_not_fused(reference: Any, tiny_llama: Any) -> None:
    model = tiny_llama()
    layer = model.model.layers[0]
    plain = layer.mlp.forward
    layer.mlp.forward = lambda hidden: 0.5 * plain(hidden)  # as families with residual multipliers do
    lm = DraftLM(model)
    assert not fuse(lm)
    assert not is_fused(lm)
    use_backend(model, "plain")
    assert not is_fused(model)


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
        target = tiny_llama(vocab_size=8, seed=1)
        lm = DraftLM(tiny_llama(vocab_size=8, seed=2).bfloat16())
        use_backend(lm, "packed")
        check_samples(reference, target, lm)

    def test_it_is_loaded_so_when_asked(self, reference: Any, tiny_llama: Any, tmp_path: Any) -> None:
        target = Target(tiny_llama(layers=3), None, "tiny", ())
        save_draft_lm(DraftLM(tiny_llama()), tmp_path / "final", target_name="tiny", tokenizer=None)
        for asked, dtype in (("target", torch.float32), ("bfloat16", torch.bfloat16)):
            drafter = load_drafter(tmp_path / "final", target, asked)
            assert isinstance(drafter, DraftModel)
            assert drafter.lm.dtype is dtype
