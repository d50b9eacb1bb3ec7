"""EAGLE in training: it unrolls exactly as it decodes, learns what it alone can know, and its metrics are the decoder's."""

import hashlib

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.data.chats import Encoded
from draftsmith.data.packing import pack
from draftsmith.decode.sampling import Sampling
from draftsmith.distill.batch import distill_batch
from draftsmith.eval.alpha import Answer, teacher_forced
from draftsmith.heads.eagle import eagle_in_training, feature_layers
from draftsmith.heads.eagle_drafter import Eagle
from draftsmith.heads.eagle_induction import num_induction_heads
from draftsmith.heads.eagle_unroll import find_anchors, unroll
from draftsmith.heads.features import TargetFeatures
from draftsmith.models.head import split
from draftsmith.models.target import as_target
from draftsmith.recipe import EagleDrafter, ObjectiveSection

CPU = torch.device("cpu")
VERSIONS = [1, 3]


def training(target, version, kept=None, loss="forward_kl", seed=0, **options):
    torch.manual_seed(seed)
    config = EagleDrafter(version=version, **options)
    return eagle_in_training(config, ObjectiveSection(loss=loss), target, kept, Sampling())


def packed(*examples, length=None):
    """One batch; every example is (ids, where its answer begins)."""
    encoded = [Encoded(ids, [i >= answer for i in range(len(ids))]) for ids, answer in examples]
    return distill_batch(pack(encoded, length or sum(len(ids) for ids, _ in examples)), CPU)


def random_ids(count, vocab=64, seed=0):
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def fit(objective, batches, steps, learning_rate):
    optimizer = torch.optim.AdamW(objective.parameters(), lr=learning_rate, weight_decay=0.0)
    objective.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, 2 * (1 - step / steps))
        sums = objective(batches[step % len(batches)])
        (sums.loss_sum / sums.count).backward()
        torch.nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    objective.eval()


def rates(objective, batch):
    objective.eval()
    with torch.no_grad():
        return {name: float(total) / float(count) for name, (total, count) in objective(batch).metrics.items()}


class TestAnchors:
    def test_they_are_where_a_draft_could_begin(self):
        """Two documents side by side: prompts of 2 and 1 tokens, a gap in the first one's answers."""
        mask = [False, False, True, True, False, True]
        first, second = Encoded([1, 2, 3, 4, 5, 6], mask), Encoded([7, 8, 9], [False, True, True])
        anchors = find_anchors(distill_batch(pack([first, second], 10), CPU), 3)
        found = dict(zip(anchors.at[0].tolist(), anchors.steps[0].tolist(), strict=True))
        # Position 6 begins the second document: it has a label after it but no feature before it.
        assert {at: steps for at, steps in found.items() if steps} == {1: 2, 2: 1, 4: 1, 7: 1}

    def test_nothing_supervised_is_a_loss_of_zero_on_every_parameter(self, tiny_llama):
        made = training(as_target(tiny_llama()), 3)
        batch = packed((random_ids(6), 6))
        sums = made.objective(batch)
        sums.loss_sum.backward()
        assert (float(sums.loss_sum.detach()), sums.count) == (0.0, 0.0)
        assert all(parameter.grad is not None for parameter in made.objective.parameters())


def decoder_outputs(made, target, ids, anchor, steps):
    """Outputs while the decoder drafts `steps` tokens after ``ids[: anchor + 1]``, made to draft what really follows."""
    drafter = made.drafter
    out = target.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    drafter.start(torch.tensor([ids[: anchor + 1]]), torch.ones(1, anchor + 1, dtype=torch.long))
    features = drafter.model.fuse([out.hidden_states[layer][:, :anchor] for layer in drafter.wants["hidden_states"]])
    for at in range(anchor):  # one entry at a time
        drafter._set_newest(torch.tensor([[ids[at + 1]]]), features[:, at : at + 1], [1])
        drafter._catch_up()
    outputs = [drafter.outputs]
    for j in range(1, steps):
        outputs.append(drafter._feed(torch.tensor([[ids[anchor + j]]]), outputs[-1][:, None], None)[:, 0])
    return torch.cat(outputs)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3", "tiny_gpt2"])
