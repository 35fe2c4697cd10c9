"""KV handoff protocols of the engines: which leg a request is, and which fields its response has.

One class per dialect (docs/handoff.md). Takes values and returns values; no
I/O, no waiting.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from loadtest.mock_engine.mock_config import HandoffConfig
from loadtest.mock_engine.mock_requests import EngineError, GenerationRequest
from loadtest.mock_engine.pinned_kv import PinnedKv
from router.addresses import join_address
from router.types import Role


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """A request whose KV is held under `key`."""

    key: str
    cut: Literal["length", "not_finished"] | None = None
    """Finish reason of a response that is cut after its first token; None: not cut."""
    awaits_delivery: bool = False
    """Respond only once a decode leg has the KV."""
    releases: DecodeLeg | None = None
    """Offered KV of another engine that is released first."""
    pulls: PeerLookup | None = None
    """The engine whose prefix is loaded first."""


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """A request whose KV the engine at `url` holds. `engine_id`, if given, must be the current epoch of that engine."""

    url: str
    key: str
    engine_id: str = ""


@dataclass(frozen=True, slots=True)
class PeerLookup:
    """A request that loads its cached prefix from the engine at `url`."""

    url: str


@dataclass(frozen=True, slots=True)
class StoreLookup:
    """A request that loads from the shared store and writes to it."""


HandoffLeg: TypeAlias = PrefillLeg | DecodeLeg | PeerLookup | StoreLookup | None


@dataclass(frozen=True, slots=True)
class LoadedKv:
    """Leading prompt tokens whose KV was loaded; `prefill_cached_tokens` were cached on the prefill engine."""

    tokens: int = 0
    prefill_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HandoffFields:
    """Response fields of a prefill leg: at the top of the body, and in the choice."""

    top: Mapping[str, Any] = field(default_factory=dict)
    choice: Mapping[str, Any] = field(default_factory=dict)


NO_HANDOFF_FIELDS = HandoffFields()


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Address of this engine for peers, in its current epoch."""

    host: str
    port: int
    engine_id: str

    @property
    def url(self) -> str:
        return f"http://{join_address(self.host, self.port)}"


class MockDialect:
    """No handoff; base of the dialects."""

    waits_for_prefill = True
    """A decode leg waits for its prefill leg; otherwise missing KV is an error."""
    recomputes = False
    """A failed load is recomputed; otherwise the request fails."""
    forbidden_fields: frozenset[str] = frozenset()
    """Fields of other dialects that are rejected with 400."""
    fields_without_kv = HandoffFields({"kv_transfer_params": None})
    """Response fields of a prefill leg whose KV is not held."""

    def leg(self, request: GenerationRequest, engine_request_id: str) -> HandoffLeg:
        """The leg that a request is, or None. Raises `EngineError`."""
        return None

    def holds_kv(self, finish_reason: str) -> bool:
        """Whether the KV of a prefill leg with this finish reason is held."""
        return True

    def fields(self, request: GenerationRequest, pinned: PinnedKv, address: PeerAddress) -> HandoffFields:
        """Response fields of a prefill leg whose KV is held."""
        return self.fields_without_kv

    def reported_cached_tokens(self, prompt_tokens: int, cached_tokens: int, loaded: LoadedKv) -> int:
        """Cached tokens in the usage of a decode leg that had `cached_tokens` in its own cache."""
        return max(cached_tokens, loaded.tokens)


class MockNixl(MockDialect):
    """vLLM's NixlConnector. The decode engine reads the prefill engine's memory at the address in its response. A real
    one would not notice if that is of another prompt by now, and answer with wrong text; this one fails."""

    waits_for_prefill = False

    def leg(self, request: GenerationRequest, engine_request_id: str) -> HandoffLeg:
        """Without a complete address the request is not a decode leg."""
        params = _transfer_params(request)
        names = ("remote_host", "remote_port", "remote_engine_id", "remote_request_id", "remote_block_ids")
        held = DecodeLeg(_url_of(params), str(params["remote_request_id"])) if all(map(params.get, names)) else None
        if params.get("do_remote_decode"):
            return PrefillLeg(engine_request_id, releases=held)
        return held if params.get("do_remote_prefill") else None

    def fields(self, request: GenerationRequest, pinned: PinnedKv, address: PeerAddress) -> HandoffFields:
        """All parameters of the decode leg, as in vLLM 0.32; of a decode leg, those of the next turn's prefill leg."""
        is_prefill = not _transfer_params(request).get("do_remote_prefill")
        params = {
            "do_remote_prefill": is_prefill,
            "do_remote_decode": not is_prefill,
            "remote_block_ids": [pinned.blocks],
            "remote_engine_id": address.engine_id,
            "remote_request_id": pinned.key,
            "remote_host": address.host,
            "remote_port": address.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": pinned.tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": pinned.cached_tokens,
        }
        return HandoffFields({"kv_transfer_params": params})

    def reported_cached_tokens(self, prompt_tokens: int, cached_tokens: int, loaded: LoadedKv) -> int:
        """Transferred tokens are not reported."""
        return cached_tokens


