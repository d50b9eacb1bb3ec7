"""Early exit: the first layers draft in the target's own cache, and an adapter learns what they lack."""

import json
from typing import Any

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.data.chats import Encoded
from draftsmith.data.packing import pack
from draftsmith.decode.costs import measure_costs
from draftsmith.decode.draft import Drafter
from draftsmith.decode.loop import plain_generate
from draftsmith.decode.sampling import Sampling
from draftsmith.distill.batch import distill_batch
from draftsmith.distill.mixture import parse_mixture
from draftsmith.distill.teacher import Teacher
from draftsmith.errors import BadInput
from draftsmith.eval.alpha import Answer, teacher_forced
from draftsmith.heads import load_drafter
from draftsmith.heads.early_exit import EarlyExit
from draftsmith.heads.exit_head import ExitHead
from draftsmith.heads.exit_training import EarlyExitObjective, save_exit
from draftsmith.models.cut import cut_layers
from draftsmith.models.target import Target, as_target
from draftsmith.models.views import layers_of

FAMILIES = ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]
PROMPTS = [9, 1, 6]  # a prompt of one token has no hidden states before the first draft
GREEDY = Sampling(0.0)


def moved(head, scale=0.02):
    """An adapter that no longer adds zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.adapter.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return head


def exit_of(model, adapter: Any = "block", exit_layer=3, **options):
    head = ExitHead(as_target(model), exit_layer, adapter, **options)
    return EarlyExit(head if adapter == "none" else moved(head))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("adapter", "length"), [("none", 4), ("block", "confidence:threshold=0.2")], ids=["plain", "adapter"]
)
def test_greedy_output_is_plain_greedy_output(family, adapter, length, request, checks):
    """Past sliding windows, in a ragged batch, with a drafter that is often right and often wrong."""
    model = request.getfixturevalue(family)(layers=4, seed=1)
    drafter = exit_of(model, adapter, exit_layer=2)
    assert isinstance(drafter, Drafter)
    stats = checks.check_greedy(as_target(model), drafter, PROMPTS, new=14, num_speculative_tokens=length)
    assert stats.accepted > 0
    # Gemma scales its embeddings up: few layers change what tokens they are.
    assert stats.accepted < stats.drafted or family == "tiny_gemma3"


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}], ids=["T=1", "top-p"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_sampled_output_has_the_targets_joint_distribution(settings, cut, tiny_llama, checks):
    model = tiny_llama(vocab_size=6, layers=2, seed=5)
    kept = torch.tensor([0, 2, 3, 5]) if cut else None
    drafter = exit_of(model, exit_layer=1, kept_ids=kept)
    checks.check_sampled(as_target(model), drafter, {**settings, "num_speculative_tokens": 2})


def test_the_first_layers_see_every_token_once(tiny_llama):
    """n drafting passes and one more before verification, which takes all tokens through the other layers only."""
    model = tiny_llama(layers=4, seed=1)
    drafter = exit_of(model, "none", exit_layer=1)
    seen = {0: [], 3: []}
    for layer, widths in seen.items():
        model.model.layers[layer].register_forward_pre_hook(
            lambda _, args, widths=widths: widths.append(args[0].shape[1])
        )
    speculative_generate(
        model, drafter, torch.tensor([[5, 9, 2, 7]]), max_new_tokens=9, num_speculative_tokens=3, eos_token_id=[]
    )
    prefill = 3
    assert sum(seen[0]) == sum(seen[3])
    assert seen[3][0] == prefill
    assert set(seen[0][1:]) == {1}
    assert set(seen[3][1:]) <= {1, 2, 3, 4}


def test_without_an_adapter_it_is_the_targets_first_layers(tiny_gemma3):
    """What it proposes is what a model cut out of the target says, and the target's parameters are all it has."""
    model = tiny_gemma3(layers=4, seed=2)
    drafter = exit_of(model, "none", exit_layer=2)
    ids = torch.tensor([[5, 9, 2, 7, 1, 3]])
    cut = cut_layers(model, [0, 1])
    hidden = drafter.teacher_forced_hidden(ids, torch.ones_like(ids), {})
    torch.testing.assert_close(drafter.first_token_logits(hidden[0]), cut(input_ids=ids).logits[0].float())
    assert not list(drafter.head.parameters())
    assert drafter.num_parameters_read < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gpt2", "tiny_gemma3"])