def test_the_unrolling_is_what_the_decoder_computes(version, family, request):
    """Packed documents of different lengths, all anchors, four steps."""
    target = as_target(request.getfixturevalue(family)(layers=3))
    made = training(target, version)
    documents = [(random_ids(12, seed=1), 5), (random_ids(7, seed=2), 1), (random_ids(9, seed=3), 3)]
    batch = packed(*documents, length=19)
    steps = 4
    anchors = find_anchors(batch, steps)
    states = TargetFeatures(target, made.objective.layers)(batch)
    with torch.no_grad():
        features = made.drafter.model.fuse([states[layer] for layer in made.objective.layers])
        embed = target.model.get_input_embeddings()
        found = list(unroll(made.drafter.model, batch, embed, features, anchors, steps))
        compared = 0
        for ids, answer in documents:
            where = next(p for p in self_placed(batch, ids))
            for anchor in range(max(answer - 1, 1), len(ids) - 1):
                expected = decoder_outputs(made, target, ids, anchor, min(steps, len(ids) - 1 - anchor))
                for j, row in enumerate(expected):
                    flat = where + anchor + j
                    number = flat_number(anchors, batch, where + anchor)
                    at = (found[j].anchors == number).nonzero()[0, 0]
                    assert found[j].predictors[at] == flat
                    torch.testing.assert_close(found[j].outputs[at], row, rtol=2e-4, atol=2e-4)
                    compared += 1
    assert compared == sum(len(one.outputs) for one in found) > 50


def self_placed(batch, ids):
    """Flat positions at which `ids` stand in the batch."""
    flat = batch.input_ids.flatten()
    return [i for i in range(len(flat) - len(ids) + 1) if flat[i : i + len(ids)].tolist() == ids]


def flat_number(anchors, batch, flat):
    """The number of the anchor at a flat position."""
    row, column = divmod(flat, batch.input_ids.shape[1])
    n = anchors.at.shape[1]
    return row * n + int((anchors.at[row] == column).nonzero()[0, 0])


@pytest.mark.parametrize("version", VERSIONS)
def test_an_entry_reads_the_targets_state_before_its_token(version, tiny_llama):
    """One layer off or one position off: what comes after position s changes with the state at s - 1, not with that at s."""
    target = as_target(tiny_llama(layers=3))
    made = training(target, version)
    ids = torch.tensor([random_ids(8)])
    states = dict(enumerate(target.model(input_ids=ids, output_hidden_states=True).hidden_states))
    before = made.drafter.teacher_forced_hidden(ids, torch.ones_like(ids), states)
    for layer, state in states.items():
        changed = state.clone()
        changed[:, 4] += 1
        after = made.drafter.teacher_forced_hidden(ids, torch.ones_like(ids), states | {layer: changed})
        moved = (after - before).abs().amax(-1)[0] > 1e-5
        expected = layer in feature_layers(EagleDrafter(version=version), 3)
        assert moved.tolist() == [False] * 5 + [expected] * 3


@pytest.mark.parametrize("version", VERSIONS)
def test_training_moves_all_of_the_drafter_and_nothing_of_the_target(version, tiny_qwen3):
    target = as_target(tiny_qwen3(layers=3, tie_word_embeddings=False))
    before = fingerprint(target.model)
    made = training(target, version, noise=0.1 if version == 1 else 0.0)
    own = {name for name, _ in made.objective.named_parameters()}
    start = {name: parameter.clone() for name, parameter in made.objective.named_parameters()}
    fit(made.objective, [packed((random_ids(12), 3))], steps=2, learning_rate=1e-2)
    assert all(not torch.equal(start[name], parameter) for name, parameter in made.objective.named_parameters())
    assert not any("embed" in name for name in own)
    assert any("lm_head" in name for name in own) == (version == 3)
    assert fingerprint(target.model) == before


def test_an_output_head_that_is_not_trained_stays_the_targets(tiny_qwen3):
    kept = torch.tensor([1, 4, 9, 16, 25, 36, 49])
    target = as_target(tiny_qwen3())
    made = training(target, 3, kept=kept, train_output=False)
    model = made.drafter.model
    before = model.layer.mlp.up_proj.weight.clone()
    fit(made.objective, [packed((random_ids(12), 3))], steps=3, learning_rate=1e-2)
    torch.testing.assert_close(model.saved_state()["lm_head.weight"], split(target.model)[1].weight[kept])
    assert not torch.equal(model.layer.mlp.up_proj.weight, before)