class MockMooncake(MockDialect):
    """vLLM's MooncakeConnector: both legs at once, joined by the router's `transfer_id`."""

    def leg(self, request: GenerationRequest, engine_request_id: str) -> HandoffLeg:
        """Without a complete address the request is not a decode leg."""
        params = _transfer_params(request)
        if params.get("do_remote_decode") and params.get("transfer_id"):
            return PrefillLeg(str(params["transfer_id"]))
        names = ("remote_bootstrap_addr", "remote_engine_id", "transfer_id")
        if params.get("do_remote_prefill") and all(params.get(name) for name in names):
            address, engine_id, transfer_id = (str(params[name]) for name in names)
            return DecodeLeg(address.rstrip("/"), transfer_id, engine_id)
        return None

    def holds_kv(self, finish_reason: str) -> bool:
        """True only for an output that ended at its length limit."""
        return finish_reason == "length"

    def reported_cached_tokens(self, prompt_tokens: int, cached_tokens: int, loaded: LoadedKv) -> int:
        """The whole prompt after a transfer."""
        return prompt_tokens if loaded.tokens else cached_tokens


class MockBootstrap(MockDialect):
    """SGLang: both legs at once with the same body; the pod's role selects the leg."""

    fields_without_kv = NO_HANDOFF_FIELDS

    def __init__(self, role: Role) -> None:
        self._role = role

    def leg(self, request: GenerationRequest, engine_request_id: str) -> HandoffLeg:
        """Raises `EngineError` for a request that is not a leg."""
        room = request.handoff.get("bootstrap_room")
        if room is None:
            raise EngineError("Disaggregated request received without bootstrap room id.")
        if self._role is Role.PREFILL:
            return PrefillLeg(str(room), cut="length", awaits_delivery=True)
        host, port = request.handoff.get("bootstrap_host"), request.handoff.get("bootstrap_port", 8998)
        return DecodeLeg(f"http://{join_address(str(host), port)}", str(room))

    def reported_cached_tokens(self, prompt_tokens: int, cached_tokens: int, loaded: LoadedKv) -> int:
        """The prefill engine's count, which is transferred with the KV."""
        return loaded.prefill_cached_tokens


class MockTrtllm(MockDialect):
    """TensorRT-LLM: the response of a prefill leg has an opaque state, its first token and the prompt's tokens."""

    waits_for_prefill = False
    forbidden_fields = frozenset({"kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"})
    fields_without_kv = NO_HANDOFF_FIELDS

    def leg(self, request: GenerationRequest, engine_request_id: str) -> HandoffLeg:
        """`context_only` returns the first token, `generation_only` all tokens including the first."""
        params = request.handoff.get("disaggregated_params") or {}
        if params.get("request_type") == "context_only":
            return PrefillLeg(engine_request_id, cut="length" if len(request.output.tokens) == 1 else "not_finished")
        if params.get("request_type") == "generation_only":
            return _decode_state(params.get("encoded_opaque_state"))
        return None

    def fields(self, request: GenerationRequest, pinned: PinnedKv, address: PeerAddress) -> HandoffFields:
        """The parameters are in the choice, the prompt's tokens at the top."""
        request_id = request.handoff["disaggregated_params"].get("disagg_request_id")
        state = msgspec.json.encode(DecodeLeg(address.url, pinned.key, address.engine_id))
        params = {
            "request_type": "context_only",
            "first_gen_tokens": request.output.tokens,
            "first_gen_log_probs": None,
            "ctx_request_id": request_id,
            "encoded_opaque_state": base64.b64encode(state).decode(),
            "draft_tokens": None,
            "disagg_request_id": request_id,
            "ctx_dp_rank": 0,
            "ctx_info_endpoint": address.url,
        }
        return HandoffFields({"prompt_token_ids": request.prompt.tolist()}, {"disaggregated_params": params})


class MockSharedStore(MockDialect):
    """Pools such as Mooncake's store or LMCache's: no handoff fields."""

    def leg(self, request: GenerationRequest, engine_request_id: str) -> HandoffLeg:
        """Every request reads and writes the store."""
        return StoreLookup()


class MockPeerToPeer(MockDialect):
    """vLLM's tiered offloading with the p2p tier: both legs at once, or one request that loads a peer's prefix."""

    recomputes = True

    def leg(self, request: GenerationRequest, engine_request_id: str) -> HandoffLeg:
        """The router's `kv_request_id` joins the legs."""
        params = _transfer_params(request)
        source = params.get("remote_kv_source")
        peer = PeerLookup(_url_of(source)) if source else None
        if decoder := params.get("remote_decoder"):
            return PrefillLeg(decoder["kv_request_id"], pulls=peer)
        if prefiller := params.get("remote_prefiller"):
            return DecodeLeg(_url_of(prefiller), prefiller["kv_request_id"])
        return peer


def dialect_of(config: HandoffConfig) -> MockDialect:
    if config.dialect == "bootstrap":
        return MockBootstrap(config.role)
    dialects = {
        "": MockDialect,
        "nixl": MockNixl,
        "mooncake": MockMooncake,
        "trtllm": MockTrtllm,
        "shared_store": MockSharedStore,
        "p2p": MockPeerToPeer,
    }
    return dialects[config.dialect]()


def _url_of(peer: Mapping[str, Any]) -> str:
    return f"http://{join_address(peer['remote_host'], peer['remote_port'])}"


def _transfer_params(request: GenerationRequest) -> Mapping[str, Any]:
    return request.handoff.get("kv_transfer_params") or {}


def _decode_state(state: object) -> DecodeLeg:
    try:
        return msgspec.json.decode(base64.b64decode(str(state), validate=True), type=DecodeLeg)
    except (msgspec.DecodeError, binascii.Error, UnicodeDecodeError) as error:
        raise EngineError(f"encoded_opaque_state: {error}") from error
