"""Medusa: separate weights, checkpoint names and configuration, published sizes, masks, trees by measured accuracies."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from draftsmith.data.chats import Encoded
from draftsmith.data.packing import pack
from draftsmith.decode.tree_search import tree_from_accuracies
from draftsmith.distill.batch import distill_batch
from draftsmith.heads.make import make_heads, save_heads
from draftsmith.heads.medusa import MedusaTrunk
from draftsmith.models.target import as_target
from draftsmith.recipe import EngineSection, MedusaDrafter, Recipe, TargetSection
from draftsmith.train.dry_run import parameter_lines


def test_no_two_heads_share_weights(tiny_llama, lab):
    made = lab.prepared(MedusaDrafter(num_heads=4, num_layers=2, output="own"), as_target(tiny_llama()))
    parameters = list(made.objective.parameters())
    assert len({parameter.data_ptr() for parameter in parameters}) == len(parameters) == 4 * (2 * 2 + 1)
    blocks = made.objective.heads.trunk.blocks
    with torch.no_grad():
        blocks[0].layers[0].weight.add_(1.0)
    assert not blocks[1].layers[0].weight.any()


@pytest.mark.parametrize("output", ["shared", "own", "low_rank"])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3"])
def test_every_head_starts_as_the_targets_own_output(output, family, request, lab):
    model = request.getfixturevalue(family)(**({"final_logit_softcapping": 5.0} if family == "tiny_gemma3" else {}))
    target = as_target(model)
    heads = lab.prepared(MedusaDrafter(num_heads=2, num_layers=2, output=output), target).objective.heads
    out = model(input_ids=torch.tensor([[4, 8, 1]]), output_hidden_states=True)
    prepared = heads.prepare(out.hidden_states[-1])
    for head in range(2):
        logits = heads.logits(head, prepared, torch.zeros(1, 3, head + 1, dtype=torch.long))
        torch.testing.assert_close(logits, out.logits)


@pytest.mark.parametrize("vocabulary", [None, 20])
def test_projections_of_their_own_start_fitted(vocabulary, tiny_llama, lab):
    target = as_target(tiny_llama(seed=3))
    batch = lab.batch_of(lab.greedy_rows(target, 40, 24), length=54)
    made = lab.prepared(MedusaDrafter(num_heads=2, output="own", vocabulary=vocabulary), target)
    before = lab.figures(made, batch)
    explained = made.objective.fit([batch, batch])
    after = lab.figures(made, batch)
    assert after["heads/0/loss"] < before["heads/0/loss"]
    assert after["heads/1/loss"] < before["heads/1/loss"]
    outputs = made.objective.heads.outputs
    original, _ = made.objective._read(batch)
    sources, labels = next(made.objective.pairs(batch))
    x, y = original[sources].double(), original[labels].double()
    gram = x.T @ x
    mapping = torch.linalg.solve(gram + 0.01 * gram.diagonal().diag(), x.T @ y)
    expected = outputs.base.weight.double() @ mapping.T
    torch.testing.assert_close(outputs.lm_heads[0].weight.double(), expected, rtol=1e-3, atol=1e-4)
    spread = (y - y.mean(0)).square().sum()
    assert explained == pytest.approx(float(1 - (y - x @ mapping).square().sum() / spread), abs=1e-3)
    assert not made.objective.heads.trunk.blocks[0].layers[0].weight.any()


def test_only_what_can_be_solved_for_is_fitted(tiny_llama, lab):
    target = as_target(tiny_llama())
    fitted = {output: lab.prepared(MedusaDrafter(output=output), target).objective for output in ("own", "shared")}
    assert fitted["own"].can_be_fitted
    assert not fitted["shared"].can_be_fitted


@pytest.mark.parametrize("output", ["shared", "own", "low_rank"])
def test_the_loss_and_the_decoder_read_the_same_logits(output, tiny_llama, lab):
    """The projection that the chunked loss multiplies by, against the one that decoding uses."""
    made = lab.prepared(
        MedusaDrafter(num_heads=2, output=output, output_rank=3 if output == "low_rank" else None, vocabulary=20),
        as_target(tiny_llama()),
    )
    with torch.no_grad():
        for parameter in made.objective.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    outputs = made.objective.heads.outputs
    for head in range(2):
        weight, bias, post = outputs.draft_head(head)
        assert (bias, post) == (None, None)
        torch.testing.assert_close(hidden @ weight.t(), outputs.logits(hidden, head))


def test_tensors_and_configuration_have_the_names_that_engines_read(tiny_llama, lab, tmp_path):
    target = as_target(tiny_llama())
    section = MedusaDrafter(num_heads=2, num_layers=2, output="own")
    save_heads(section, lab.prepared(section, target), target, tmp_path / "final")
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "final/model.safetensors").items()}
    blocks = {f"blocks.{h}.layers.{layer}" for h in range(2) for layer in range(2)}
    assert shapes == (
        {f"{block}.weight": (32, 32) for block in blocks}
        | {f"{block}.bias": (32,) for block in blocks}
        | {f"lm_heads.{h}.weight": (64, 32) for h in range(2)}
    )
    config = json.loads((tmp_path / "final/config.json").read_text())
    assert {key: config[key] for key in ("model_type", "architectures", "hidden_size", "vocab_size")} == {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": 32,
        "vocab_size": 64,
    }
    assert (config["num_heads"], config["num_hidden_layers"], config["medusa_fc_bias"]) == (2, 2, True)
    assert "truncated_vocab_size" not in config


def test_a_cut_vocabulary_is_in_the_configuration_and_its_ids_among_the_tensors(tiny_llama, lab, tmp_path):
    target = as_target(tiny_llama())
    section = MedusaDrafter(num_heads=2, output="own", vocabulary=20)
    made = lab.prepared(section, target)
    save_heads(section, made, target, tmp_path / "final")
    tensors = load_file(tmp_path / "final/model.safetensors")
    config = json.loads((tmp_path / "final/config.json").read_text())
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (64, 20)
    assert tensors["lm_heads.1.weight"].shape == (20, 32)
    assert (tensors["d2t"] + torch.arange(20)).tolist() == made.objective.heads.outputs.kept_ids.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == sorted(made.objective.heads.outputs.kept_ids.tolist())


VICUNA_7B = LlamaConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
)


def test_a_dry_run_counts_the_published_parameters_of_vicuna_7bs_heads():
    """Five heads of one layer with projections of their own: 5 · (4096² + 4096 + 32000 · 4096)."""
    recipe = Recipe(
        target=TargetSection(model="vicuna"),
        drafter=MedusaDrafter(num_heads=5, num_layers=1, output="own"),
        data={"prompts": "a.jsonl"},  # pyright: ignore[reportArgumentType]
        engine=EngineSection(steps=1),
        output="runs/x",
    )
    target, drafter = parameter_lines(recipe, VICUNA_7B)
    assert target == "target: vicuna, 6,738,415,616 parameters"
    assert drafter == "drafter: medusa, 739,266,560 parameters, 739,266,560 of them trained, 32,000 ids scored"


def test_sizes_come_from_the_configuration_of_a_target_whose_weights_are_elsewhere(tiny_llama, monkeypatch):
    """As ZeRO-3 leaves them: no elements, until they are gathered."""
    import deepspeed

    target = as_target(tiny_llama(tie_word_embeddings=False))
    whole = {id(parameter): parameter.data for parameter in target.model.parameters()}
    for parameter in target.model.parameters():
        setattr(parameter, "ds_id", 1)  # noqa: B010
        parameter.data = torch.empty(0)

    class Gathered:
        def __init__(self, parameters, modifier_rank):
            self.parameters = parameters

        def __enter__(self):
            for parameter in self.parameters:
                parameter.data = whole[id(parameter)]

        def __exit__(self, *error):
            for parameter in self.parameters:
                parameter.data = torch.empty(0)

    monkeypatch.setattr(deepspeed.zero, "GatheredParameters", Gathered)
    heads = make_heads(MedusaDrafter(num_heads=2, output="own"), target, None)
    own = target.model.lm_head.weight
    assert isinstance(heads.trunk, MedusaTrunk)
    made = dict(heads.named_parameters())
    assert tuple(made["trunk.blocks.0.layers.0.weight"].shape) == (32, 32)
    assert torch.equal(made["outputs.lm_heads.1.weight"], whole[id(own)])


def test_only_supervised_tokens_are_labels(tiny_llama, lab):
    """A head's label outside the mask changes nothing, one inside it does; no label comes from another document."""
    made = lab.prepared(MedusaDrafter(num_heads=3), as_target(tiny_llama()))
    lab.fit(made, lab.batch_of([[5, 9, 2, 7, 1, 3, 8, 6]]), steps=5)

    def loss(rows, prompt):
        with torch.no_grad():
            return float(made.objective(lab.batch_of(rows, prompt=prompt)).loss_sum)

    row = [5, 9, 2, 7, 1, 3, 8, 6, 4, 11]
    assert loss([row], 9) == 0.0, "the only label's hidden state one position earlier is not among the predictors"
    assert loss([row], 7) > 0.0
    counted = {}
    for prompt in (1, 4):
        batch = lab.batch_of([row, row[::-1]], prompt=prompt, length=20)
        counted[prompt] = [(len(sources), len(labels)) for sources, labels in made.objective.pairs(batch)]
        flat = batch.input_ids.flatten()
        for head, (sources, labels) in enumerate(made.objective.pairs(batch)):
            assert torch.equal(batch.predictors[labels] - batch.predictors[sources], torch.full_like(labels, head + 1))
            assert torch.equal(flat[batch.predictors[sources] + 2 + head], batch.labels[labels])
            assert (batch.segment_ids.flatten()[batch.predictors[sources]] == batch.segment_ids.flatten()[batch.predictors[labels]]).all()  # fmt: skip  # noqa: E501
    assert counted == {1: [(16, 16), (14, 14), (12, 12)], 4: [(10, 10), (8, 8), (6, 6)]}


