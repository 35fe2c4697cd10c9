"""Finds a private folder for the sockets of the workers.

A path of a Unix socket has at most 107 bytes, and not every folder is writable or on a file system with sockets, so
each candidate is tried with a socket.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

from router.errors import ConfigError

LONGEST_NAME = "9999"
"""A worker's socket is named by its number."""
MAX_SHOWN = 60


def private_folder(candidates: Sequence[str] | None = None) -> Path:
    """A new folder that only this user can enter, in the first usable of `$TMPDIR`, /tmp and /dev/shm. Raises
    `ConfigError`."""
    reasons = []
    for parent in dict.fromkeys(candidates or (os.environ.get("TMPDIR") or "/tmp", "/tmp", "/dev/shm")):
        try:
            return _folder_with_sockets(parent)
        except (OSError, ValueError) as error:
            shown = parent if len(parent) <= MAX_SHOWN else f"{parent[:MAX_SHOWN]}..."
            reasons.append(f"{shown}: {getattr(error, 'strerror', None) or error}")
    raise ConfigError(
        f"listen.workers: several workers need a writable folder for their sockets ({'; '.join(reasons)}); set TMPDIR "
        "to a folder with a short path, or use one worker"
    )


def _folder_with_sockets(parent: str) -> Path:
    """Raises `OSError`, or `ValueError` for a path with a NUL."""
    folder = Path(mkdtemp(prefix="warmroute-", dir=parent))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.bind(str(folder / LONGEST_NAME))
        (folder / LONGEST_NAME).unlink()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
