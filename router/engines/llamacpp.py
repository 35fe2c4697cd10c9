"""How does the llama.cpp server speak? (reference/protocols.md section 4.7)

No KV events; its cache is one prompt a slot, found again by longest common prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from router.engines.adapter import EngineAdapter


class LlamaCpp(EngineAdapter):
    """llama-server."""

    name: ClassVar[str] = "llamacpp"
    running_names = ("llamacpp:requests_processing",)
    waiting_names = ("llamacpp:requests_deferred",)

    def tokenize_request(self, model: str, prompt: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Text only: its /tokenize does not take messages."""
        text = prompt.get("prompt")
        return ("/tokenize", {"content": text, "add_special": True}) if isinstance(text, str) else None
