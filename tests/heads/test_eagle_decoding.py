"""EAGLE in decoding: lossless in every shape of draft, its cache follows the target's features exactly, folders round-trip."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith import speculative_generate
from draftsmith.decode.dynamic_tree import DynamicTree
from draftsmith.decode.loop import decode_steps
from draftsmith.decode.packed import unpack, use_backend
from draftsmith.decode.prompts import pad_rows
from draftsmith.decode.sampling import Sampling
from draftsmith.errors import BadInput
from draftsmith.heads.eagle import eagle_in_training, feature_layers, make_eagle, save_eagle
from draftsmith.heads.eagle_drafter import Eagle
from draftsmith.heads.eagle_model import eagle_config
from draftsmith.heads.load import load_drafter
from draftsmith.models.target import as_target
from draftsmith.recipe import EagleDrafter, ObjectiveSection

VERSIONS = [1, 3]
FAMILIES = ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]
SHAPES = {
    "chain": {},
    "tree": {"tree": [3, 2, 1]},
    "paths": {"tree": [[0], [1], [0, 0], [0, 2]]},
    "dynamic": {"tree": DynamicTree(num_nodes=7, width=3)},
}


def drafter_for(target, version, kept=None, seed=0):
    torch.manual_seed(seed)
    config = EagleDrafter(version=version)
    return eagle_in_training(config, ObjectiveSection(), target, kept, Sampling()).drafter


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        (family, shape)
        for family in FAMILIES
        for shape in SHAPES
        if shape in ("chain", "tree") or family == "tiny_gemma3"
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_greedy_output_is_plain_greedy_output(family, version, shape, request, checks):
    """Alone and in a ragged batch, past sliding windows, with a prompt of one token, a cut vocabulary half of the time."""
    tied = family != "tiny_qwen2"
    target = as_target(request.getfixturevalue(family)(layers=3, tie_word_embeddings=tied))
    kept = torch.arange(0, 64, 2) if shape in ("tree", "dynamic") else None
    drafter = drafter_for(target, version, kept)
    stats = checks.check_greedy(target, drafter, [9, 1, 5], new=16, num_speculative_tokens=3, **SHAPES[shape])
    assert stats.drafted > 0
    if shape in ("tree", "dynamic"):
        assert stats.pooled.drafted_nodes > stats.drafted


@pytest.mark.parametrize("shape", ["chain", "tree", "dynamic"])
@pytest.mark.parametrize("version", VERSIONS)
def test_sampled_output_has_the_targets_joint_distribution(version, shape, tiny_llama, checks):
    target = as_target(tiny_llama(vocab_size=6, layers=2, seed=5))
    drafter = drafter_for(target, version, torch.tensor([0, 2, 3, 5]) if version == 3 else None)
    tree = {"tree": [2, 2]} if shape == "tree" else SHAPES[shape]
    settings = {"temperature": 0.8, "top_p": 0.95, "num_speculative_tokens": 2, **tree}
    checks.check_sampled(target, drafter, settings)


class Checked(Eagle):
    """Notes, before every draft, how far its outputs are from those without a cache."""

    texts: list
    worst: float
    states_of: Callable[[torch.Tensor], dict[int, torch.Tensor]]

    def propose(self, num_tokens, sampling, generators):
        draft = super().propose(num_tokens, sampling, generators)
        for row, text in enumerate(self.texts):
            if len(text) > 1:
                ids = torch.tensor([text])
                expected = self.teacher_forced_hidden(ids, torch.ones_like(ids), self.states_of(ids))[0, -1]
                self.worst = max(self.worst, float((self.outputs[row] - expected).abs().max()))
        return draft

    def observe(self, accepted, target_outputs):
        super().observe(accepted, target_outputs)
        for text, tokens in zip(self.texts, accepted.host_tokens, strict=True):
            text.extend(tokens)


class OnePositionLate(Checked):
    """A planted fault: every feature is read one position late."""

    def observe(self, accepted, target_outputs):
        states = {layer: state.roll(1, 1) for layer, state in target_outputs.hidden_states.items()}
        super().observe(accepted, target_outputs._replace(hidden_states=states))


def worst_difference(target, version, shape, prompts, checks, kind=Checked):
    drafter: Any = drafter_for(target, version)
    drafter.__class__ = kind
    drafter.texts, drafter.worst = [list(prompt) for prompt in prompts], 0.0
    drafter.states_of = lambda ids: dict(enumerate(target.model(ids, output_hidden_states=True).hidden_states))
    pattern = [[length] * len(prompts) for length in (0, 2, 0, 0, 3, 1, 3)]
    lengths = 3 if shape in ("tree", "paths") else checks.Lengths(pattern)  # a static tree has a depth of its own
    for step in steps_of(target, drafter, prompts, lengths, SHAPES[shape]):
        for entries, text, tokens in zip(drafter.cached.host_lengths, drafter.texts, step.tokens, strict=True):
            assert entries + len(tokens) + 1 >= len(text)
    return drafter.worst


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("version", VERSIONS)
def test_its_cache_rolls_back_exactly(version, shape, copying, checks):
    """In a ragged batch, with a prompt of one token, and steps that draft nothing at all."""
    prompts = [row[:n] for row, n in zip(copying.rows(4, 12, seed=1).tolist(), (9, 1, 12, 6), strict=True)]
    assert worst_difference(copying.target, version, shape, prompts, checks) < 1e-4
    if shape == "chain":
        assert worst_difference(copying.target, version, shape, prompts, checks, OnePositionLate) > 0.1


def steps_of(target, drafter, prompts, lengths, options):
    return decode_steps(
        target,
        drafter,
        pad_rows(prompts, target),
        sampling=Sampling(),
        max_new_tokens=18,
        num_speculative_tokens=lengths,
        eos_token_id=[],
        **options,
    )


def test_a_good_drafter_makes_trees_pay(copying, checks):
    """Trees accept more than the chain of their first children, static ones and those that follow confidence."""
    config = EagleDrafter(version=1, unroll=3)
    made = eagle_in_training(config, ObjectiveSection(), copying.target, None, Sampling())
    checks.train_steps(made.objective, (copying.batch(16, 20, seed) for seed in range(100)), 40, 1e-2)
    prompts = copying.rows(8, 9, seed=7)
    found = {}
    for name, tree in (("chain", None), ("tree", [3, 2, 1]), ("dynamic", "dynamic:num_nodes=12")):
        out = speculative_generate(
            copying.target,
            made.drafter,
            prompts,
            max_new_tokens=24,
            num_speculative_tokens=3,
            tree=tree,
            eos_token_id=[],
        )
        found[name] = out.stats.block_efficiency
    assert found["tree"] > found["chain"] > 1.0
    assert found["dynamic"] > found["chain"]


@pytest.mark.parametrize("version", VERSIONS)
def test_chains_end_by_confidence(version, tiny_llama):
    """A threshold of 1 ends every chain after its first token."""
    target = as_target(tiny_llama(layers=3))
    out = speculative_generate(
        target,
        drafter_for(target, version),
        torch.tensor([[3, 9, 4, 1]] * 2),
        max_new_tokens=10,
        num_speculative_tokens="confidence:threshold=1.0",
        eos_token_id=[],
    )
    assert 0 < out.stats.drafted <= out.stats.target_calls


@pytest.mark.parametrize("version", VERSIONS)
def test_bfloat16_decodes(version, tiny_llama):
    target = as_target(tiny_llama(layers=3).to(torch.bfloat16))
    drafter = drafter_for(target, version)
    drafter.model.to(torch.bfloat16)
    assert drafter.model.frequencies.dtype == torch.float32, "rounded frequencies would turn positions"
    ids = torch.tensor([[3, 9, 4, 1]])
    out = speculative_generate(target, drafter, ids, max_new_tokens=10, num_speculative_tokens=3, eos_token_id=[])
    assert out.stats.emitted == 10


def test_packed_weights_change_nothing(tiny_llama):
    target = as_target(tiny_llama(layers=3))
    drafter = drafter_for(target, 3, kept=torch.arange(32))
    ids = torch.tensor([[3, 9, 4, 1]])
    plain = speculative_generate(target, drafter, ids, max_new_tokens=10, tree=[2, 2], eos_token_id=[])
    use_backend(drafter.module, "packed")
    packed = speculative_generate(target, drafter, ids, max_new_tokens=10, tree=[2, 2], eos_token_id=[])
    unpack(drafter.module)
    assert packed.tokens.tolist() == plain.tokens.tolist()
    assert packed.stats.accepted == plain.stats.accepted


class TestFolders:
    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize("cut", [False, True])
    def test_it_comes_back_as_it_was(self, version, cut, tiny_llama, tmp_path):
        target = as_target(tiny_llama(layers=8))
        drafter = drafter_for(target, version, kept=torch.arange(1, 64, 3) if cut else None)
        save_eagle(EagleDrafter(version=version), drafter.model, target, tmp_path / "final")
        back: Any = load_drafter(tmp_path / "final", target)
        assert back.wants == drafter.wants == {"hidden_states": [8] if version == 1 else [2, 4, 5]}
        ids = torch.randint(64, (2, 9))
        states = dict(enumerate(target.model(ids, output_hidden_states=True).hidden_states))
        scores = [
            one.first_token_logits(one.teacher_forced_hidden(ids, torch.ones_like(ids), states)[:, 1:].flatten(0, 1))
            for one in (drafter, back)
        ]
        torch.testing.assert_close(scores[1], scores[0], rtol=1e-4, atol=1e-4)
        assert torch.isinf(scores[0]).any() == cut

    def test_version_3_has_the_published_tensors(self, tiny_llama, tmp_path):
        target = as_target(tiny_llama(layers=8))
        drafter = drafter_for(target, 3, kept=torch.arange(1, 64, 3))
        save_eagle(EagleDrafter(), drafter.model, target, tmp_path / "final")
        tensors = load_file(tmp_path / "final" / "model.safetensors")
        attention, mlp = "layers.0.self_attn", "layers.0.mlp"
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
            "fc.weight": (32, 96),
            **{f"layers.0.{norm}.weight": (32,) for norm in norms},
            f"{attention}.q_proj.weight": (32, 64),
            f"{attention}.k_proj.weight": (16, 64),
            f"{attention}.v_proj.weight": (16, 64),
            f"{attention}.o_proj.weight": (32, 32),
            f"{mlp}.gate_proj.weight": (64, 32),
            f"{mlp}.up_proj.weight": (64, 32),
            f"{mlp}.down_proj.weight": (32, 64),
            "norm.weight": (32,),
            "lm_head.weight": (21, 32),
            "d2t": (21,),
            "t2d": (64,),
        }
        assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
        assert (torch.arange(21) + tensors["d2t"]).tolist() == tensors["t2d"].nonzero()[:, 0].tolist()

    def test_another_target_is_refused(self, tiny_llama, tmp_path):
        target = as_target(tiny_llama(layers=3))
        save_eagle(EagleDrafter(version=1), drafter_for(target, 1).model, target, tmp_path / "final")
        for other, what in (
            (tiny_llama(layers=3, seed=1), "weights"),
            (tiny_llama(layers=3, hidden=64), "hidden size"),
        ):
            with pytest.raises(BadInput, match=what):
                load_drafter(tmp_path / "final", as_target(other))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_has_the_targets_dimensions(family, request):
    config = request.getfixturevalue(family)().config
    made: Any = eagle_config(config)
    assert (made.hidden_size, made.num_attention_heads, made.head_dim) == (32, 4, 8)
    assert made.num_key_value_heads == (4 if family == "tiny_gpt2" else 2)
    assert made.intermediate_size == (128 if family == "tiny_gpt2" else 64)
    rope: Any = getattr(config, "rope_parameters", None) or {"rope_theta": 10000.0}
    assert made.rope_parameters["rope_theta"] == rope.get("full_attention", rope)["rope_theta"]


def test_a_llama_3_target_passes_its_rope_scaling_on(tiny_llama):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    target = as_target(tiny_llama(layers=3, rope_parameters=rope))
    model = make_eagle(EagleDrafter(), target, None)
    torch.testing.assert_close(model.frequencies, target.model.model.rotary_emb.inv_freq)
    positions = torch.arange(5)[None]
    cosines, _ = target.model.model.rotary_emb(torch.zeros(1, 5, 32), positions)
    torch.testing.assert_close(model.rotation(positions)[0], cosines)


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 7, 32])
def test_layers_of_features_exist_and_are_the_published_ones(layers):
    chosen = feature_layers(EagleDrafter(), layers)
    assert all(1 <= layer <= layers for layer in chosen)
    assert list(chosen) == sorted(chosen)
    assert layers != 32 or chosen == (2, 16, 29)
    assert feature_layers(EagleDrafter(version=1), layers) == (layers,)
    with pytest.raises(BadInput, match="40"):
        feature_layers(EagleDrafter(layers=[0, 1, 40]), layers)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"version": 1, "layers": [2, 4, 6]}, "version 1"),
        ({"version": 3, "feature_weight": 1.0}, "version 3"),
        ({"version": 3, "noise": 0.1}, "version 3"),
        ({"version": 2}, "version"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        EagleDrafter.model_validate(settings)
