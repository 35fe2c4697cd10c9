"""At which host do a pod's other ports answer?

At the host of its URL. This file never resolves a name.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from router.types import Pod


def host(pod: Pod) -> str:
    """As a field of its own: an IPv6 address without brackets."""
    return urlsplit(pod.url).hostname or ""


def host_before_port(pod: Pod) -> str:
    """As it stands in front of a port: an IPv6 address in brackets."""
    name = host(pod)
    return f"[{name}]" if ":" in name else name
