"""A self-contained HTML page of sections, light or dark like the reader's system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import jinja2

__all__ = ["Code", "Figure", "PageSection", "Paragraph", "Part", "Table", "Warn", "render_page"]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    text: str
    template: ClassVar = "paragraph"


class Warn(Paragraph):
    """A warning, which must not be missed."""

    template = "warn"


class Code(Paragraph):
    """Preformatted text, such as a command line or YAML."""

    template = "code"


@dataclass(frozen=True)
class Table:
    """Rows under a head row. Cells of type str are aligned to the left, numbers to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | int | float]]
    caption: str = ""
    flagged: frozenset[int] = frozenset()
    """Indices of the rows that are shown in red."""
    template: ClassVar = "table"


@dataclass(frozen=True)
class Figure:
    """A drawing with a caption."""

    svg: str
    """From `headwater_server.cli.report.plots`; inserted without escaping."""
    caption: str = ""
    template: ClassVar = "figure"


Part = Paragraph | Table | Figure


@dataclass(frozen=True)
class PageSection:
    """Parts under a title."""

    title: str
    parts: Sequence[Part] = ()


def render_page(title: str, lead: str, sections: Sequence[PageSection]) -> str:
    """The page's HTML. All text is escaped.

    Args:
        title: the page's title.
        lead: a sentence or two below the title.
        sections: the rest of the page.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_PAGE).render(title=title, lead=lead, sections=sections)


# The colours and variables are copied from app/headwater_server/gateway/static/style.css, which a self-contained page
# can't load.
_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root {
  color-scheme: light dark;
  --paper: #fbfaf7; --raised: #ffffff; --ink: #1c2427; --quiet: #586469; --line: #dcdcd5;
  --bad: #b3261e; --series-1: #0b6570; --series-2: #b4590b; --series-3: #6a4c93; --series-4: #2c7a43;
  --series-5: #a8325e; --series-6: #3b5ba5; --series-7: #7d6608; --series-8: #586469;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12181a; --raised: #192123; --ink: #dde5e5; --quiet: #97a5a8; --line: #2d383b;
    --bad: #f28b82; --series-1: #62c4cb; --series-2: #eba25c; --series-3: #b79ae0; --series-4: #74c58a;
    --series-5: #ec8fb3; --series-6: #8fb0f0; --series-7: #d6c25a; --series-8: #97a5a8;
  }
}
body {
  margin: 0 auto; padding: 1rem clamp(.75rem, 3vw, 2rem) 4rem; max-width: 70rem;
  background: var(--paper); color: var(--ink); font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
  font: 15px/1.5 ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
h1 { font-size: 1.6rem; margin: .6rem 0 .35rem; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
.lead, figcaption, caption { color: var(--quiet); }
.scroll { overflow-x: auto; margin: 0 0 1rem; }
table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; padding: .2rem 0; font-size: .85rem; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--quiet); font-weight: 550; white-space: nowrap; }
td { overflow-wrap: normal; }
.number { text-align: right; }
.number, .short { white-space: nowrap; }
.flagged td { color: var(--bad); }
.warn { border-left: 4px solid var(--bad); color: var(--bad); padding: .3rem .8rem; background: var(--raised); }
pre {
  background: var(--raised); border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem; overflow-x: auto;
}
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--raised); border: 1px solid var(--line); border-radius: 8px; padding: .6rem; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { font-size: .85rem; padding: .3rem .3rem 0; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="lead">{{ lead }}</p>
{% for section in sections %}
<section>
<h2>{{ section.title }}</h2>
{% for part in section.parts %}
{% if part.template == "paragraph" %}
<p>{{ part.text }}</p>
{% elif part.template == "warn" %}
<p class="warn" role="alert">{{ part.text }}</p>
{% elif part.template == "code" %}
<pre><code>{{ part.text }}</code></pre>
{% elif part.template == "table" %}
<div class="scroll"><table>
{% if part.caption %}
<caption>{{ part.caption }}</caption>
{% endif %}
<thead><tr>
{% for cell in part.head %}
<th scope="col"{% if part.rows and part.rows[0][loop.index0] is not string %} class="number"{% endif %}>{{ cell }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in part.rows %}
<tr{% if loop.index0 in part.flagged %} class="flagged"{% endif %}>
{% for cell in row %}
<td class="{{ "number" if cell is not string else "short" if cell|length < 40 else "long" }}">{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table></div>
{% else %}
{% if loop.first or loop.previtem.template != "figure" %}
<div class="figures">
{% endif %}
<figure>{{ part.svg|safe }}<figcaption>{{ part.caption }}</figcaption></figure>
{% if loop.last or loop.nextitem.template != "figure" %}
</div>
{% endif %}
{% endif %}
{% endfor %}
</section>
{% endfor %}
</body>
</html>
"""
