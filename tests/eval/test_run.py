"""`draftsmith eval` on tiny saved models: one report of everything, in every mode of decoding."""

import json

import pytest
import torch

from draftsmith.decode import lengths
from draftsmith.errors import BadInput
from draftsmith.eval import measure
from draftsmith.eval.caveats import caveats
from draftsmith.eval.options import EvalOptions
from draftsmith.eval.report import read_report
from draftsmith.eval.run import evaluate
from draftsmith.eval.schema import Report
from draftsmith.models.cut import cut_layers
from draftsmith.models.draft_lm import cut_vocabulary, save_draft_lm
from draftsmith.models.target import load_target
from draftsmith.train.logs import read_metrics


@pytest.fixture(scope="module")
def run(chat_folder, trained_folder):
    """``run(**options)``: the report on the trained drafter, 12 tokens after each of 6 prompts."""

    def measured(**options):
        known = {
            "target": str(chat_folder / "model"),
            "drafter": str(trained_folder / "final"),
            "prompts": str(chat_folder / "prompts.jsonl"),
            "limit": 6,
            "max_new_tokens": 12,
            "num_speculative_tokens": 3,
        }
        report = evaluate(EvalOptions(**{**known, **options}))
        Report.model_validate(report)
        return report

    return measured


@pytest.fixture(scope="module")
def whole(run, trained_folder, tmp_path_factory):
    """A report of drafter, baseline and untrained start on all 16 prompts, written and printed; and where it was written."""
    folder = tmp_path_factory.mktemp("report")
    return run(limit=None, baseline="prompt_lookup", untrained=str(trained_folder / "start"), out=folder), folder


def by_name(report):
    return {one["name"]: one for one in report["runs"]}


def assert_counts_agree(one):
    """Pooled counts are the prompts' and the categories', and the rates are made of them."""
    for key in ("target_calls", "drafted", "accepted", "emitted"):
        assert one[key] == sum(prompt[key] for prompt in one["prompts"])
        assert one[key] == sum(category[key] for category in one["categories"].values())
    assert one["acceptance_rate"] == pytest.approx(one["accepted"] / one["drafted"])
    assert one["block_efficiency"] == pytest.approx(one["emitted"] / one["target_calls"])
    low, high = one["block_efficiency_ci"]
    assert low <= one["block_efficiency"] <= high


def test_a_report_of_drafter_baseline_and_untrained_start(whole, trained_folder):
    report, folder = whole
    runs = by_name(report)
    assert list(runs) == ["drafter", "baseline", "start"]
    for name in ("drafter", "baseline"):
        one = runs[name]
        assert_counts_agree(one)
        assert one["identical_to_target"] == [16, 16]
        assert set(one["categories"]) == {"even", "odd"}
        assert [prompt["question_id"] for prompt in one["prompts"]] == list(range(3, 64, 4))
        for figure in ("speedup", "cost_ratio", "expected_speedup", "tokens_per_second", "plain_tokens_per_second"):
            assert one[figure] > 0, figure
        assert one["verification_cost"][0] == 1
    drafter, start = runs["drafter"], runs["start"]
    assert drafter["alpha"] > start["alpha"] + 0.1
    for key in ("target_calls", "speedup", "alpha_at_step_starts"):
        assert start[key] is None, key
    assert 0 < drafter["alpha_at_step_starts"] <= 1
    assert drafter["greedy_agreement_at_step_starts"] == pytest.approx(drafter["conditional_acceptance"][0])
    assert runs["baseline"]["alpha"] is None, "a lookup has no distribution"
    assert 1 < drafter["mbsu"] < drafter["block_efficiency"]
    assert report["settings"]["num_speculative_tokens"] == 3
    losses = [r["loss"] for r in read_metrics(trained_folder / "metrics.jsonl") if r["kind"] == "train"]
    assert report["training"]["loss"] == losses
    written = json.loads((folder / "report.json").read_text())
    assert written == read_report(folder) == report
    page = (folder / "report.html").read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org", ""), "nothing is fetched"


def test_without_speed_nothing_is_decoded_by_the_drafters(run, whole, capsys, tmp_path):
    full, alone = by_name(whole[0])["drafter"], by_name(run(speed=False, limit=None, out=tmp_path))["drafter"]
    assert alone["alpha"] == pytest.approx(full["alpha"], abs=1e-6)
    assert alone["greedy_agreement"] == full["greedy_agreement"]
    for key in ("target_calls", "speedup", "cost_ratio", "identical_to_target", "alpha_at_step_starts"):
        assert alone[key] is None, key
    out, err = capsys.readouterr()
    assert "alpha" in out
    assert f"report: {tmp_path}/report.html" in err


def assert_same_counts(report, whole):
    """The same prompts were decoded in the same steps."""
    one = by_name(report)["drafter"]
    assert_counts_agree(one)
    assert one["identical_to_target"] == [6, 6]
    for mine, other in zip(one["prompts"], by_name(whole[0])["drafter"]["prompts"], strict=False):
        for key in ("question_id", "target_calls", "drafted", "accepted", "emitted", "drafted_at", "step_starts"):
            assert mine[key] == other[key], key
        assert mine["alpha_sum"] == pytest.approx(other["alpha_sum"], abs=1e-4)


def test_batches_change_no_count(run, whole):
    """Rows accept and end on their own, whatever stands beside them; the last batch is smaller."""
    assert_same_counts(run(batch_size=4), whole)


def test_the_packed_backend_decodes_the_same(run, whole):
    report = run(backend="packed")
    assert report["settings"]["backend"] == "packed"
    assert_same_counts(report, whole)


def test_sampling_reports_acceptance_without_claiming_identity(run):
    settings = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 3}
    one, again = (by_name(run(**settings))["drafter"] for _ in range(2))
    assert_counts_agree(one)
    assert one["identical_to_target"] is None
    low, high = one["alpha_at_step_starts_ci"]
    assert low - 0.15 < one["conditional_acceptance"][0] < high + 0.15
    assert [prompt["emitted"] for prompt in again["prompts"]] == [prompt["emitted"] for prompt in one["prompts"]]
    assert again["alpha"] == one["alpha"]


def test_a_tree_counts_depth_and_nodes(run):
    one = by_name(run(tree=[2, 2]))["drafter"]
    assert one["identical_to_target"] == [6, 6]
    assert one["tree_nodes"] == 6
    assert one["num_speculative_tokens"] == 2
    assert one["drafted_nodes"] > one["drafted"]
    assert len(one["per_position_acceptance"]) == 2


@pytest.mark.parametrize("name", ["heuristic:most=6", "confidence:threshold=0.9", "auto:most=3"])
def test_draft_tokens_decided_step_by_step(name, run):
    """Costs are measured before the clock runs, as far as was drafted; fixed numbers' expectations are not claimed."""
    report = run(num_speculative_tokens=name, batch_size=4)
    one = by_name(report)["drafter"]
    assert_counts_agree(one)
    assert one["identical_to_target"] == [6, 6]
    assert report["settings"]["num_speculative_tokens"] == name
    assert len({one["target_calls"], *one["drafted_at"]}) > 1, "steps of different lengths"
    assert len(one["verification_cost"]) == len(one["drafted_at"]) + 1
    assert one["passes_per_step"] == pytest.approx(one["drafted"] / one["target_calls"])
    assert one["mbsu"] > 0
    for key in ("num_speculative_tokens", "expected_speedup", "best_num_speculative_tokens", "break_even_alpha"):
        assert one[key] is None, key
    (said,) = [line for line in caveats(report) if name in line]
    assert "step by step" in said


def test_auto_measures_every_batch_size_off_the_clock(run, monkeypatch):
    timed, measured = [], []
    real_turn, real_costs = measure._take_turn, lengths.measure_costs

    def turn(*args):
        timed.append(len(measured))
        real_turn(*args)

    def costs(*args, **settings):
        measured.append(args[4])
        return real_costs(*args, **settings)

    monkeypatch.setattr(measure, "_take_turn", turn)
    monkeypatch.setattr(lengths, "measure_costs", costs)
    run(num_speculative_tokens="auto:most=2", batch_size=4)
    assert measured == [4, 2]
    assert set(timed) == {2}


