"""Hosts of a pod's other ports."""

from __future__ import annotations

from router.engines.handoff.address import host, host_before_port
from tests.engines.handoff.pairs import pod


def test_an_ipv6_host_has_brackets_only_in_front_of_a_port() -> None:
    """A name or an IPv4 address has none."""
    assert (host(pod("http://[fd00::3]:8000")), host_before_port(pod("http://[fd00::3]:8000"))) == (
        "fd00::3",
        "[fd00::3]",
    )
    assert (host(pod("http://p-0:8000")), host_before_port(pod("http://p-0:8000"))) == ("p-0", "p-0")