def test_the_loss_is_a_weighted_sum_of_the_heads_own(tiny_llama, lab):
    made = lab.prepared(MedusaDrafter(num_heads=3, head_decay=0.5), as_target(tiny_llama()))
    batch = lab.batch_of([[5, 9, 2, 7, 1, 3, 8, 6]])
    with torch.no_grad():
        sums = made.objective.eval()(batch)
    parts = [float(sums.metrics[f"heads/{k}/loss"][0]) for k in range(3)]
    assert float(sums.loss_sum) == pytest.approx(parts[0] + 0.5 * parts[1] + 0.25 * parts[2], rel=1e-5)
    assert sums.count == batch.supervised == 7


@pytest.mark.parametrize("rows", [[[5, 9]], [[5, 9, 2]]])
def test_a_batch_without_labels_for_some_head_is_no_problem(rows, section, tiny_llama, lab):
    """Every parameter still gets a gradient, which ranks of a group must agree on."""
    made = lab.prepared(section, as_target(tiny_llama()), loss="forward_kl")
    made.objective.train()
    sums = made.objective(lab.batch_of(rows))
    sums.loss_sum.backward()
    without = [name for name, parameter in made.objective.named_parameters() if parameter.grad is None]
    assert not without
    assert all(torch.isfinite(parameter.grad).all() for parameter in made.objective.parameters())


