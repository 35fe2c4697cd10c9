"""Reports are self-contained pages, and plots show the given values."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from loadtest.html_page import (
    PlotAxes,
    PlotsUnavailable,
    Section,
    Series,
    bars,
    cdf,
    dots,
    lines,
    page,
    paragraph,
    table,
    warning,
)

TEXT = "<script>alert('x')</script> & more"


class Tags(HTMLParser):
    """All tags of a document, in order; asserts that they are closed."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def whole() -> str:
    return page(TEXT, [Section(TEXT, [paragraph(TEXT), warning(TEXT), table([TEXT, "p50"], [[TEXT, "1"]])])])


def test_text_is_escaped_everywhere() -> None:
    """Policy names, errors and titles come from files and from the network."""
    tags = Tags(whole())
    assert "script" not in tags.seen
    assert whole().count("&lt;script&gt;") == 7
    assert tags.open == []


def test_a_page_is_self_contained() -> None:
    """It loads nothing from the network."""
    assert not re.search(r"""(src|href)=|@import|url\(""", whole())


AXES = PlotAxes(title="TTFT <p99> & more", x="rate", y="ms", caption="one run")
ONE = Series("cost_aware", [1.0, 2.0], [10.0, 20.0])


def svg_of(figure: str) -> str:
    """The SVG element of a figure."""
    found = re.search(r"<svg.*</svg>", figure, re.DOTALL)
    assert found
    return found.group()


@pytest.mark.parametrize(
    "figure",
    [
        lines(AXES, [ONE]),
        dots(AXES, [ONE]),
        cdf(AXES, {"cost_aware": [1.0, 2.0]}),
        bars(AXES, ["chat", "rag"], {"cost_aware": [0.5, 0.7]}),
    ],
)
def test_a_figure_is_well_formed_and_labelled(figure: str) -> None:
    """Title and caption are escaped text; the SVG parses, names its series and its axes."""
    assert "<strong>TTFT &lt;p99&gt; &amp; more</strong> one run" in figure
    drawn = "".join(ElementTree.fromstring(svg_of(figure)).itertext())
    assert {"cost_aware", "rate", "ms"} <= set(drawn.split())


def test_the_same_values_give_the_same_bytes() -> None:
    """A committed report changes only with its figures."""
    assert lines(AXES, [ONE]) == lines(AXES, [ONE])
    assert lines(AXES, [ONE]) != lines(AXES, [Series("cost_aware", [1.0, 2.0], [10.0, 30.0])])


def test_without_matplotlib_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotsUnavailable, match=r"pip install matplotlib"):
        lines(AXES, [ONE])
