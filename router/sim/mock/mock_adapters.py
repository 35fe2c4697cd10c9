"""The LoRA adapters of a mock engine, loaded and unloaded at run time as in vLLM."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from router.sim.mock.mock_requests import EngineError, decode_body


class MockAdapters:
    """Changes `names`, the adapters that the engine serves. Raises `EngineError`."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def load(self, body: bytes) -> bytes:
        fields = decode_body(body, dict[str, Any])
        name = fields.get("lora_name")
        if not name or not fields.get("lora_path"):
            raise EngineError("Both 'lora_name' and 'lora_path' must be provided.")
        if name in self._names and not fields.get("load_inplace"):
            raise EngineError(f"The lora adapter '{name}' has already been loaded.")
        self._names.add(name)
        return f"Success: LoRA adapter '{name}' added successfully.".encode()

    def unload(self, body: bytes) -> bytes:
        name = decode_body(body, dict[str, Any]).get("lora_name")
        if name not in self._names:
            raise EngineError(f"The lora adapter '{name}' cannot be found.", status=HTTPStatus.NOT_FOUND)
        self._names.discard(name)
        return f"Success: LoRA adapter '{name}' removed successfully.".encode()
