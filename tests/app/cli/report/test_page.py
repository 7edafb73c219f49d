"""Reports as pages, and their plots."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from headwater_server.cli.report.page import Code, Figure, PageSection, Paragraph, Part, Table, Warn, render_page
from headwater_server.cli.report.plots import Curve, cdf, line_chart

HOSTILE = "<script>alert('x')</script>&"


@pytest.fixture(scope="module")
def plots() -> list[str]:
    curves = [Curve(HOSTILE, [1, 2, 4], [3.0, 2.0, 1.0], [2, 1, 0.5], [4, 3, 1.5]), Curve("b", [1, 4], [1.0, 2.0])]
    return [
        line_chart(HOSTILE, "x", "y", curves, log_x=True),
        line_chart("empty", "x", "y", [Curve("none", [], [])]),
        line_chart("missing", "x", "y", [Curve("one", [1.0, 2.0], [float("nan"), 1.0])]),
        cdf("parts", "ms", [(HOSTILE, [0.1 * place for place in range(5000)]), ("none", [])], log_x=True),
    ]


@pytest.fixture(scope="module")
def page(plots: list[str]) -> str:
    parts: list[Part] = [
        Paragraph(HOSTILE),
        Warn(HOSTILE),
        Code(HOSTILE),
        Table([HOSTILE, "n"], [[HOSTILE, 1.5]], HOSTILE),
    ]
    figures = [Figure(svg, HOSTILE) for svg in plots]
    return render_page(
        HOSTILE, HOSTILE, [PageSection(HOSTILE, [*parts, *figures, Paragraph("after")]), PageSection("empty")]
    )


def test_text_is_escaped_wherever_it_stands(page: str) -> None:
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 12


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    for found in re.finditer(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page):
        assert found[1].startswith("#"), found[0]
    assert "@import" not in page


def test_ids_are_unique(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for name in re.findall(r'href="#([^"]+)"', page):
        assert name in ids


def test_plots_take_the_pages_colours(plots: list[str]) -> None:
    for svg in plots:
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg")
        assert root.get("role") == "img"
        assert root.get("aria-label")
        assert "#0102" not in svg
        assert "#0103" not in svg
        assert "var(--quiet)" in svg
        assert set(re.findall(r"var\(--([\w-]+)\)", svg)) <= {
            "ink",
            "quiet",
            "line",
            *(f"series-{n}" for n in range(1, 9)),
        }


def test_a_large_distribution_is_drawn_with_few_points() -> None:
    assert len(cdf("d", "x", [("a", list(range(1_000_000)))])) < 60_000


def test_a_flagged_row_is_marked() -> None:
    html = render_page("t", "l", [PageSection("s", [Table(["a"], [["x"], ["y"]], flagged=frozenset({1}))])])
    assert html.count('class="flagged"') == 1
