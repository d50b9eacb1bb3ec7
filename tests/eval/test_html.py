"""The HTML page and the terminal's table: what they say, and that the page needs nothing but itself."""

import io
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from rich.console import Console

from draftsmith.eval.caveats import caveats
from draftsmith.eval.html import render
from draftsmith.eval.plots import plots
from draftsmith.eval.table import plain_lines, print_report
from draftsmith.eval.wording import DEFINITIONS, headline

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and collects ids, outside references and the text."""

    def __init__(self, html: str):
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.references.append(value or "")
            if name == "id":
                self.ids.append(value or "")
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] != "style":
            self.text += data


def test_page_is_well_formed_and_self_contained(make_report):
    html = render(make_report(training={"steps": [1, 2], "loss": [3.0, 2.0], "alpha": [None, 0.2]}))
    page = Page(html)
    assert all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert not re.search(r"url\((?!#)|@import|<metadata", html)
    assert page.tags.count("svg") == 7
    for name, _ in DEFINITIONS:
        assert name in page.text


def test_page_opens_with_what_was_found(make_report):
    report = make_report()
    page = Page(render(report))
    run = report["runs"][0]
    opening = page.text[: page.text.index("Figures")]
    for said in (
        f"{run['speedup']:.2f}× faster",
        f"{run['block_efficiency']:.2f} [",
        "Training raised alpha (temperature 1) from 0.10",
        "identical to plain decoding, token for token, on all 30 prompts",
        "The baseline prompt_lookup",
        "two cores",
    ):
        assert said in opening
    reproduce = page.text[page.text.index("How to reproduce") :]
    assert "draftsmith eval tiny" in reproduce
    assert "torch 2.13.0" in reproduce


def test_same_report_gives_the_same_page(make_report, forced_run):
    report = make_report(runs=[forced_run()])
    assert render(report) == render(report)


def test_names_are_escaped_everywhere(make_report, decoded_run):
    nasty = '<script>alert("x")</script>'
    run = decoded_run(label=nasty, prompts=4)
    for prompt in run.prompts:
        prompt.category = f"{nasty} $\\frac{{1"  # also no formula of matplotlib's
        prompt.question_id = nasty
    baseline = decoded_run("baseline", label=nasty, prompts=4)
    report = make_report(
        target=nasty,
        drafter=nasty,
        runs=[run, baseline],
        settings={"rule": nasty, nasty: nasty},
        environment={"command": nasty, "machine": nasty, nasty: [nasty]},
    )
    html = render(report)
    assert "<script" not in html
    assert nasty in Page(html).text


def test_plots_take_the_pages_colours_and_are_xml(make_report):
    for plot in plots(make_report()):
        ElementTree.fromstring(plot.svg)
        assert "var(--ink)" in plot.svg
        assert not re.search(r"#0[0-4]0[0-4]0[0-9]", plot.svg), "a stand-in colour is left"


def test_only_measured_things_are_drawn(make_report, forced_run):
    report = make_report(runs=[forced_run()])
    assert [plot.title for plot in plots(report)] == ["Teacher-forced acceptance"]
    page = Page(render(report))
    assert "speed was not measured" in page.text
    assert "nothing was decoded" in page.text


def test_single_prompt_single_run(make_report, decoded_run):
    report = make_report(runs=[decoded_run(prompts=1)])
    assert "Only 1 prompt was measured" in Page(render(report)).text


def test_headline_calls_a_loss_a_loss(make_report, decoded_run):
    run = decoded_run()
    for prompt in run.prompts:
        prompt.seconds = 2.0 * prompt.plain_seconds
    assert "2.00× slower" in headline(make_report(runs=[run]))[0]


def test_headline_claims_nothing_where_the_interval_holds_one(make_report, decoded_run):
    run = decoded_run()
    for i, prompt in enumerate(run.prompts):
        prompt.seconds = prompt.plain_seconds * (1.3 if i % 2 else 0.72)
    report = make_report(runs=[run])
    assert "No measurable change of speed" in headline(report)[0]
    assert any("may be no gain at all" in caveat for caveat in caveats(report))


def test_sampled_runs_are_compared_per_token(make_report, decoded_run):
    run = decoded_run()
    for prompt in run.prompts:
        prompt.plain_emitted, prompt.plain_seconds, prompt.identical = (
            2 * prompt.emitted,
            3 * prompt.plain_seconds,
            None,
        )
    report = make_report(runs=[run], settings={"temperature": 0.8})
    assert f"{report['runs'][0]['speedup_per_token']:.2f}×" in headline(report)[0]
    said = " ".join(caveats(report))
    assert "per token, not by total time" in said
    assert "draftsmith audit" in said
    assert any(line.startswith("speed-up per token") for line in plain_lines(report))


@pytest.mark.parametrize(
    ("change", "caveat"),
    [
        ({"settings": {"rule": "typical"}}, "does not preserve"),
        ({"environment": {}}, "Not recorded: the command, the machine, library versions"),
        ({}, "teacher-forced only"),
        ({}, "alpha is stated at temperature 1"),
    ],
)
def test_caveats(make_report, change, caveat):
    assert any(caveat in said for said in caveats(make_report(**change)))


def test_caveat_on_mismatches_and_failed_self_check(make_report, decoded_run):
    run = decoded_run()
    run.prompts[0].identical, run.prompts[0].first_mismatch = False, 7
    for prompt in run.prompts:
        prompt.step_start_agreement_sum = 0.1 * prompt.step_starts
    report = make_report(runs=[run])
    said = " ".join(caveats(report))
    assert "differed on 1 of 30 prompts" in said
    assert "Self-check failed" in said
    assert "no, from token 7" in Page(render(report)).text
    assert not any("Self-check" in caveat for caveat in caveats(make_report()))


def test_caveat_on_a_better_length_and_on_lost_time(make_report, decoded_run):
    run = decoded_run(rates=(0.95, 0.95), cost_ratio=0.01, verification_cost=[1.0, 1.05, 1.1, 1.1, 1.1, 1.1])
    for prompt in run.prompts:
        prompt.seconds = prompt.plain_seconds / 1.2
    said = " ".join(caveats(make_report(runs=[run])))
    assert "5 draft tokens a step should be faster than the 2 used" in said
    assert "extrapolated" in said
    assert "more than 10 % below the expected" in said


def test_table_off_a_terminal_is_aligned_plain_text(make_report):
    report = make_report()
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=40))
    lines = stream.getvalue().splitlines()
    assert lines == plain_lines(report)
    assert "\x1b" not in stream.getvalue()
    table = lines[lines.index("") + 1 : len(lines) - 1 - lines[::-1].index("")]
    assert len({len(line) for line in table}) == 1
    assert [word in table[0] for word in ("before training", "drafter", "prompt_lookup")] == [True] * 3
    assert any(line.startswith("draft token 2 accepted, given 1") for line in table)


def test_table_on_a_terminal_has_a_column_a_run(make_report):
    stream = io.StringIO()
    print_report(make_report(), Console(file=stream, width=140, force_terminal=True))
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    header = next(line for line in text.splitlines() if "prompt_lookup" in line and "drafter" in line and "┃" in line)
    assert header.count("┃") == 5


def test_the_headline_tells_a_tree_from_a_chain(make_report, decoded_run):
    chain = Page(render(make_report(runs=[decoded_run()]))).text
    assert "With 2 draft tokens a step, every pass" in chain
    assert "of the draft tokens are accepted" in chain
    tree = Page(render(make_report(runs=[decoded_run(tree_nodes=6, passes_per_step=2)]))).text
    assert "With a tree of 6 draft tokens, 2 deep, every pass" in tree
    assert "of its levels are accepted" in tree


def test_a_stream_that_was_served_while_training_is_drawn(make_report):
    curve = {"steps": [1, 2, 3, 4], "loss": [3.0, 2.0, 2.0, 1.0], "alpha": [None, None, None, 0.2]}
    served = {**curve, "stream_block_efficiency": [1.2, None, 1.5, 1.6]}
    drawn = {plot.title: plot for plot in plots(make_report(training=served))}
    assert "Block efficiency over the stream" in drawn
    assert "tokens a target pass" in drawn["Block efficiency over the stream"].svg
    for other in (curve, {**curve, "stream_block_efficiency": [1.2, None, None, None]}):
        assert "Block efficiency over the stream" not in {plot.title for plot in plots(make_report(training=other))}
    with pytest.raises(ValueError, match="differ in length"):
        make_report(training={**curve, "stream_block_efficiency": [1.2]})
