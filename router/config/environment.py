"""Replaces `${NAME}` and `${NAME:-default}` in the values of a configuration with environment variables.

`$${` is a literal `${`. Keys are never replaced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from router.config.mistakes import FromEnvironment, Location

_REFERENCE = re.compile(r"\$\$\{|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})?")


def with_environment(data: Any, variables: Mapping[str, str]) -> tuple[Any, list[tuple[Location, str]]]:
    """The data with the values of the variables, and what is wrong at which place."""
    mistakes: list[tuple[Location, str]] = []

    def replaced(node: Any, keys: Location) -> Any:
        if isinstance(node, dict):
            return {key: replaced(value, (*keys, key)) for key, value in node.items()}
        if isinstance(node, list):
            return [replaced(value, (*keys, number)) for number, value in enumerate(node)]
        if not isinstance(node, str) or "${" not in node:
            return node
        messages = {_mistake(found, variables): None for found in _REFERENCE.finditer(node)}
        mistakes.extend((keys, f"{'.'.join(map(str, keys))}: {message}") for message in messages if message)
        return FromEnvironment(_REFERENCE.sub(lambda found: _value(found, variables) or "", node))

    return replaced(data, ()), mistakes


def _value(found: re.Match[str], variables: Mapping[str, str]) -> str | None:
    """What replaces the reference; None if the variable has no value."""
    if found["name"] is None:
        return "${"
    value = variables.get(found["name"])
    return value if value or found["default"] is None else found["default"]


def _mistake(found: re.Match[str], variables: Mapping[str, str]) -> str:
    if found[0] == "${":
        return "`${` must be followed by a name and `}`: write ${NAME} or ${NAME:-default}, or $${ for a literal ${"
    if _value(found, variables) is None:
        return f"environment variable {found['name']} is not set; set it, or write ${{{found['name']}:-default}}"
    return ""
