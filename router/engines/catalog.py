"""Which engines does the router know?

One explicit table. A new engine is one file with one class, and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.engines.adapter import EngineAdapter
from router.engines.llamacpp import LlamaCpp
from router.engines.sglang import Sglang
from router.engines.trtllm import TrtLlm
from router.engines.vllm import Vllm

ENGINES: Mapping[str, EngineAdapter] = {adapter.name: adapter for adapter in (Vllm(), Sglang(), TrtLlm(), LlamaCpp())}
