"""Hooks of `mkdocs`: the site also has the files outside `docs/` that a page links to, directly or by others.

In the repository, links are relative paths, which GitHub follows. On the site, such a file is at `repository/PATH`:
pages in Markdown as pages, others as they are.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = "repository"
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
FENCED = re.compile(r"^([ \t]*)```[^\n]*\n.*?^\1```[ \t]*$", re.DOTALL | re.MULTILINE)
EMPTY_HEAD = re.compile(r"<thead>\s*<tr>(?:\s*<th[^>]*></th>)+\s*</tr>\s*</thead>")
EMPTY_HEADING = re.compile(r"<th[^>]*></th>")
SEARCH = 'data-md-component="search" aria-label="Search"'
BOOSTS = (
    ("questions", 6),
    ("reference/", 2),
    ("README", 1),
    *((f"{OUTSIDE}/{folder}", 0.1) for folder in ("router/", "loadtest/", "tests/", "CHANGELOG", "CONTRIBUTING")),
    *((internal, 0.5) for internal in ("apis", "architecture", "cost-model", "engines", "handoff", "simulator")),
    (OUTSIDE, 1),
)
"""What counts more in the search: pages for users, and short answers most of all. The first prefix that matches."""
TOUR = re.compile(r"^\s*<!-- tour: .*? -->\n", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to."""
    waiting = [_path(file.src_uri) for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        for target in _targets(path):
            if target in seen or not (ROOT / target).is_file():
                continue
            seen.add(target)
            if not target.startswith("docs/"):
                files.append(_added(target, config))
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Point links of the repository to the site, and drop what a reader of the site does not see."""
    source = _path(page.file.src_uri)
    page.meta["search"] = {
        "boost": next((boost for prefix, boost in BOOSTS if page.file.src_uri.startswith(prefix)), 3)
    }
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        target = _target(source, link[2])
        uri = _uri(target)
        if files.get_file_from_path(uri) is None:
            return link[0]
        return f"{link[1]}{os.path.relpath(uri, folder or '.')}{link[3]}"

    return LINK.sub(replaced, TOUR.sub("", markdown))


def on_page_content(html: str, **_: object) -> str:
    """Tables without headings, which Markdown cannot write, have no row of headings."""
    return EMPTY_HEADING.sub("<td></td>", EMPTY_HEAD.sub("", html))


def on_post_page(output: str, **_: object) -> str:
    """Name the dialog of the search for screen readers."""
    return output.replace('data-md-component="search" role="dialog"', f'{SEARCH} role="dialog"')


def _added(path: str, config: MkDocsConfig) -> File:
    return File.generated(config, _uri(path), abs_src_path=str(ROOT / path), inclusion=InclusionLevel.INCLUDED)


def _targets(path: str) -> Iterator[str]:
    text = FENCED.sub("", (ROOT / path).read_text(encoding="utf-8"))
    for link in LINK.finditer(text):
        yield _target(path, link[2])


def _target(source: str, link: str) -> str:
    """The path in the repository to which a link of a page leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _path(uri: str) -> str:
    """The path in the repository of a file of the site."""
    return uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(f"{OUTSIDE}/") else f"docs/{uri}"


def _uri(path: str) -> str:
    """The inverse of `_path`."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"
