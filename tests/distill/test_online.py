"""What the serving decoder records is what the target says of the served text, so that it need not be asked again."""

from typing import Any

import pytest
import torch

from draftsmith.data.chats import Encoded
from draftsmith.data.encoded_set import EncodedSet
from draftsmith.decode.loop import speculative_generate
from draftsmith.decode.prompts import pad_rows
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.streams import mix
from draftsmith.distill.batch import DistillBatch
from draftsmith.distill.online import OnlineStream
from draftsmith.distill.rollouts import RolloutBuffer
from draftsmith.distill.steps import RolloutSteps
from draftsmith.distill.teacher import Teacher, all_hidden
from draftsmith.heads.build import build_trainable, recorded_layers
from draftsmith.models.target import as_target
from draftsmith.models.views import layers_of
from draftsmith.recipe import ObjectiveSection, Recipe

CPU = torch.device("cpu")
FAMILIES = ["tiny_llama", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]
MODEL = {"kind": "model", "init": {"layers": [0, 1]}}
AT_LABELS = {
    "model": MODEL,
    "model, cut vocabulary": {**MODEL, "vocabulary": 40},
    "medusa": {"kind": "medusa", "num_heads": 2},
    "blockwise": {"kind": "blockwise", "num_heads": 2, "inner_size": 16},
    "hydra": {"kind": "hydra", "num_heads": 2},
    "early exit": {"kind": "early_exit", "exit_layer": 2},
}
EVERYWHERE = {
    "hydra, prefix": {"kind": "hydra", "num_heads": 2, "prefix_attention": True},
    "eagle": {"kind": "eagle", "version": 1},
    "eagle 3": {"kind": "eagle", "version": 3, "layers": [1, 2], "unroll": 2},
}
NOTHING = {
    "medusa2": {"kind": "medusa2", "num_heads": 2, "lora": {"rank": 2}},
    "blockwise and a layer": {"kind": "blockwise", "num_heads": 2, "inner_size": 16, "train_layers": 1},
    "lookahead tokens": {"kind": "lookahead_tokens", "num_tokens": 2},
}


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(64, (length,), generator=generator).tolist() for length in lengths]


class Online:
    """A stream over a tiny target with a drafter as a run builds it; its weights a little off, so that heads are not alike."""

    def __init__(self, drafter, model, lengths=(5, 12, 3, 9), max_new_tokens=14, **sampling):
        section = Recipe.model_validate(
            {
                "target": {"model": "x"},
                "drafter": drafter,
                "data": {"prompts": "x"},
                "engine": {"steps": 1},
                "output": "x",
            }
        ).drafter
        self.target = as_target(model)
        torch.manual_seed(3)
        docs = EncodedSet.collect([(0, Encoded(list(range(64)), [False] + [True] * 63))])
        self.built = build_trainable(section, ObjectiveSection(), self.target, docs, Sampling(1.0))
        for dropout in (m for m in self.built.objective.modules() if isinstance(m, torch.nn.Dropout)):
            dropout.p = 0.0
        self.objective = self.built.objective.train()
        self.prompts = prompts_of(lengths)
        layers = recorded_layers(section, self.target.num_layers)
        self.sampling = Sampling(**{"temperature": 0.6, **sampling})
        self.source = OnlineStream(
            self.target, self.built.drafter, self.objective, self.sampling, max_new_tokens, 3, 3, layers
        )
        self.buffer = RolloutBuffer(
            self.source, self.prompts, tokens_per_step=10_000, staleness=0, size=len(lengths), replay=True, seed=1
        )
        self.steps = RolloutSteps(None, self.buffer, length=64, tokens_per_forward=None, device=CPU)


def asked_again(batch: DistillBatch) -> DistillBatch:
    return DistillBatch(**{**vars(batch), "teacher": None})


def full_passes(target):
    """Counts passes through the target's last layer."""
    found: list[int] = []
    last: Any = layers_of(target.model)[-1]
    last.register_forward_pre_hook(lambda *args: found.append(1))
    return found


def assert_judged_both_ways(online):
    served = online.steps.measured()
    accepted, drafted = served["stream_acceptance_rate"]
    assert 0 < accepted < drafted, "some draft tokens were accepted and some rejected"
    emitted, calls = served["stream_block_efficiency"]
    assert emitted == sum(sum(rollout.encoded.loss_mask) for rollout in online.buffer.rollouts)
    assert calls < emitted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["model", "early exit"])
def test_recorded_states_are_those_of_a_fresh_pass_over_the_served_text(kind, family, request):
    online = Online(AT_LABELS[kind], request.getfixturevalue(family)(layers=3))
    (batch,) = next(online.steps)
    assert_judged_both_ways(online)
    assert isinstance(batch.teacher, torch.Tensor)
    fresh = Teacher(online.target).hidden(asked_again(batch))
    assert fresh.shape == batch.teacher.shape == (int(batch.supervised), online.target.hidden_size)
    torch.testing.assert_close(batch.teacher.float(), fresh, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("case", EVERYWHERE)
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3"])
def test_kinds_that_read_all_positions_have_them_recorded(case, family, request):
    online = Online(EVERYWHERE[case], request.getfixturevalue(family)(layers=3))
    (batch,) = next(online.steps)
    assert online.steps.measured()["stream_block_efficiency"][0] == batch.supervised
    layers = tuple(batch.teacher)
    fresh = all_hidden(Teacher(online.target), batch, layers)
    assert online.target.num_layers in layers
    following = torch.nn.functional.pad(batch.segment_ids[:, 1:], (0, 1), value=-1)
    read = (batch.segment_ids >= 0) & (following == batch.segment_ids)  # all but the documents' last positions
    assert read.sum() == batch.tokens - len(online.prompts)
    for layer in layers:
        torch.testing.assert_close(batch.teacher[layer][read].float(), fresh[layer][read], rtol=2e-3, atol=5e-3)


@pytest.mark.parametrize("case", [*AT_LABELS, *EVERYWHERE])
def test_training_on_what_was_served_takes_no_pass_of_the_target(case, tiny_llama):
    drafter = {**AT_LABELS, **EVERYWHERE}[case]
    online = Online(drafter, tiny_llama(layers=3))
    passes = full_passes(online.target)
    (batch,) = next(online.steps)
    assert passes, "it verified"
    passes.clear()
    recorded = online.objective(batch)
    recorded.loss_sum.backward()
    assert passes == []
    online.objective.eval()
    recorded, again = online.objective(batch), online.objective(asked_again(batch))
    assert passes, "without the records it is asked"
    torch.testing.assert_close(recorded.loss_sum, again.loss_sum, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("case", NOTHING)
def test_kinds_that_must_ask_the_target_learn_from_what_was_served_too(case, tiny_llama):
    """Of a changed target nothing is kept: the loss that holds it compares with the original."""
    online = Online(NOTHING[case], tiny_llama(layers=3))
    adapted = getattr(online.objective, "adapted", None)
    if adapted is not None:
        with torch.no_grad():
            for parameter in adapted.trained.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    (batch,) = next(online.steps)
    assert batch.teacher is None
    sums = online.objective(batch)
    sums.loss_sum.backward()
    if adapted is not None:
        kl, count = sums.metrics["target_kl"]
        assert kl / count > 0.01, "held by the original"


def test_what_is_served_is_what_decoding_gives_however_many_are_served_at_once(tiny_llama):
    online = Online(MODEL, tiny_llama(layers=3), lengths=(5, 12, 3, 9, 7))
    made = online.source(online.prompts, seed=9, step=2)
    online.source.batch_size = 64
    for one, other in zip(made, online.source(online.prompts, seed=9, step=2), strict=True):
        assert (one.encoded, one.born) == (other.encoded, 2)
        assert isinstance(one.hidden, torch.Tensor)
        assert one.hidden.dtype == torch.float16
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-2, atol=1e-2)
    prompts = pad_rows(online.prompts, online.target)
    out = speculative_generate(
        online.target,
        online.built.drafter,
        prompts.ids,
        prompts.attention_mask,
        max_new_tokens=14,
        num_speculative_tokens=3,
        temperature=online.sampling.temperature,
        seed=[mix(9, i) for i in range(5)],
    )
    for rollout, tokens, length in zip(made, out.tokens.tolist(), out.lengths.tolist(), strict=True):
        assert rollout.encoded.input_ids == tokens[:length]
    assert online.objective.training
    assert not any("forward" in module.__dict__ for module in online.objective.modules())


@pytest.mark.parametrize("case", ["model", "eagle 3"])
def test_served_texts_end_with_the_context(case, tiny_gpt2, tiny_llama):
    make = tiny_gpt2 if case == "model" else tiny_llama
    limit = {"n_positions": 16} if case == "model" else {"max_position_embeddings": 16}
    online = Online({**AT_LABELS, **EVERYWHERE}[case], make(layers=3, **limit), lengths=(5, 12, 15, 1))
    (batch,) = next(online.steps)
    by_prompt = sorted(len(rollout.encoded.input_ids) for rollout in online.buffer.rollouts)
    assert by_prompt == [15, 16, 16, 16]
    online.objective(batch).loss_sum.backward()


@pytest.mark.parametrize("case", ["model", "eagle 3"])
def test_states_in_the_buffer_outlive_a_checkpoint(case, tiny_llama, tmp_path):
    online = Online({**AT_LABELS, **EVERYWHERE}[case], tiny_llama(layers=3))
    first = next(online.steps)
    state = online.steps.state_dict()
    torch.save(state, tmp_path / "state.pt")
    (expected,) = next(online.steps)
    online.steps.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    (again,) = next(online.steps)
    assert torch.equal(again.input_ids, expected.input_ids)
    assert not torch.equal(again.input_ids, first[0].input_ids)
    for one, other in zip(_tensors(again.teacher), _tensors(expected.teacher), strict=True):
        assert torch.equal(one, other)


def _tensors(teacher):
    return list(teacher.values()) if isinstance(teacher, dict) else [teacher]
