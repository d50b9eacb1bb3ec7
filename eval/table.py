"""The report on the terminal: a table with one column a run; plain aligned text where there is no terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .caveats import caveats
from .wording import MISSING, Report, cell, headline, number, ordered, rows, title


def print_report(report: Report, console: Console | None = None) -> None:
    """Print headline, table and caveats. Off a terminal nothing is coloured, boxed or wrapped."""
    console = console or Console()
    if not console.is_terminal:
        for line in plain_lines(report):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    sentences = headline(report)
    console.print(Text(sentences[0], style="bold"))
    for sentence in sentences[1:]:
        console.print(Text(sentence))
    console.print(summary_table(report))
    for caveat in caveats(report):
        console.print(Text(f"! {caveat}", style="yellow"))


def summary_table(report: Report) -> Table:
    """One row a figure, one column a run, intervals dimmed behind the figures."""
    table = Table(caption="95 % bootstrap intervals over prompts", caption_justify="left")
    table.add_column("")
    for run in ordered(report):
        table.add_column(Text(title(run)), justify="right", style="bold" if run["name"] == "drafter" else "")
    for name, cells in _lines(report):
        values = [Text.assemble(value, (f" {ends}" if ends else "", "dim not bold")) for value, ends in cells]
        table.add_row(Text(name), *values)
    return table


def plain_lines(report: Report) -> list[str]:
    """Headline, table and caveats as lines of text without escape codes."""
    columns = [["", *(name for name, _ in _lines(report))]]
    for index, run in enumerate(ordered(report)):
        columns.append([title(run), *(" ".join(cells[index]).rstrip() for _, cells in _lines(report))])
    widths = [max(map(len, column)) for column in columns]
    table = [
        "  ".join(
            [line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in zip(*columns, strict=True)
    ]
    return [*headline(report), "", *table, "", *(f"! {caveat}" for caveat in caveats(report))]


def _lines(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """The table's rows: a name, then (figure, interval) for every run; conditional acceptance follows as a row a
    position."""
    runs = ordered(report)
    lines = [(row.title, [cell(run, row) for run in runs]) for row in rows(report)]
    depth = max((len(run["conditional_acceptance"] or []) for run in runs), default=0)
    for i in range(min(depth, 8)):
        lines.append((f"draft token {i + 1} accepted, given {i or 'its start'}", [_position(run, i) for run in runs]))
    return lines


def _position(run, i: int) -> tuple[str, str]:
    rates, ends = run["conditional_acceptance"] or [], run["conditional_acceptance_ci"] or []
    if i >= len(rates):
        return MISSING, ""
    return number(rates[i]), "" if ends[i] is None else f"[{ends[i][0]:.3f}, {ends[i][1]:.3f}]"