def test_a_drafter_with_a_cut_vocabulary_is_measured_over_the_full_one(run, chat_folder, tmp_path):
    target = load_target(str(chat_folder / "model"))
    kept = sorted({*range(0, 384, 3), 2})
    cut = cut_vocabulary(cut_layers(target.model, [0, 1, 2]), torch.tensor(kept))
    save_draft_lm(cut, tmp_path / "cut", target_name=target.name, tokenizer=target.tokenizer)
    one = by_name(run(drafter=str(tmp_path / "cut"), limit=4))["drafter"]
    assert one["identical_to_target"] == [4, 4]
    assert one["alpha"] < 0.9, "all layers, but two thirds of the ids can never be drafted"


def test_a_system_prompt_is_part_of_what_is_measured(run, chat_folder, tmp_path):
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "How many boats are there?"}]
    (tmp_path / "with.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "without.jsonl").write_text(json.dumps({"messages": messages[1:]}) + "\n")
    found = [run(prompts=str(tmp_path / f"{name}.jsonl"), speed=False)["runs"][0] for name in ("with", "without")]
    assert found[0]["alpha"] != found[1]["alpha"]


def test_prompts_that_cannot_be_answered_are_named(run, tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"question_id": 7, "turns": ["apples " * 300]}) + "\n")
    with pytest.raises(BadInput, match=r"long\.jsonl: prompt 7 has \d+ tokens, the target's context is 256"):
        run(prompts=str(tmp_path / "long.jsonl"))
    (tmp_path / "answer.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "Hm."}]}) + "\n")
    with pytest.raises(BadInput, match=r"answer\.jsonl: prompt 1: the prompt has no turn"):
        run(prompts=str(tmp_path / "answer.jsonl"))


@pytest.mark.parametrize("tree", [[2, 1], "dynamic:num_nodes=5,width=2", "auto"])
def test_a_baseline_drafts_what_it_can_beside_a_tree(tree, run):
    drafter, baseline = run(tree=tree, baseline="prompt_lookup", num_speculative_tokens=2)["runs"]
    assert drafter["tree_nodes"] is not None
    assert (baseline["tree_nodes"], baseline["num_speculative_tokens"]) == (None, 2)
    assert baseline["drafted"] > 0


@pytest.mark.parametrize(
    ("tree", "can"), [([2, 1], "chains only"), ("dynamic:num_nodes=5,width=2", "no trees by its confidence")]
)
def test_a_tree_for_a_drafter_without_branches_is_refused(tree, can, run):
    with pytest.raises(BadInput, match=rf"--tree .*: prompt_lookup drafts {can}"):
        run(drafter="prompt_lookup", tree=tree, num_speculative_tokens=2)


def test_a_chain_is_as_long_as_the_drafter_made_it(run, monkeypatch):
    inside = measure.speculative_generate

    def shorter(*pair, num_speculative_tokens, **rest):
        return inside(*pair, num_speculative_tokens=min(2, num_speculative_tokens), **rest)

    monkeypatch.setattr(measure, "speculative_generate", shorter)
    (one,) = run(num_speculative_tokens=3)["runs"]
    assert one["num_speculative_tokens"] == len(one["conditional_acceptance"]) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rule": "typical", "rule_options": {"epsilonn": 0.1}}, "did you mean 'epsilon'"),
        ({"rule": "tolerant", "rule_options": {"top": float("inf")}}, "expected a whole number"),
        ({"rule": "block", "tree": [2, 1]}, "defined on a chain"),
    ],
)
def test_rules_are_checked_before_anything_is_loaded(options, says):
    with pytest.raises(BadInput, match=says):
        EvalOptions(target="nowhere", drafter="nowhere", **options)
