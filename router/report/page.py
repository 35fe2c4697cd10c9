"""What does a report look like?

One HTML file that needs nothing else: headings, tables, plots, light or dark as the reader's system is. Everything that
is passed as text is escaped; what is passed as HTML comes from here or from `plots`. This file never computes a figure.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --ground: #ffffff; --faint: #d5dae0; --warn: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --ground: #14171a; --faint: #3a4149; --warn: #ff8a80; }
}
body { color: var(--ink); background: var(--ground); font: 15px/1.5 system-ui, sans-serif;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--faint); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.6rem 0; } figure svg { max-width: 100%; height: auto; }
figcaption { max-width: 46rem; }
.warning { border-left: 4px solid var(--warn); padding: .1rem .9rem; }
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the HTML blocks below it."""

    heading: str
    blocks: Sequence[str]


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole document."""
    told = html.escape(title)
    body = "\n".join(f"<h2>{html.escape(s.heading)}</h2>\n" + "\n".join(s.blocks) for s in sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{told}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{told}</h1>\n{body}\n</body>\n</html>\n"
    )


def paragraph(text: str) -> str:
    """Plain text."""
    return f"<p>{html.escape(text)}</p>"


def warning(text: str) -> str:
    """Text that must not be overlooked."""
    return f'<div class="warning"><p>{html.escape(text)}</p></div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells of plain text; the first column names the row."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
