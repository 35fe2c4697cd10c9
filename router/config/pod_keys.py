"""Reads the keys that the router presents to pods, each from an environment variable, or from a
file that may change while the router runs.

A key is never logged, shown or part of an error.
"""

from __future__ import annotations

import os
import re
import time
from functools import cache, partial
from math import inf

from router.config.load import read_named
from router.config.mistakes import is_file_name, unshown
from router.config.watched_file import watched
from router.errors import ConfigError

CHECK_INTERVAL_S = 1.0
"""A changed file is read again after this time at most."""

_KEY = re.compile(r"[!-~]{1,8192}")


def read_key(path: str, name: str = "auth.bearer_file") -> str:
    """The key in the file, without white space around it. `name`: of the key that names the file. Raises
    `ConfigError`."""
    try:
        key = read_named(name, path).decode("ascii").strip()
    except ValueError:  # its message quotes the file
        raise ConfigError(f"{name}: {path} is not ASCII text") from None
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{name}: {path} must contain one key of 1 to 8192 characters, without spaces")
    return key


class PodKeyFile:
    """The current key of one file. If the file becomes unreadable, the last key stays in use."""

    def __init__(self, path: str) -> None:
        event = "key for pods not readable; the last one stays in use"
        self._file = watched(partial(read_key, path), path, event=event, first="")
        self._key = ""
        self._checked_at_s = -inf

    def key(self, now_s: float) -> str:
        """The key; empty if the file was never readable."""
        if now_s - self._checked_at_s >= CHECK_INTERVAL_S:
            self._checked_at_s = now_s
            self._key = self._file.current()
        return self._key


_file = cache(PodKeyFile)


def read_key_variable(name: str) -> str:
    """The key in the environment variable. Raises `ConfigError`."""
    key = os.environ.get(name, "").strip()
    if not key:
        step = "a file is named by bearer_file" if is_file_name(name) else "name one with the pod's API key"
        raise ConfigError(f"auth.bearer_env: this environment variable is not set ({unshown(name)}); {step}")
    if not _KEY.fullmatch(key):
        raise ConfigError(f"auth.bearer_env: the environment variable {name} must hold one key, without spaces")
    return key


def key_headers(path: str, variable: str = "") -> dict[str, str]:
    """The headers that authorize requests to a pod with this `bearer_file` or `bearer_env`; none if both are empty."""
    if variable:
        return {"authorization": f"Bearer {os.environ.get(variable, '').strip()}"}
    key = file_key(path) if path else ""
    return {"authorization": f"Bearer {key}"} if key else {}


def file_key(path: str) -> str:
    """The current key of the file; empty if it was never readable."""
    return _file(path).key(time.monotonic())