def fingerprint(model):
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(("version", "key_value_heads"), [(1, None), (3, None), (3, "all")])
def test_the_start_is_solved_for(version, key_value_heads, tiny_llama):
    """Every channel that `fc` reads has a size of 1, and the drafter's outputs explain as much as is said."""
    target = as_target(tiny_llama(layers=3, vocab_size=16, hidden=128))  # keys so wide that entries can be told apart
    made = training(target, version, num_key_value_heads=key_value_heads)
    assert num_induction_heads(made.drafter.model) == (1 if key_value_heads == "all" else 0)
    texts = [torch.randint(16, (24,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(40)]
    explained = made.objective.fit([packed((text, 2)) for text in texts])
    model, ids = made.drafter.model, torch.tensor(texts)
    states = dict(enumerate(target.model(ids, output_hidden_states=True).hidden_states))
    with torch.no_grad():
        outputs = made.drafter.teacher_forced_hidden(ids, torch.ones_like(ids), states)[:, 1:-1].flatten(0, 1)
        features = states[3][:, 1:-1].flatten(0, 1)
        if version == 3:
            features = features / model.norm.weight
        read = [states[layer][:, :-2] for layer in made.objective.layers]
        read = torch.cat([target.model.get_input_embeddings()(ids[:, 1:-1]), *read] if version == 1 else read, -1)
    wanted = 1 - float((features - outputs).square().sum() / (features - features.mean(0)).square().sum())
    assert explained == pytest.approx(wanted, abs=1e-4)
    assert 0.1 < explained < 1
    sizes = (read * model.scale).square().mean((0, 1))
    torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def trained(copying):
    """Per version, a drafter that has learned to copy, five tokens a step."""
    found = {}
    for version in VERSIONS:
        made = training(copying.target, version, unroll=5, step_decay=1.0)
        batches = [copied(copying, seed) for seed in range(60)]
        made.objective.fit(batches)
        fit(made.objective, batches, steps=240, learning_rate=1e-2)
        found[version] = made
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_step_learns_to_copy(version, trained, copying):
    """Labels or features one off, or a step that sees too little, leave at least one step at chance."""
    made = trained[version]
    measured = rates(made.objective, copied(copying, seed=1000))
    assert min(measured[f"heads/{j}/top1"] for j in range(5)) > 0.99, measured
    # What training measured is what decoding gets, to the last token.
    prompts = copying.rows(8, 9, seed=2000)
    out = speculative_generate(
        copying.target, made.drafter, prompts, max_new_tokens=12, num_speculative_tokens=5, eos_token_id=[]
    )
    assert (out.stats.block_efficiency or 0) > 5.7


def copied(copying, seed):
    """Rows whose every answer token can be known: no drafter reads the embedding of a text's first token."""
    return packed(*[(row, copying.period + 1) for row in copying.rows(12, 16, seed).tolist()], length=16)


@pytest.fixture(scope="module")
def half_trained(copying):
    """Per version, a drafter that is right now and then."""
    found = {}
    for version in VERSIONS:
        made = training(copying.target, version, unroll=4)
        batches = [copied(copying, seed) for seed in range(20)]
        made.objective.fit(batches)
        fit(made.objective, batches, steps=45, learning_rate=1e-2)
        found[version] = made
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_training_metrics_are_the_decoders_acceptance(version, half_trained, copying, checks):
    """One step from every anchor of the target's greedy texts: the same tokens are accepted as training counted as right."""
    made, target = half_trained[version], copying.target
    prompts = copying.rows(6, 9, seed=3000)
    texts = speculative_generate(target, None, prompts, max_new_tokens=24, eos_token_id=[]).tokens.tolist()
    steps, answer, length = 4, 9, len(texts[0])
    measured = rates(made.objective, packed(*[(text, answer) for text in texts], length=length))
    prefixes = [text[: anchor + 1] for text in texts for anchor in range(answer - 1, length - 1)]
    labels = [min(steps, length - len(prefix)) for prefix in prefixes]
    found = checks.accepted_from(target, made.drafter, prefixes, steps)
    accepted = [min(number, most) for number, most in zip(found, labels, strict=True)]
    assert measured["block_efficiency"] == pytest.approx(1 + sum(accepted) / len(accepted), abs=1e-6)
    assert measured["heads/0/top1"] == pytest.approx(sum(n > 0 for n in accepted) / len(accepted), abs=1e-6)
    assert 1.2 < measured["block_efficiency"] < 4.2, "the comparison must have something to compare"


@pytest.mark.parametrize("version", VERSIONS)
def test_alpha_tells_the_decoders_acceptance_and_no_longer_when_features_are_off(version, tiny_llama):
    """Sampled: the mean alpha where steps began is the first draft token's acceptance, within its interval. The planted
    fault of peers, features of one layer off in decoding alone, breaks that.
    """
    target = as_target(tiny_llama(vocab_size=16, layers=3, seed=2, hidden=64))
    prompts = torch.randint(16, (128, 3), generator=torch.Generator().manual_seed(0))
    texts = speculative_generate(target, None, prompts, max_new_tokens=21, temperature=1.0, eos_token_id=[]).tokens
    made = training(target, version)
    made.objective.fit([packed(*[(text, 3) for text in texts[i : i + 16].tolist()]) for i in range(0, 64, 16)])
    drafter, right = made.drafter, made.drafter.wants["hidden_states"]
    assert deviation(target, drafter, drafter, prompts) < 4
    wrong = Eagle(drafter.model, target, [layer - 1 for layer in right])
    assert deviation(target, drafter, wrong, prompts) > 5


def deviation(target, measured, decoding, prompts):
    """By how many standard errors acceptance of the first draft token misses the alpha measured where steps began."""
    settings = {"max_new_tokens": 30, "num_speculative_tokens": 2, "temperature": 1.0, "eos_token_id": []}
    out = speculative_generate(target, decoding, prompts, **settings)
    answers = [Answer(row[:3], row[3:]) for row in out.tokens.tolist()]
    scores = teacher_forced(target, measured, answers, Sampling(temperature=1.0))
    alpha = torch.cat([one.alpha[row.step_starts] for one, row in zip(scores, out.stats.rows, strict=True)])
    error = float((alpha * (1 - alpha)).sum().sqrt()) / len(alpha)
    return abs(out.stats.conditional_acceptance[0] - float(alpha.mean())) / error


@pytest.mark.parametrize("version", VERSIONS)
def test_alpha_in_training_is_the_evaluations(version, half_trained, copying):
    made = half_trained[version]
    texts = copying.rows(3, 18, seed=5).tolist()
    measured = rates(made.objective, packed(*[(text, 6) for text in texts], length=18))
    scores = teacher_forced(
        copying.target, made.drafter, [Answer(text[:6], text[6:]) for text in texts], Sampling(temperature=1.0)
    )
    assert measured["alpha"] == pytest.approx(float(torch.cat([one.alpha for one in scores]).mean()), abs=1e-5)


@pytest.mark.parametrize("loss", ["forward_kl", {"cross_entropy": 1.0, "tvd": 0.5}])
def test_a_cut_vocabulary_is_learned_and_measured_over_all_ids(loss, copying):
    """Labels outside it teach nothing (cross entropy) and can never be right."""
    target, kept = copying.target, torch.arange(0, 24, 2)
    made = training(target, 3, kept=kept, loss=loss, unroll=2)
    batch = copying.batch(8, 16, seed=1)
    fit(made.objective, [batch], steps=3, learning_rate=1e-3)
    measured = rates(made.objective, batch)
    best = target.model(input_ids=batch.input_ids).logits.argmax(-1).flatten()[batch.predictors]
    assert measured["heads/0/top1"] <= float((best % 2 == 0).float().mean())
    answers = [Answer(row[:4], row[4:]) for row in batch.input_ids.tolist()]
    scores = teacher_forced(target, made.drafter, answers, Sampling(temperature=1.0))
    assert measured["alpha"] == pytest.approx(float(torch.cat([one.alpha for one in scores]).mean()), abs=1e-5)


def test_the_losses_are_those_of_the_plain_formulas(tiny_llama):
    """Version 1, two steps: KL and smooth L1 at every label, weighed by step, over the answer's tokens."""
    target = as_target(tiny_llama(layers=2))
    made = training(target, 1, unroll=2, step_decay=0.5, feature_weight=2.0)
    ids, answer = random_ids(9, seed=4), 3
    sums = made.objective(packed((ids, answer)))
    out = target.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    expected = 0.0
    for anchor in range(answer - 1, len(ids) - 1):
        with torch.no_grad():
            outputs = decoder_outputs(made, target, ids, anchor, min(2, len(ids) - 1 - anchor))
        for j, output in enumerate(outputs):
            target_probs = out.logits[0, anchor + j].softmax(-1)
            log_draft = target.model.lm_head(output).log_softmax(-1)
            kl = (target_probs * (target_probs.log() - log_draft)).sum()
            distance = torch.nn.functional.smooth_l1_loss(output, out.hidden_states[-1][0, anchor + j])
            expected += [1.0, 0.5][j] / 1.5 * float(kl + 2.0 * distance)
    assert float(sums.loss_sum.detach()) == pytest.approx(expected, rel=1e-4)
    assert sums.count == len(ids) - answer