@pytest.mark.parametrize("adapter", ["none", "attention", "block"])
def test_decoding_accepts_what_teacher_forcing_predicts(family, adapter, request):
    """At every step's start the first draft token is the one that a pass over the whole text predicts: the adapter's cache
    holds what it would hold had it seen the text at once.
    """
    target = as_target(request.getfixturevalue(family)(layers=4, seed=1))
    drafter = exit_of(target.model, adapter, exit_layer=1)
    prompts = [[5, 9, 2, 7], [3], [8, 8, 1]]
    ids, mask = torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, 4, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), 1
    out = speculative_generate(target, drafter, ids, mask, max_new_tokens=30, num_speculative_tokens=3, eos_token_id=[])
    answers = [
        Answer(prompt, tokens[len(prompt) : len(prompt) + 30])
        for prompt, tokens in zip(prompts, out.tokens.tolist(), strict=True)
    ]
    forced = teacher_forced(target, drafter, answers, GREEDY)
    for scores, stats in zip(forced, out.stats.rows, strict=True):
        assert int(scores.agreement[stats.step_starts].sum()) == stats.accepted_at[0]
    assert out.stats.accepted > 0
    assert out.stats.accepted < out.stats.drafted or family == "tiny_gemma3"  # see above


def test_training_teaches_the_exit_to_copy_and_decoding_gets_what_training_measured(copying, checks):
    target = copying.target
    before = checks.fingerprint(target.model)
    torch.manual_seed(0)
    head = ExitHead(target, 1, "block")
    objective = EarlyExitObjective(head, target, parse_mixture("forward_kl"), GREEDY)
    batches = (copying.batch(16, 20, seed=1000 + i) for i in range(1000))
    untrained = objective.eval()(copying.batch(16, 20, seed=1)).metrics
    metrics = checks.train_steps(objective, batches, steps=150, learning_rate=1e-2)
    assert float(untrained["top1"][0]) / untrained["top1"][1] < 0.5
    assert metrics["top1"] > 0.99
    assert metrics["top5"] >= metrics["top1"]
    assert metrics["alpha"] > 0.9
    assert metrics["block_efficiency"] > 4.9
    assert checks.fingerprint(target.model) == before
    out = speculative_generate(
        target,
        EarlyExit(head),
        copying.rows(8, copying.period, seed=7),
        max_new_tokens=24,
        num_speculative_tokens=4,
        eos_token_id=[],
    )
    assert out.stats.accepted / out.stats.drafted > 0.97
    assert checks.fingerprint(target.model) == before


@pytest.mark.parametrize("kept", [None, torch.arange(0, 24, 2)], ids=["whole", "cut"])
def test_training_metrics_are_the_decoders_acceptance(kept, copying, checks):
    """One step from every place where a training text could be gone on with: as many tokens are accepted as counted."""
    target = copying.target
    torch.manual_seed(0)
    head = ExitHead(target, 1, "block", kept_ids=kept)
    objective = EarlyExitObjective(head, target, parse_mixture("forward_kl"), GREEDY)
    checks.train_steps(objective, (copying.batch(16, 20, seed=1000 + i) for i in range(200)), 110, 1e-2)
    prompt, new = 5, 20
    texts = plain_generate(target, copying.rows(6, prompt, seed=3), max_new_tokens=new, eos_token_id=[]).tokens
    examples = [Encoded(text, [False] * prompt + [True] * new) for text in texts.tolist()]
    with torch.no_grad():
        metrics = objective(distill_batch(pack(examples, 50), torch.device("cpu"))).metrics
    measured = {name: float(total) / float(count) for name, (total, count) in metrics.items()}
    starts = range(prompt, prompt + new)
    rows = checks.accepted_from(target, EarlyExit(head), [text[:n] for text in texts.tolist() for n in starts], 4)
    first, whole = ([row for i, row in enumerate(rows) if i % new <= new - most] for most in (1, 4))
    assert measured["top1"] == pytest.approx(sum(n > 0 for n in first) / len(first), abs=1e-6)
    assert measured["block_efficiency"] == pytest.approx(1 + sum(whole) / len(whole), abs=1e-6)
    assert 1.2 < measured["block_efficiency"] < 4.8, "the comparison must have something to compare"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_its_adapter_alone(family, request, checks):
    target = as_target(request.getfixturevalue(family)(vocab_size=24, layers=3, tie_word_embeddings=False))
    before = checks.fingerprint(target.model)
    head = ExitHead(target, 2, "attention", kept_ids=torch.arange(0, 24, 2))
    objective = EarlyExitObjective(head, target, parse_mixture({"forward_kl": 0.5, "cross_entropy": 0.5}), GREEDY)
    names = {name.split(".")[2] for name, _ in objective.named_parameters()}
    assert names == {"layers"}
    batch = request.getfixturevalue("copying").batch(4, 12, seed=3)
    losses = []
    optimizer = torch.optim.AdamW(objective.parameters(), lr=3e-3)
    for _ in range(8):
        sums = objective(batch)
        losses.append(float(sums.loss_sum.detach()))
        sums.loss_sum.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert checks.fingerprint(target.model) == before


