"""The report as one HTML page that needs nothing else: no script, no network, plots inline, every text escaped."""

from collections.abc import Iterable
from html import escape
from typing import Any

from .caveats import caveats
from .plots import plots
from .style import CSS
from .wording import (
    DEFINITIONS,
    LOSSLESS,
    MISSING,
    Report,
    Row,
    Run,
    cell,
    find,
    headline,
    interval,
    is_greedy,
    number,
    ordered,
    rows,
    speed,
    title,
)


def render(report: Report) -> str:
    """The page for a report that satisfies :class:`~draftsmith.eval.schema.Report`."""
    run = find(report, "drafter") or ordered(report)[0]
    sections = (
        _hero(report, run),
        _caveats(report),
        _section("Figures", _summary(report) + _positions(report)),
        _section("Plots", _plots(report)),
        _section("By category", _categories(report)),
        _section("By prompt", "".join(_prompts(other) for other in ordered(report))),
        _section("How to reproduce", _reproduce(report)),
        _section("What the figures mean", _definitions()),
    )
    heading = escape(f"draftsmith: {report['drafter']} for {report['target']}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{heading}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, sections))
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(heading: str, body: str) -> str:
    return f"<section>\n<h2>{escape(heading)}</h2>\n{body}\n</section>" if body else ""


def _hero(report: Report, run: Run) -> str:
    first, *others = headline(report)
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in others)
    machine = report["environment"].get("machine")
    where = (
        f"<p>Measured on {escape(_text(machine))}. {_short_settings(report)}</p>"
        if machine
        else f"<p>{_short_settings(report)}</p>"
    )
    return (
        f'<header>\n<p class="kicker">Speculative decoding: drafter <b>{escape(report["drafter"])}</b>, target '
        f"<b>{escape(report['target'])}</b></p>\n<h1>{escape(first)}</h1>\n"
        f"{_tiles(report, run)}\n{sentences}{where}\n</header>"
    )


def _short_settings(report: Report) -> str:
    settings = report["settings"]
    how = "Greedy decoding" if is_greedy(report) else f"Sampling at temperature {settings['temperature']}"
    known = (
        ("rule", "rule “{}”"),
        ("prompts", "prompts {}"),
        ("max_new_tokens", "at most {} new tokens"),
        ("seed", "seed {}"),
    )
    parts = [text.format(_text(settings[key])) for key, text in known if settings.get(key) is not None]
    return escape(", ".join([how, *parts]) + ".")


def _tiles(report: Report, run: Run) -> str:
    start = find(report, "start")
    key, value, ends = speed(run, report)
    tiles = [
        ("speed-up" if key == "speedup" else "speed-up per token", number(value, 2, "×"), interval(ends, 2)),
        ("tokens a target pass", number(run["block_efficiency"], 2), interval(run["block_efficiency_ci"], 2)),
    ]
    before = number(start["alpha"], 2) + " → " if start is not None and start is not run else ""
    name = "alpha (temperature 1)" if is_greedy(report) else "alpha"
    tiles.append((name, before + number(run["alpha"], 2), interval(run["alpha_ci"], 2)))
    tiles.append(_identity_tile(report, run))
    boxes = (
        f'<div class="tile"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
        for name, value, note in tiles
    )
    return f'<div class="tiles">{"".join(boxes)}</div>'


def _identity_tile(report: Report, run: Run) -> tuple[str, str, str]:
    if run["identical_to_target"] is not None:
        same, total = run["identical_to_target"]
        return "output identical", f"{same}/{total}", "prompts, against plain decoding"
    lossless = report["settings"].get("rule", "lossless") in LOSSLESS
    return (
        "output identical",
        MISSING,
        "not compared" if is_greedy(report) or not lossless else "sampled: see the audit",
    )


def _caveats(report: Report) -> str:
    items = "".join(f"<li>{escape(caveat)}</li>" for caveat in caveats(report))
    return f'<section class="caveats">\n<h2>Read this first</h2>\n<ul>{items}</ul>\n</section>' if items else ""


def _table(head: Iterable[str], body: Iterable[Iterable[str]], css: str = "") -> str:
    """A table from ready HTML cells, the first of each row a header; it scrolls sideways where the page is narrow."""
    top = "".join(f'<th scope="col">{text}</th>' for text in head)
    lines = ""
    for name, *cells in body:
        lines += f'<tr><th scope="row">{name}</th>' + "".join(f"<td>{text}</td>" for text in cells) + "</tr>\n"
    return (
        f'<div class="scroll"><table class="{css}"><thead><tr>{top}</tr></thead><tbody>\n{lines}</tbody></table></div>'
    )


def _cell(figure: tuple[str, str]) -> str:
    value, ends = (escape(text) for text in figure)
    return f'<span class="nowrap">{value}</span>' + (f' <span class="ci">{ends}</span>' if ends else "")


def _run_heads(report: Report) -> list[str]:
    heads = []
    for run in ordered(report):
        label = run["label"] if run["label"] and run["label"] != title(run) else ""
        note = f'<div class="ci">{escape(label)}</div>' if label else ""
        heads.append(escape(title(run)) + note)
    return heads


