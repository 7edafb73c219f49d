"""Plots as SVG in the colours of `headwater_server.cli.report.page`, light or dark.

Needs the extra ``reports``: matplotlib.
"""

from __future__ import annotations

import html
import importlib.util
import io
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from headwater.environment import install_command
from headwater_server.errors import CommandError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Curve", "cdf", "check_plots", "line_chart"]

WIDTH_IN: Final = 5.6
HEIGHT_IN: Final = 3.4
MOST_POINTS: Final = 400
"""Maximum number of points of a curve. More points would not be visible, and would make the page large."""
SERIES: Final = 8
"""Number of colours. Further curves repeat them, dashed."""
# Placeholders for the page's CSS variables, which an SVG within the page can use.
_INK: Final = "#010203"
_QUIET: Final = "#010204"
_LINE: Final = "#010205"
_SERIES_COLOURS: Final = tuple(f"#0103{place + 1:02x}" for place in range(SERIES))
_VARIABLES: Final = {_INK: "var(--ink)", _QUIET: "var(--quiet)", _LINE: "var(--line)"} | {
    colour: f"var(--series-{place + 1})" for place, colour in enumerate(_SERIES_COLOURS)
}
_STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _QUIET,
    "axes.edgecolor": _LINE,
    "axes.titlesize": 11,
    "axes.titlecolor": _INK,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _QUIET,
    "ytick.labelcolor": _QUIET,
    "grid.color": _LINE,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Curve:
    """A line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    """Values; NaN for a point without a value."""
    low: Sequence[float] | None = None
    """The minimum at each point if points were measured several times; None: the same as ``y``."""
    high: Sequence[float] | None = None
    """The maximum at each point; None: the same as ``y``."""
    dashed: bool = False
    """Whether the line is dashed, as for predicted values."""


def check_plots() -> None:
    """Check that plots can be drawn, before a long measurement.

    Raises:
        CommandError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        install = install_command("reports", "matplotlib")
        raise CommandError(f"--html: matplotlib, which draws the plots, is not installed: {install}")


def line_chart(title: str, x_label: str, y_label: str, curves: Sequence[Curve], *, log_x: bool = False) -> str:
    """A chart of lines as SVG. Each point has a mark, and a bar from its minimum to its maximum; the y axis begins at
    0."""

    def draw(axes: Axes) -> None:
        for place, curve in enumerate(curves):
            low, high = curve.low or curve.y, curve.high or curve.y
            points = np.array([curve.x, curve.y, np.subtract(curve.y, low), np.subtract(high, curve.y)], float)
            points = points[:, np.isfinite(points[1])]
            if not points.size:
                continue
            axes.errorbar(
                points[0], points[1], yerr=points[2:].clip(0), label=curve.label, color=_SERIES_COLOURS[place % SERIES],
                marker="o", markersize=4, linewidth=1.6, elinewidth=1, capsize=3,
                linestyle="--" if curve.dashed or place >= SERIES else "-",
            )  # fmt: skip
        values = sorted({x for curve in curves for x in curve.x})
        if log_x:
            axes.set_xscale("log", base=2)
        if log_x and len(values) <= 12:
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.minorticks_off()
        axes.set_ylim(bottom=0)

    return _svg(title, x_label, y_label, draw, len(curves))


def cdf(title: str, x_label: str, samples: Sequence[tuple[str, Sequence[float]]], *, log_x: bool = False) -> str:
    """A chart of cumulative distributions as SVG, with a line for each set of values."""

    def draw(axes: Axes) -> None:
        for place, (label, values) in enumerate(samples):
            if len(values):
                axes.plot(
                    *_steps(values), label=label, color=_SERIES_COLOURS[place % SERIES], linewidth=1.6,
                    linestyle="--" if place >= SERIES else "-",
                )  # fmt: skip
        axes.set_ylim(0, 1.02)
        if log_x:
            axes.set_xscale("log")

    return _svg(title, x_label, "part of all", draw, len(samples))


def _steps(values: Sequence[float]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Points of a cumulative distribution, thinned out to about `MOST_POINTS`, but with all of the 20 largest
    values."""
    count = len(values)
    places = np.union1d(np.arange(0, count, max(1, count // MOST_POINTS)), np.arange(max(0, count - 20), count))
    return np.sort(values)[places], (places + 1) / count


def _svg(title: str, x_label: str, y_label: str, draw: Callable[[Axes], None], labels: int) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    # Unique ids, since a page has several figures.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": f"{next(_numbers)}"}):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_axisbelow(True)
        draw(axes)
        if labels > 1 and axes.get_legend_handles_labels()[0]:
            axes.legend()
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]  # no XML declaration within HTML
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Use the page's font, and drop ids that are the same in all figures.
    svg = re.sub(r"font: ([0-9.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"""font-family: [^;"]*;?""", "", svg)
    svg = re.sub(r' id="(?:figure|axes|patch|matplotlib|xtick|ytick|line2d|text|legend|LineCollection)[\w.]*"', "", svg)
    return re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match[0]], svg)
