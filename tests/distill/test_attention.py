"""Attention of a learning draft model on a CPU: computed otherwise in bf16, the same loss and gradients."""

from typing import Any

import pytest
import torch

from draftsmith.data.chats import Encoded
from draftsmith.data.packing import pack
from draftsmith.decode.sampling import Sampling
from draftsmith.distill import attention
from draftsmith.distill.batch import distill_batch
from draftsmith.distill.mixture import parse_mixture
from draftsmith.distill.objective import DraftModelObjective
from draftsmith.distill.teacher import Teacher
from draftsmith.models.cut import cut_layers
from draftsmith.models.draft_lm import DraftLM
from draftsmith.models.target import as_target

FAMILIES = ["tiny_llama", "tiny_qwen3", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]


@pytest.fixture
def fused(monkeypatch):
    """Lengths of the rows that torch's fused attention was called with while gradients were recorded."""
    calls: list[int] = []
    plain: Any = torch.nn.functional.scaled_dot_product_attention

    def watched(query, *rest, **options):
        if torch.is_grad_enabled():
            calls.append(query.shape[2])
        return plain(query, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    return calls


def learning(make):
    """An objective over a drafter cut from its target, and a packed batch of rows of 24 tokens."""
    target = as_target(make(layers=3))
    draft = cut_layers(target.model, [0, 2])
    for dropout in (module for module in draft.modules() if isinstance(module, torch.nn.Dropout)):
        dropout.p = 0.0
    lm = DraftLM(draft.requires_grad_(True))
    objective = DraftModelObjective(lm, Teacher(target), parse_mixture("forward_kl", 1.0), Sampling(1.0)).train()
    generator = torch.Generator().manual_seed(0)
    documents = []
    for length in (5, 19, 9, 12):
        ids = torch.randint(target.vocab_size, (length,), generator=generator).tolist()
        documents.append(Encoded(ids, [i > length // 3 for i in range(length)]))
    return objective, distill_batch(pack(documents, 24), target.device)


def passed(objective, batch, bf16=True):
    """Loss and gradients of one pass under autocast."""
    objective.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = objective(batch).loss_sum
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in objective.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_short_rows_in_bf16_need_no_fused_attention_and_learn_the_same(family, fused, request, monkeypatch):
    objective, batch = learning(request.getfixturevalue(family))
    exact_loss, exact = passed(objective, batch, bf16=False)
    assert fused, "in float32 nothing changes"
    fused.clear()
    loss, found = passed(objective, batch)
    assert not fused
    assert objective.lm.model.config._attn_implementation == "sdpa"
    monkeypatch.setattr(attention, "_LONGEST_ROW", 23)
    fused_loss, expected = passed(objective, batch)
    assert fused, "longer rows would keep too many probabilities"
    # As close to float32 as the fused kernel is in bf16, in the loss and over all gradients.
    assert abs(loss - exact_loss) < 2 * abs(fused_loss - exact_loss) + 0.01 * exact_loss
    distance, usual = (
        sum(float((one[name] - exact[name]).norm() ** 2) for name in exact) ** 0.5 for one in (found, expected)
    )
    assert distance < 3 * usual
    assert distance < 0.1 * sum(float(gradient.norm() ** 2) for gradient in exact.values()) ** 0.5


def test_recomputed_activations_and_passes_without_gradients_stay_fused(tiny_llama, fused, monkeypatch):
    objective, batch = learning(tiny_llama)
    objective.lm.model.gradient_checkpointing_enable({"use_reentrant": False})
    passed(objective, batch)
    assert fused
    objective.lm.model.gradient_checkpointing_disable()
    changed = []
    monkeypatch.setattr(
        type(objective.lm.model.config),
        "_attn_implementation",
        property(lambda c: "sdpa", lambda c, v: changed.append(v)),
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        objective(batch)
    assert changed == []


def test_a_failing_pass_leaves_the_model_as_it_was(tiny_llama):
    model = tiny_llama()

    def fail():
        with torch.autocast("cpu", torch.bfloat16), attention.quick_attention(model, 24):
            assert model.config._attn_implementation == "eager"
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail()
    assert model.config._attn_implementation == "sdpa"
