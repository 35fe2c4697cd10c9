"""How many connections may this process hold?

Each stream is two sockets, one to its client and one to its pod, and the soft limit of open files that shells and
service managers hand out is often 1,024. This file never asks for more than the hard limit.
"""

from __future__ import annotations

import resource


def allow_all_open_files() -> int:
    """Raise the soft limit of open files to the hard one, which is returned."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
