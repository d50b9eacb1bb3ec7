"""Distilling a draft model on packed batches: equal to a plain loss over each document alone, in value and gradient."""

import pytest
import torch

from draftsmith.data.batches import TokenBatches
from draftsmith.data.chats import Encoded
from draftsmith.data.encoded_set import EncodedSet
from draftsmith.data.packing import pack, pack_rows
from draftsmith.decode.sampling import Sampling, probabilities
from draftsmith.distill.batch import distill_batch
from draftsmith.distill.losses import forward_kl
from draftsmith.distill.mixture import parse_mixture
from draftsmith.distill.objective import DraftModelObjective
from draftsmith.distill.steps import DistillSteps
from draftsmith.distill.teacher import Teacher
from draftsmith.models.cut import cut_layers
from draftsmith.models.draft_lm import DraftLM, cut_vocabulary
from draftsmith.models.target import as_target
from draftsmith.train.engine import Engine
from draftsmith.train.interrupt import StopRequest
from draftsmith.train.loop import accumulate

CPU = torch.device("cpu")
FAMILIES = ["tiny_llama", "tiny_qwen3", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]
AT_ONE = Sampling(1.0)


def documents(lengths=(5, 19, 2, 9, 12), vocab_size=64, seed=0):
    """Documents of unequal length, some longer than the windows of 8; prompts of about a third, and a masked middle."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
        mask = [i > length // 3 and i != length // 2 + 1 for i in range(length)]
        mask[-1] = True
        made.append(Encoded(ids, mask))
    return made


def objective_for(target, lm, loss="forward_kl", served=AT_ONE, temperature=1.0, chunk_tokens=4):
    return DraftModelObjective(lm, Teacher(target, lm.kept_ids), parse_mixture(loss, temperature), served, chunk_tokens)


def pair(make, layers=3, **config):
    """A target and a drafter cut out of it, whose weights have moved a little."""
    target = as_target(make(layers=layers, **config))
    draft = cut_layers(target.model, [0, layers - 1])
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    for dropout in (module for module in draft.modules() if isinstance(module, torch.nn.Dropout)):
        dropout.p = 0.0  # GPT-2's, which would hide what is compared
    return target, DraftLM(draft.requires_grad_(True))


def plain_logits(model, document):
    """Logits that predict the document's labels, from a forward pass over it alone."""
    ids, mask = torch.tensor([document.input_ids]), torch.tensor(document.loss_mask)
    return model(input_ids=ids, use_cache=False).logits[0, :-1][mask[1:]].float()


def plain_loss(target, model, docs):
    return sum(forward_kl(plain_logits(model, doc), plain_logits(target.model, doc)).sum() for doc in docs)


def gradients(module, value):
    module.zero_grad()
    value.backward()
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.requires_grad}


