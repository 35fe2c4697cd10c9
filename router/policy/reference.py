"""What a key of a policy file is for, and its unit, from the code: a term's docstring and the names of its fields."""

from __future__ import annotations

import inspect
import sys

from pydantic import BaseModel

UNITS = {
    "ms": "ms", "s": "s", "tokens": "tokens", "blocks": "blocks", "bytes": "bytes", "percent": "%",
    "shortlist": "pods", "attempts": "candidates", "layers": "layers", "requests": "requests",
}  # fmt: skip
"""By the last word of a field's name."""


def unit_of(key: str) -> str:
    """The unit of a field by its name, or by the name of its mapping; "" for plain numbers and text."""
    above, _, field = key.rpartition(".")
    return UNITS.get(field.rpartition("_")[2]) or (unit_of(above) if above else "")


def purpose_of(kind: type[BaseModel]) -> str:
    """What a filter, term or picker is for: its question or that of its module, or else its first sentence."""
    for described in (kind, sys.modules[kind.__module__]):
        question = (inspect.getdoc(described) or "").partition("\n")[0]
        if question.endswith("?"):
            return question
    text = " ".join((inspect.getdoc(kind) or "").split())
    return text.partition(". ")[0].removesuffix(".") + "."
