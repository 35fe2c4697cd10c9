"""A link is a named class or has its own figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config.load import load
from router.config.models import LinkClasses, build_links, load_link_classes
from router.config.schema import LinkFigures, LinksConfig
from router.errors import ConfigError
from router.types import Link, Links


@pytest.mark.parametrize(
    ("name", "t0_ms", "bytes_per_ms"),
    [
        ("rdma_8x200", 0.37, 137e6),
        ("rdma_100", 0.4, 12.1e6),
        ("rdma_400", 0.4, 49.5e6),
        ("tcp_100", 1.0, 4.7e6),
        ("nvlink_h100", 0.1, 450e6),
        ("object_store", 75.0, 2e6),
    ],
)
def test_a_named_class_has_the_figures_of_the_cost_model(name: str, t0_ms: float, bytes_per_ms: float) -> None:
    """It is calibrated under its name."""
    links = build_links(LinksConfig(elsewhere=name), load_link_classes())
    found = links.elsewhere
    assert found and (found.t0_ms, found.kind) == (t0_ms, name)
    assert found.bytes_per_ms == pytest.approx(bytes_per_ms)


def test_the_rdma_figures_reproduce_measured_handoffs() -> None:
    """4.5 GB in 31.65 ms and 20 MB in 0.54 ms."""
    link = load_link_classes()["rdma_8x200"].link("")
    assert link.transfer_ms(4.5e9) == pytest.approx(31.65, rel=0.07)
    assert link.transfer_ms(20e6) == pytest.approx(0.54, rel=0.07)


def test_every_class_states_the_source_of_its_figures() -> None:
    """Measured, nominal or assumed."""
    for name, each in load_link_classes().items():
        assert each.source.startswith(("measured, ", "nominal, ", "assumed")), name


def test_by_default_pods_have_no_links_to_each_other() -> None:
    """Only to their own tiers and stores."""
    links = build_links(LinksConfig(), load_link_classes())
    assert (links.same_host, links.same_rack, links.same_zone, links.elsewhere) == (None, None, None, None)
    kinds = [link.kind if link else "" for link in (links.cpu, links.disk, links.remote)]
    assert kinds == ["pcie4", "nvme", "rdma_100"]


def test_figures_are_calibrated_under_the_name_of_their_place() -> None:
    """Two places with different figures are calibrated apart."""
    config = LinksConfig(
        same_host=LinkFigures(t0_ms=0.2, gb_per_s=100),
        elsewhere=LinkFigures(t0_ms=1, gb_per_s=2),
        cpu=None,
        disk=None,
        remote=None,
    )
    expected = Links(same_host=Link(0.2, 100e6, "same_host"), elsewhere=Link(1.0, 2e6, "elsewhere"))
    assert build_links(config, {}) == expected


def test_an_unknown_class_is_refused_with_the_known_ones() -> None:
    """And with the key."""
    with pytest.raises(ConfigError, match=r"links\.same_rack: unknown link class 'rdma'; did you mean .*rdma_100"):
        build_links(LinksConfig(same_rack="rdma"), load_link_classes())


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("x: {t0_ms: 1, gb_per_s: 1}", r"links\.yaml:2: classes\.x\.source: is required"),
        ("x: {t0_ms: 1, gb_per_s: 0, source: s}", r"links\.yaml:2: classes\.x\.gb_per_s: .*greater than 0"),
        (
            "x: {gb_per_ss: 1, t0_ms: 1, gb_per_s: 1, source: s}",
            r"classes\.x\.gb_per_ss: unknown key; did you mean 'gb_per_s'",
        ),
    ],
)
def test_a_mistake_in_a_class_names_its_line(tmp_path: Path, line: str, what: str) -> None:
    """As in every other file."""
    file = tmp_path / "links.yaml"
    file.write_text(f"classes:\n  {line}\n")
    with pytest.raises(ConfigError, match=what):
        load(file, LinkClasses)