def assert_same_gradients(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        size = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance * size, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_batch_has_the_loss_and_gradient_of_its_documents_alone(family, attention, request):
    """So packing attends across no document, student and teacher read the same positions, and chunks change nothing."""
    target, lm = pair(request.getfixturevalue(family))
    for model in (target.model, lm.model):
        model.set_attn_implementation(attention)
    docs = documents()
    packed = pack(docs, length=28)
    assert len(packed.input_ids) < len(docs)
    assert (packed.segment_ids < 0).any(), "with padding in it"
    objective = objective_for(target, lm).train()
    sums = objective(distill_batch(packed, CPU))
    expected = plain_loss(target, lm.model, docs)
    assert sums.count == packed.num_supervised == sum(sum(doc.loss_mask) for doc in docs)
    torch.testing.assert_close(sums.loss_sum, expected, rtol=1e-5, atol=1e-4)
    assert_same_gradients(gradients(lm, sums.loss_sum), gradients(lm, expected))


def test_a_softcap_and_a_temperature_are_in_the_gradient(tiny_gemma3):
    target, lm = pair(tiny_gemma3, final_logit_softcapping=2.0)
    docs = documents()
    sums = objective_for(target, lm, temperature=2.0)(distill_batch(pack(docs, 28), CPU))
    expected = sum(
        4 * forward_kl(plain_logits(lm.model, doc) / 2, plain_logits(target.model, doc) / 2).sum() for doc in docs
    )
    torch.testing.assert_close(sums.loss_sum, expected, rtol=1e-5, atol=1e-4)
    assert_same_gradients(gradients(lm, sums.loss_sum), gradients(lm, expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_teacher_reads_packed_and_padded_rows_as_it_reads_a_document_alone(family, request):
    target = as_target(request.getfixturevalue(family)(layers=3))
    docs = documents()
    teacher = Teacher(target)
    rows = [[(0, docs[0]), (1, docs[1])], [(2, docs[2]), (3, docs[3])], [(4, docs[4])]]
    hidden = teacher.hidden(distill_batch(pack_rows(rows), CPU))
    expected = torch.cat([plain_logits(target.model, doc) for doc in docs])
    torch.testing.assert_close(teacher.head(hidden), expected, rtol=1e-4, atol=1e-4)


def accumulated(objective, batches):
    """The loop's own accumulation, on one rank; the gradients it leaves."""

    class OneProcess(Engine):
        def __init__(self):
            self.world_size, self.zero_stage, self.model = 1, None, objective
            self.device, self.precision = torch.device("cpu"), "fp32"

    objective.zero_grad()
    totals = accumulate(OneProcess(), batches, StopRequest())
    return totals, {name: p.grad.clone() for name, p in objective.named_parameters() if p.requires_grad}


def test_accumulated_micro_batches_of_unequal_length_are_one_big_batch(tiny_llama):
    target, lm = pair(tiny_llama)
    encoded = EncodedSet.collect(enumerate(documents((5, 19, 2, 9, 12, 3, 17))))
    objective = objective_for(target, lm).train()
    found = []
    for tokens_per_forward, packing in ((1000, True), (24, True), (1, True), (1, False), (40, False)):
        batches = TokenBatches(encoded, 1000, tokens_per_forward, length=24, packing=packing)
        found.append(accumulated(objective, next(DistillSteps(batches, CPU, None))))
    counts = {totals.supervised for totals, _ in found}
    assert counts == {float(encoded.num_supervised)}
    for totals, gradient in found[1:]:
        assert totals.loss == pytest.approx(found[0][0].loss, abs=1e-6)
        for name, expected in found[0][1].items():
            torch.testing.assert_close(gradient[name], expected, rtol=1e-6, atol=1e-6, msg=name)


def test_a_cut_vocabulary_s_loss_renormalises_the_target_and_its_alpha_does_not(tiny_llama):
    target, lm = pair(tiny_llama)
    kept = torch.arange(0, 64, 3)
    cut = cut_vocabulary(lm.model, kept)
    cut.requires_grad_(True)
    docs = documents()
    objective = objective_for(target, cut).eval()
    sums = objective(distill_batch(pack(docs, 28), CPU))
    loss, alpha, agreement, mass = 0.0, 0.0, 0.0, 0.0
    for doc in docs:
        draft, said = plain_logits(lm.model, doc)[:, kept], plain_logits(target.model, doc)
        loss += forward_kl(draft, said[:, kept]).sum()
        full = torch.zeros_like(said).index_copy_(1, kept, draft.softmax(-1))
        alpha += torch.minimum(full, said.softmax(-1)).sum()
        mass += said.softmax(-1)[:, kept].sum()
        agreement += (kept[draft.argmax(-1)] == said.argmax(-1)).sum()
    torch.testing.assert_close(sums.loss_sum, loss, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(sums.metrics["alpha"][0], alpha, rtol=1e-5, atol=1e-4)
    assert sums.metrics["alpha"][0] < mass < sums.metrics["alpha"][1], "the kept ids' mass caps alpha"
    assert sums.metrics["greedy_agreement"][0] == agreement
    expected = sum(forward_kl(plain_logits(cut.model, d), plain_logits(target.model, d)[:, kept]).sum() for d in docs)
    assert_same_gradients(gradients(cut, sums.loss_sum), gradients(cut, expected))


def test_labels_that_a_cut_vocabulary_lacks_are_not_learned(tiny_llama):
    target, lm = pair(tiny_llama)
    kept = torch.arange(0, 64, 3)
    cut = cut_vocabulary(lm.model, kept)
    docs = documents()
    sums = objective_for(target, cut, loss="cross_entropy").eval()(distill_batch(pack(docs, 28), CPU))
    labels = torch.cat([torch.tensor(doc.input_ids)[doc.loss_mask] for doc in docs])
    logits = torch.cat([plain_logits(lm.model, doc)[:, kept] for doc in docs])
    scored = labels % 3 == 0
    expected = torch.nn.functional.cross_entropy(logits[scored], labels[scored] // 3, reduction="sum")
    torch.testing.assert_close(sums.loss_sum, expected, rtol=1e-5, atol=1e-4)
    assert sums.count == len(labels)


@pytest.mark.parametrize(
    ("served", "measured"),
    [
        (Sampling(0.7, top_k=5, top_p=0.9), Sampling(0.7, top_k=5, top_p=0.9)),
        (Sampling(0.0, top_k=5), AT_ONE),  # a greedy run reports alpha at temperature 1
    ],
)
def test_the_logged_alpha_is_the_served_one(served, measured, tiny_llama):
    target, lm = pair(tiny_llama)
    docs = documents()
    metrics = objective_for(target, lm, served=served).eval()(distill_batch(pack(docs, 28), CPU)).metrics
    expected = sum(
        torch.minimum(
            probabilities(plain_logits(lm.model, doc), measured),
            probabilities(plain_logits(target.model, doc), measured),
        ).sum()
        for doc in docs
    )
    torch.testing.assert_close(metrics["alpha"][0], expected, rtol=1e-4, atol=1e-4)
    assert metrics["alpha"][1] == sum(sum(doc.loss_mask) for doc in docs)


@pytest.mark.parametrize("rows", [56, 80])
def test_padding_rows_of_either_head_stay_out_of_the_loss(rows, tiny_llama):
    """Equal tokenizers, other sizes of the embeddings: the loss is over the ids that both score."""
    target = as_target(tiny_llama(layers=2, vocab_size=64))
    draft = tiny_llama(layers=1, vocab_size=rows, seed=4).requires_grad_(True)
    docs = documents(vocab_size=56)
    shared = min(rows, 64)
    objective = objective_for(target, DraftLM(draft)).train()
    sums = objective(distill_batch(pack(docs, 28), CPU))
    expected = sum(
        forward_kl(plain_logits(draft, doc)[:, :shared], plain_logits(target.model, doc)[:, :shared]).sum()
        for doc in docs
    )
    torch.testing.assert_close(sums.loss_sum, expected, rtol=1e-5, atol=1e-4)
    assert_same_gradients(gradients(draft, sums.loss_sum), gradients(draft, expected))
    if rows < 64:
        assert objective.rank_of is not None
        assert objective.rank_of.tolist() == [*range(rows), *[-1] * (64 - rows)]
    else:
        assert objective.rank_of is None


def test_a_batch_that_teaches_nothing_has_a_gradient_of_zero_for_every_parameter(tiny_llama):
    """What a rank with fewer micro-batches runs: DDP waits for the gradient of every parameter."""
    target, lm = pair(tiny_llama)
    filler = pack_rows([[(0, Encoded([3, 4], [False, False]))]])._replace(placed=[])
    sums = objective_for(target, lm).train()(distill_batch(filler, CPU))
    assert sums.count == 0
    for name, gradient in gradients(lm, sums.loss_sum).items():
        assert not gradient.any(), name


def test_only_the_drafter_is_trained_and_in_float32_whatever_the_target_is_in(tiny_llama):
    target = as_target(tiny_llama(layers=3).bfloat16())
    lm = DraftLM(cut_layers(target.model, [0]).requires_grad_(True))
    objective = objective_for(target, lm).train()
    before = [parameter.clone() for parameter in target.model.parameters()]
    assert {parameter.dtype for parameter in objective.parameters()} == {torch.float32}
    assert not {id(p) for p in objective.parameters()} & {id(p) for p in target.model.parameters()}
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        sums = objective(distill_batch(pack(documents(), 28), CPU))
        (sums.loss_sum / sums.count).backward()
        optimizer.step()
        losses.append(sums.loss_sum.item())
    assert losses[-1] < losses[0]
    for one, other in zip(target.model.parameters(), before, strict=True):
        assert torch.equal(one, other)
        assert one.grad is None