def _summary(report: Report) -> str:
    runs = ordered(report)
    body = []
    for row in rows(report):
        cells = []
        for run in runs:
            mean = run.get(f"{row.key}_mean_per_prompt")
            aside = "" if mean is None else f'<div class="mean">per prompt {number(mean, row.decimals, row.unit)}</div>'
            cells.append(_cell(cell(run, row)) + aside)
        body.append([escape(row.title), *cells])
    for key, name in (
        ("target_calls", "target passes"),
        ("drafted", "draft tokens"),
        ("accepted", "accepted"),
        ("emitted", "emitted"),
    ):
        if any(run[key] is not None for run in runs):
            body.append([name, *(number(run[key], 0) for run in runs)])
    note = '<p class="note">Pooled over prompts, with 95 % intervals; below, the mean of the prompts\' own rates.</p>'
    return note + _table(["", *_run_heads(report)], body, "figures")


def _positions(report: Report) -> str:
    runs = [run for run in ordered(report) if run["conditional_acceptance"]]
    if not runs:
        return ""
    body = []
    for i in range(max(len(run["conditional_acceptance"]) for run in runs)):
        cells = []
        for run in runs:
            for key in ("conditional_acceptance", "per_position_acceptance"):
                inside = i < len(run[key])
                cells.append(_cell((number(run[key][i]), interval(run[f"{key}_ci"][i]))) if inside else MISSING)
            cells.append(f"{run['drafted_at'][i]:,}" if i < len(run["drafted_at"]) else MISSING)
        body.append([str(i + 1), *cells])
    heads = ["draft token"]
    for run in runs:
        of = f'<div class="ci">{escape(title(run))}</div>'
        heads += [f"accepted, given the one before{of}", f"accepted of drafted{of}", f"times drafted{of}"]
    return "<h3>Acceptance by position</h3>" + _table(heads, body)


def _plots(report: Report) -> str:
    boxes = ""
    for plot in plots(report):
        names = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for colour, name in plot.key)
        boxes += (
            f"<figure><h3>{escape(plot.title)}</h3>"
            f'<div class="key">{names}</div><div role="img" aria-label="{escape(plot.title)}">{plot.svg}</div>'
            f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
        )
    return f'<div class="plots">{boxes}</div>'


def _categories(report: Report) -> str:
    columns = (
        Row("block_efficiency", "block efficiency", 2),
        Row("acceptance_rate", "acceptance rate", 3),
        Row("alpha", "alpha", 3),
        Row("greedy_agreement", "greedy agreement", 3),
        Row("speedup", "speed-up", 2, "×"),
        Row("identical_to_target", "identical", 0),
    )
    main, tables = find(report, "drafter") or ordered(report)[0], ""
    for run in ordered(report):
        shown = [row for row in columns if run[row.key] is not None]
        body = [
            [
                escape(name),
                str(sum(prompt["category"] == name for prompt in run["prompts"])),
                *(_cell(cell(f, row)) for row in shown),
            ]
            for name, f in run["categories"].items()
        ]
        heads = ["category", "prompts", *(escape(row.title) for row in shown)]
        unfolded = " open" if run is main else ""
        tables += f"<details{unfolded}><summary>{escape(title(run))}</summary>{_table(heads, body)}</details>"
    return tables


def _prompts(run: Run) -> str:
    def rate(over: Any, under: Any, decimals: int, unit: str = "") -> str:
        return number(over / under if over is not None and under else None, decimals, unit)

    body = []
    for p in run["prompts"]:
        same = (
            MISSING
            if p["identical"] is None
            else ("yes" if p["identical"] else f"no, from token {_text(p['first_mismatch'])}")
        )
        body.append(
            [
                escape(str(p["question_id"])),
                escape(p["category"]),
                number(p["emitted"], 0),
                rate(p["emitted"], p["target_calls"], 2),
                rate(p["accepted"], p["drafted"], 3),
                rate(p["alpha_sum"], p["alpha_positions"], 3),
                rate(p["plain_seconds"], p["seconds"], 2, "×"),
                escape(same),
            ]
        )
    heads = ["prompt", "category", "emitted", "τ", "acceptance rate", "alpha", "speed-up", "identical"]
    table = _table(heads, body, "prompts")
    return f"<details><summary>{escape(title(run))}: {len(body)} prompts</summary>{table}</details>"


def _reproduce(report: Report) -> str:
    environment = dict(report["environment"])
    command = environment.pop("command", None)
    shown = f"<pre>{escape(_text(command))}</pre>" if command else "<p>The command was not recorded.</p>"
    tables = ""
    for heading, values in (("Settings", report["settings"]), ("Environment", environment)):
        body = [[escape(str(key)), escape(_text(value))] for key, value in values.items()]
        if body:
            tables += f"<div><h3>{heading}</h3>{_table(['', ''], body, 'facts')}</div>"
    note = '<p class="note">Everything on this page comes from report.json beside it.</p>'
    return f'{shown}<div class="columns">{tables}</div>{note}'


def _definitions() -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in DEFINITIONS) + "</dl>"


def _text(value: Any) -> str:
    """Any JSON value as a line of text."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(_text(item) for item in value)
    return MISSING if value is None else str(value)
