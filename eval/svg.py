"""Drawing for the HTML report: figures of one style, turned into inline SVG that takes its colours from the page.

matplotlib knows no CSS variables: it draws in stand-in colours, and each is replaced by its variable afterwards. So one
drawing serves light and dark. Text stays text.
"""

import io
import re
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, FAINT, CARD = "#010101", "#020202", "#030303"
SERIES = ("#040401", "#040402", "#040403", "#040404", "#040405", "#040406", "#040407")
VARIABLES = {INK: "var(--ink)", FAINT: "var(--line)", CARD: "var(--card)"}
VARIABLES |= {colour: f"var(--series-{i})" for i, colour in enumerate(SERIES)}
SIZE = (4.6, 3.1)  # inches at 100 px: what a phone shows unscaled

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names may hold a $
    "font.size": 9,
    "font.family": ["sans-serif"],
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}


def new_axes(xlabel: str, ylabel: str, height: float = SIZE[1]) -> tuple[Figure, Axes]:
    """An empty plot of the page's width; `height` in inches."""
    figure = Figure(figsize=(SIZE[0], height), dpi=100, layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def error_arms(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Lengths below and above for matplotlib's error bars; a percentile interval need not contain its figure."""
    return np.nan_to_num(np.clip([values - ends[:, 0], ends[:, 1] - values], 0, None))


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element in the page's colours and fonts, without metadata.

    The same figure and name give the same bytes; ids of figures with different names never clash within a page.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg
