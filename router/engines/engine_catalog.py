"""The supported engines and P/D dialects by name.

To add one, write one class and add one line here. Nothing registers itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from router.engines.adapter import EngineAdapter
from router.engines.handoff.bootstrap import Bootstrap
from router.engines.handoff.dialect import Dialect
from router.engines.handoff.trtllm_handoff import TrtllmHandoff
from router.engines.handoff.vllm_connectors import Mooncake, Nixl, P2p, SharedStore
from router.engines.llamacpp import LlamaCpp
from router.engines.providers import HostedEngine
from router.engines.sglang import Sglang
from router.engines.trtllm import Trtllm
from router.engines.vllm import Vllm
from router.prompt.apis.conversion import Conversion
from router.prompt.pictures.picture_reader import PictureIdentities
from router.types import Endpoint, FleetSnapshot

HOSTED = "hosted"
"""The engine of a provider."""
ENGINES: Mapping[str, EngineAdapter] = {
    "vllm": Vllm(),
    "sglang": Sglang(),
    "trtllm": Trtllm(),
    "llamacpp": LlamaCpp(),
}

ANSWERING: Mapping[str, EngineAdapter] = {**ENGINES, HOSTED: HostedEngine()}
"""Those of all that answers requests: of providers, too."""

OWNERS: Mapping[str, str] = {owner: name for name, engine in ENGINES.items() for owner in engine.owners}
"""Engines by what they name as the owner of their models in /v1/models."""
CHART_NAMES: Mapping[str, str] = {
    each: name for name, engine in ENGINES.items() for each in (name, *engine.chart_names)
}
"""Engines by their names in labels and annotations of charts."""
IMAGES: Mapping[str, str] = {part: name for name, engine in ENGINES.items() for part in engine.image_names}
"""Engines by a part of the name of their image."""


Readings: TypeAlias = Sequence[tuple[str, type[Conversion] | None]]
"""How each front end makes a chat of a body; None where it reads it as vLLM does, or not at all."""
ONE_READING: Readings = (("", None),)


@lru_cache(maxsize=64)
def readings_of(fleet: FleetSnapshot, model: str, endpoint: Endpoint) -> Readings:
    """How the pods that serve a model make a chat of a body: once for front ends that do it alike. `ONE_READING` if
    there is no pod, if the engine has no such endpoint, or if the engines differ."""
    front_ends = sorted(_front_ends(fleet, model))
    if len({engine for engine, _ in front_ends}) != 1:
        return ONE_READING
    found = {name: ENGINES[engine].conversions_of(name).get(endpoint) for engine, name in front_ends}
    if endpoint.api.is_converted:  # other pods are not matched
        return next(((pair,) for pair in found.items() if pair[1]), ONE_READING)
    return tuple(found.items()) if len(set(found.values())) > 1 else tuple(found.items())[:1]


@lru_cache(maxsize=64)
def accepts_salt(fleet: FleetSnapshot, model: str, endpoint: Endpoint) -> bool:
    """Whether all pods that serve a model accept `cache_salt` in a body."""
    return all(endpoint in ENGINES[engine].salted for engine, _ in _front_ends(fleet, model))


@lru_cache(maxsize=64)
def picture_identities(fleet: FleetSnapshot, model: str, *, proven: bool = True) -> PictureIdentities | None:
    """How the pods that serve a model identify pictures. None if there is no pod, if the engine's way is unknown, or if
    the pods differ. `proven`: by the pods that passed their test alone."""
    pods = [status.pod for status in fleet.pods if status.pod.serves(model)]
    ways = {(pod.engine, pod.weights) for pod in pods if pod.reads_pictures or not proven}
    engine, weights = ways.pop() if len(ways) == 1 else ("", "")
    identify = ENGINES[engine].identify_picture if weights else None
    return PictureIdentities(identify, weights) if identify else None


@lru_cache(maxsize=64)
def _front_ends(fleet: FleetSnapshot, model: str) -> tuple[tuple[str, str], ...]:
    """The engines of a model's pods, each with its front ends."""
    pods = [status.pod for status in fleet.pods if status.pod.serves(model)]
    return tuple({(pod.engine, pod.front_end): None for pod in pods})


DIALECTS: Mapping[str, Dialect] = {
    "nixl": Nixl(),
    "mooncake": Mooncake(),
    "bootstrap": Bootstrap(),
    "trtllm": TrtllmHandoff(),
    "shared_store": SharedStore(),
    "p2p": P2p(),
}

DEFAULT_HANDOFFS: Mapping[str, str] = {"vllm": "nixl", "sglang": "bootstrap", "trtllm": "trtllm"}
"""The dialect of a discovered prefill or decode pod, by engine."""

PULL_DIALECTS = tuple(name for name, dialect in DIALECTS.items() if type(dialect).pull_body is not Dialect.pull_body)
"""Dialects with a request to pull KV from a peer."""
