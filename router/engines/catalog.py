"""Which engines can be spoken to?

A new one: one file with one class, one line here. Nothing registers itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.engines.adapter import EngineAdapter
from router.engines.llamacpp import LlamaCpp
from router.engines.sglang import Sglang
from router.engines.trtllm import Trtllm
from router.engines.vllm import Vllm

ENGINES: Mapping[str, EngineAdapter] = {
    "vllm": Vllm(),
    "sglang": Sglang(),
    "trtllm": Trtllm(),
    "llamacpp": LlamaCpp(),
}
