"""Attention of a learning draft model on a CPU: computed otherwise in bf16, the same loss and gradients."""

from typing import Any

import pytest
import torch

from draftsmith.data.chats import Encoded
from draftsmith.data.packing import pack, pack_rows
from draftsmith.decode.sampling import Sampling
from draftsmith.distill import attention
from draftsmith.distill.batch import distill_batch
from draftsmith.distill.mixture import parse_mixture
from draftsmith.distill.objective import DraftModelObjective
from draftsmith.distill.teacher import Teacher, last_hidden
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


def learning(make, length=24):
    """An objective over a drafter cut from its target, and a packed batch of rows of `length` tokens."""
    target = as_target(make(layers=3))
    draft = cut_layers(target.model, [0, 2])
    for dropout in (module for module in draft.modules() if isinstance(module, torch.nn.Dropout)):
        dropout.p = 0.0
    lm = DraftLM(draft.requires_grad_(True))
    objective = DraftModelObjective(lm, Teacher(target), parse_mixture("forward_kl", 1.0), Sampling(1.0)).train()
    generator = torch.Generator().manual_seed(0)
    documents = []
    for size in (5, 19, 9, 12):
        ids = torch.randint(target.vocab_size, (size,), generator=generator).tolist()
        documents.append(Encoded(ids, [i > size // 3 for i in range(size)]))
    return objective, distill_batch(pack(documents, length), target.device)


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


def gradients_apart(found, expected):
    """The largest difference of any gradient, relative to the largest entry of all."""
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(float((found[name] - expected[name]).abs().max()) for name in expected) / scale


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_single_row_is_read_document_by_document_and_teaches_the_same(bf16, family, fused, request, monkeypatch):
    make = request.getfixturevalue(family)
    objective, batch = learning(make, 64)
    documents = (19, 12, 9, 5)
    assert batch.documents == documents
    reads = attention.reads_by_document(objective.lm.backbone, 19)
    assert reads is (family != "tiny_mistral"), "whose window is shorter; of Gemma-3 only layers without one were cut"
    loss, found = passed(objective, batch, bf16)
    if bf16:
        assert not fused, "as over rows"
    else:
        assert fused == ([*documents] if reads else [45]) * 2, "drafter's layers"
    assert objective.lm.model.config._attn_implementation == "sdpa"
    rows, in_rows = learning(make)
    assert in_rows.documents is None
    expected_loss, expected = passed(rows, in_rows, bf16)
    assert float(loss) == pytest.approx(float(expected_loss), rel=2e-3 if bf16 else 1e-5)
    assert gradients_apart(found, expected) < (5e-2 if bf16 else 1e-5)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gpt2"])
def test_padding_and_one_token_are_documents_too(family, request):
    model = request.getfixturevalue(family)().eval()
    ids = [[3, 7, 2, 9, 4], [8], [6, 1, 5]]
    packed = pack_rows([[(i, Encoded(each, [False] * len(each))) for i, each in enumerate(ids)]], padded=True)
    batch = distill_batch(packed, torch.device("cpu"))
    assert batch.documents == (5, 1, 3, 32 - 9)
    with torch.no_grad():
        hidden = last_hidden(model.base_model, batch)[0].split(batch.documents)
        for found, each in zip(hidden, ids, strict=False):
            alone = model.base_model(input_ids=torch.tensor([each])).last_hidden_state[0]
            torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)
    assert all(part.isfinite().all() for part in hidden)


def test_rows_keep_their_masks_where_documents_could_not_be_kept_apart(tiny_llama, monkeypatch):
    """Recomputation runs outside of the block; attention of a model's own code would see whole rows without a mask."""
    objective, _ = learning(tiny_llama)
    backbone = objective.lm.backbone
    assert attention.reads_by_document(backbone, 10**6)
    objective.lm.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert not attention.reads_by_document(backbone, 1)
    objective.lm.model.gradient_checkpointing_disable()
    monkeypatch.setattr(type(backbone), "_supports_attention_backend", False)
    assert not attention.reads_by_document(backbone, 1)