def test_a_tree_from_measured_accuracies_takes_more_than_a_chain(tiny_llama, lab):
    from draftsmith import speculative_generate

    target = as_target(tiny_llama(layers=2, seed=3))
    made = lab.prepared(MedusaDrafter(num_heads=3), target)
    lab.fit(made, lab.batch_of(lab.greedy_rows(target, 24, 24), length=54), steps=40)
    accuracies = made.objective.accuracies
    layout = tree_from_accuracies(accuracies, 16)
    ids = torch.tensor(lab.greedy_rows(target, 12, 4, seed=4))
    settings = {"max_new_tokens": 24, "num_speculative_tokens": 3, "eos_token_id": []}
    chain = speculative_generate(target, made.drafter, ids, **settings)
    tree = speculative_generate(target, made.drafter, ids, tree=layout.paths, **settings)
    assert tree.tokens.tolist() == chain.tokens.tolist()
    assert (tree.stats.block_efficiency or 0) > (chain.stats.block_efficiency or 0) > 1


def test_nothing_is_guessed_across_an_answers_ends(tiny_llama, lab):
    """Two answers in a chat, with a user's turn between them: as EAGLE does, and as decoding will."""
    made = lab.prepared(MedusaDrafter(num_heads=3), as_target(tiny_llama()))
    mask = [False, True, True, False, True, True, True, True]
    batch = distill_batch(pack([Encoded(list(range(8)), mask)], 8), torch.device("cpu"))
    assert batch.labels.tolist() == [1, 2, 4, 5, 6, 7]
    found = [
        list(zip(batch.labels[sources].tolist(), batch.labels[labels].tolist(), strict=True))
        for sources, labels in made.objective.pairs(batch)
    ]
    assert found == [[(1, 2), (4, 5), (5, 6), (6, 7)], [(4, 6), (5, 7)], [(4, 7)]]


def test_accuracies_are_those_of_the_training_alone(tiny_llama, lab):
    """Of the steps that are measured, whatever passes there were before the first one, whatever a step is made of."""
    target = as_target(tiny_llama(layers=2, seed=3))
    batches = [lab.batch_of([row]) for row in lab.greedy_rows(target, 4, 12)]
    found = []
    for passes in (0, 3):
        objective = lab.prepared(MedusaDrafter(num_heads=2), target).objective.train()
        for _ in range(passes):  # as the steps that are timed for a budget
            objective.begin_step(32, 100)
            objective(batches[0])
        measured = []
        for step in range(40):
            objective.begin_step(step, 40)
            measured += [step for batch in batches[step % 2 :: 2] if objective(batch).metrics]
        assert measured == sorted(2 * [0, *range(30, 40)]), "the last quarter in every step, here"
        found.append(objective.accuracies)
    assert found[0] == found[1]
    assert found[0] is not None


def test_accuracies_are_those_of_the_trained_heads_not_of_what_they_were(tiny_llama, lab):
    target = as_target(tiny_llama(layers=2, seed=3))
    objective = lab.prepared(MedusaDrafter(num_heads=2), target).objective.train()
    batch = lab.batch_of(lab.greedy_rows(target, 16, 16), length=34)
    optimizer = torch.optim.Adam(objective.parameters(), lr=1e-2)
    for step in range(80):
        objective.begin_step(step, 80)
        (objective(batch).loss_sum / len(batch.labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            at_first = objective.accuracies
    with torch.no_grad():
        metrics = objective.eval()(batch).metrics
    at_last = [float(metrics[f"heads/{head}/top1"][0] / metrics[f"heads/{head}/top1"][1]) for head in range(2)]
    for head, now in enumerate(at_last):
        assert now > at_first[head][0] + 0.2, "the task is learned"
        assert objective.accuracies[head][0] == pytest.approx(now, abs=0.1)