@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_gemma3", "tiny_gpt2"])
def test_with_cached_last_states_only_the_first_layers_run(family, request):
    """Two documents in a row: the loss is the same, and the layers beyond the exit stay idle."""
    target = as_target(request.getfixturevalue(family)(layers=3, seed=1))
    objective = EarlyExitObjective(
        moved(ExitHead(target, 2, "block")), target, parse_mixture("forward_kl"), GREEDY
    ).eval()
    examples = [Encoded([5, 9, 2, 7, 1, 3], [False, False, True, True, True, True]), Encoded([4, 8], [False, True])]
    plain = distill_batch(pack(examples, 9), torch.device("cpu"))
    cached = distill_batch(pack(examples, 9), torch.device("cpu"), Teacher(target).hidden(plain))
    ran = []
    for number, layer in enumerate(layers_of(target.model)):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    with torch.no_grad():
        found = objective(cached).loss_sum
        assert ran == [0, 1]
        torch.testing.assert_close(found, objective(plain).loss_sum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter", ["none", "block"])
def test_a_saved_exit_comes_back(dtype, adapter, tiny_llama, tmp_path):
    target = as_target(tiny_llama(layers=4, seed=1).to(dtype))
    drafter = exit_of(
        target.model,
        adapter,
        kept_ids=torch.arange(0, 64, 2),
        **({"intermediate_size": 40} if adapter == "block" else {}),
    )
    drafter.head.to(dtype)
    save_exit(drafter.head, target, tmp_path / "exit")
    loaded = load_drafter(tmp_path / "exit", target)
    assert isinstance(loaded, EarlyExit)
    ids = torch.tensor([[5, 9, 2, 7]])
    hidden = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    found, expected = (
        one.teacher_forced_hidden(ids, torch.ones_like(ids), {3: hidden[3]})[0] for one in (loaded, drafter)
    )
    assert torch.equal(found, expected)
    assert torch.equal(loaded.first_token_logits(found), drafter.first_token_logits(expected))
    settings = {"max_new_tokens": 8, "eos_token_id": [], "temperature": 1.0, "seed": 3}
    again = [speculative_generate(target, one, ids, **settings).tokens.tolist() for one in (loaded, drafter)]
    assert again[0] == again[1]
    assert json.loads((tmp_path / "exit" / "draftsmith.json").read_text())["kind"] == "early_exit"


def test_another_target_is_refused(tiny_llama, tmp_path):
    target = Target(tiny_llama(layers=4), None, "the/target", ())
    save_exit(exit_of(target.model).head, target, tmp_path / "exit")
    with pytest.raises(BadInput, match=r"made for the target the/target, and the weights of .* are others"):
        load_drafter(tmp_path / "exit", tiny_llama(layers=4, seed=9))
    with pytest.raises(BadInput, match=r"4 first layers: expected 1 to 3"):
        ExitHead(target, 4)


def test_costs_count_verification_from_where_drafting_left_off(tiny_llama):
    """The plain pass is the whole model's; the others leave out the first layers but for one token."""
    model = tiny_llama(layers=6, hidden=128)
    drafter = exit_of(model, "block", exit_layer=5)
    widths = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    costs = measure_costs(as_target(model), drafter, [5, 9, 2, 7], 3, seconds=0.1, min_rounds=2)
    assert costs.verification.keys() == {1, 2, 3, 4}
    assert costs.draft.keys() == {3}
    assert set(widths) == {1, 3}  # one token at a time, but for the prompt's prefill
    assert drafter.num_passes(3) == 3
