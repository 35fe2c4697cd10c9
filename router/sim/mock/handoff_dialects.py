"""How do two engines and their router word a handoff?

One class a dialect, as the engines word it (reference/protocols.md 3; as measured: reference/engines.md 2): which leg a
request is, and what its answer says. Values in, values out: this file never sends, keeps or waits.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal, TypeAlias

import msgspec

from router.sim.mock.mock_config import HandoffConfig
from router.sim.mock.mock_requests import EngineError, GenerationRequest
from router.sim.mock.pinned_kv import PinnedKv
from router.types import Role


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """A prefill leg: its KV is kept under `key`. Some engines answer such a leg with its first token, whatever length
    was asked for, and some only once the KV is delivered."""

    key: str
    cut: Literal["length", "not_finished"] | None = None
    """Why the answer ends with its first token; None where it is as long as asked for."""
    awaits_delivery: bool = False


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """A decode leg: its KV lies with the engine at `url`, in that engine's life `engine_id` where one is named."""

    url: str
    key: str
    engine_id: str = ""


@dataclass(frozen=True, slots=True)
class PeerLookup:
    """A request that may find some of its KV with the engine at `url`."""

    url: str


@dataclass(frozen=True, slots=True)
class StoreLookup:
    """A request that may find some of its KV in the shared store, and leaves its own there."""


HandoffLeg: TypeAlias = PrefillLeg | DecodeLeg | PeerLookup | StoreLookup | None


@dataclass(frozen=True, slots=True)
class LoadedKv:
    """Leading prompt tokens whose KV came from elsewhere; `prefill_cached_tokens` had been cached there."""

    tokens: int = 0
    garbled: bool = False
    prefill_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HandoffFields:
    """What an answer says beyond the usual: at its top, and in its choice."""

    top: Mapping[str, Any] = field(default_factory=dict)
    choice: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where peers reach this engine in this life."""

    host: str
    port: int
    engine_id: str

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class MockDialect:
    """An engine without any dialect: every request is a whole one."""

    waits = True
    """A decode leg waits for its prefill leg; otherwise it takes what it finds."""
    reads_blindly = False
    """What a decode leg finds may be something else by now: it cannot tell."""
    recomputes = False
    """What does not arrive is computed; otherwise the request fails."""
    forbids: frozenset[str] = frozenset()
    """Fields of other dialects that are a 400 here."""

    def leg(self, ask: GenerationRequest, request_id: str) -> HandoffLeg:
        """Which part of a handoff a request is. `request_id` is the engine's own name for it. Raises `EngineError`."""
        return None

    def offers(self, finish_reason: str) -> bool:
        """Is the KV of a prefill leg that ended so kept?"""
        return True

    def told(self, ask: GenerationRequest, kept: PinnedKv | None, here: PeerAddress) -> HandoffFields:
        """What the answer of a prefill leg says; `kept` is None where it keeps nothing."""
        return HandoffFields()

    def shown_cached_tokens(self, ask: GenerationRequest, cached_tokens: int, loaded: LoadedKv) -> int:
        """What usage says of a decode leg that found `cached_tokens` in its own cache."""
        return max(cached_tokens, loaded.tokens)


class MockNixl(MockDialect):
    """vLLM's NixlConnector: D reads P's memory by an address out of P's answer, and never learns whose it was."""

    waits = False
    reads_blindly = True

    def leg(self, ask: GenerationRequest, request_id: str) -> HandoffLeg:
        """A decode leg whose address is incomplete is a whole request."""
        params = _transfer_params(ask)
        if params.get("do_remote_decode"):
            return PrefillLeg(request_id)
        named = ("remote_host", "remote_port", "remote_engine_id", "remote_request_id", "remote_block_ids")
        if params.get("do_remote_prefill") and all(params.get(name) for name in named):
            return DecodeLeg(
                f"http://{params['remote_host']}:{params['remote_port']}", str(params["remote_request_id"])
            )
        return None

    def told(self, ask: GenerationRequest, kept: PinnedKv | None, here: PeerAddress) -> HandoffFields:
        """Everything that a decode leg needs, in the fields of 0.32."""
        if kept is None:
            return HandoffFields({"kv_transfer_params": None})
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [kept.blocks],
            "remote_engine_id": here.engine_id,
            "remote_request_id": kept.key,
            "remote_host": here.host,
            "remote_port": here.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": kept.tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": kept.cached_tokens,
        }
        return HandoffFields({"kv_transfer_params": params})

    def shown_cached_tokens(self, ask: GenerationRequest, cached_tokens: int, loaded: LoadedKv) -> int:
        """A transfer does not show."""
        return cached_tokens


class MockMooncake(MockDialect):
    """vLLM's MooncakeConnector: both legs at once, joined by the router's `transfer_id`."""

    def leg(self, ask: GenerationRequest, request_id: str) -> HandoffLeg:
        """A decode leg whose address is incomplete is a whole request."""
        params = _transfer_params(ask)
        if params.get("do_remote_decode") and params.get("transfer_id"):
            return PrefillLeg(str(params["transfer_id"]))
        named = ("remote_bootstrap_addr", "remote_engine_id", "transfer_id")
        if params.get("do_remote_prefill") and all(params.get(name) for name in named):
            address, engine_id, transfer_id = (str(params[name]) for name in named)
            return DecodeLeg(address.rstrip("/"), transfer_id, engine_id)
        return None

    def offers(self, finish_reason: str) -> bool:
        """Only what the length limit ended is handed over."""
        return finish_reason == "length"

    def told(self, ask: GenerationRequest, kept: PinnedKv | None, here: PeerAddress) -> HandoffFields:
        """Nothing."""
        return HandoffFields({"kv_transfer_params": None})

    def shown_cached_tokens(self, ask: GenerationRequest, cached_tokens: int, loaded: LoadedKv) -> int:
        """The whole prompt, to its last token."""
        return len(ask.prompt) if loaded.tokens else cached_tokens


class MockBootstrap(MockDialect):
    """SGLang: both legs at once with one and the same body; the pod's mode says which it is."""

    def __init__(self, role: Role) -> None:
        self._role = role

    def leg(self, ask: GenerationRequest, request_id: str) -> HandoffLeg:
        """A pod in either mode serves no request on its own."""
        room = ask.handoff.get("bootstrap_room")
        if room is None:
            raise EngineError(HTTPStatus.BAD_REQUEST, "Disaggregated request received without bootstrap room id.")
        if self._role is Role.PREFILL:
            return PrefillLeg(str(room), cut="length", awaits_delivery=True)
        host, port = ask.handoff.get("bootstrap_host"), ask.handoff.get("bootstrap_port", 8998)
        return DecodeLeg(f"http://{host}:{port}", str(room))

    def shown_cached_tokens(self, ask: GenerationRequest, cached_tokens: int, loaded: LoadedKv) -> int:
        """What the prefill leg had found, which travels with its KV."""
        return loaded.prefill_cached_tokens


class MockTrtllm(MockDialect):
    """TensorRT-LLM: P's answer carries an opaque state, its first token and the prompt's tokens."""

    waits = False
    forbids = frozenset({"kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"})

    def leg(self, ask: GenerationRequest, request_id: str) -> HandoffLeg:
        """`context_only` is answered by its first token, `generation_only` by all, that one included."""
        params = ask.handoff.get("disaggregated_params") or {}
        if params.get("request_type") == "context_only":
            return PrefillLeg(request_id, cut="length" if len(ask.answer.tokens) == 1 else "not_finished")
        if params.get("request_type") == "generation_only":
            return _opened(params.get("encoded_opaque_state"))
        return None

    def told(self, ask: GenerationRequest, kept: PinnedKv | None, here: PeerAddress) -> HandoffFields:
        """The parameters stand in the choice, the prompt's tokens at the top."""
        if kept is None:
            return HandoffFields()
        asked = ask.handoff["disaggregated_params"]
        state = msgspec.json.encode({"url": here.url, "key": kept.key, "engine_id": here.engine_id})
        params = {
            "request_type": "context_only",
            "first_gen_tokens": ask.answer.tokens,
            "first_gen_log_probs": None,
            "ctx_request_id": asked.get("disagg_request_id"),
            "encoded_opaque_state": base64.b64encode(state).decode(),
            "draft_tokens": None,
            "disagg_request_id": asked.get("disagg_request_id"),
            "ctx_dp_rank": 0,
            "ctx_info_endpoint": here.url,
        }
        return HandoffFields({"prompt_token_ids": ask.prompt.tolist()}, {"disaggregated_params": params})


class MockSharedStore(MockDialect):
    """Pools such as Mooncake's store or LMCache's: nothing goes over the wire."""

    def leg(self, ask: GenerationRequest, request_id: str) -> HandoffLeg:
        """Every request reads and writes."""
        return StoreLookup()


class _Decoder(msgspec.Struct):
    kv_request_id: str


class _Peer(msgspec.Struct):
    kv_request_id: str
    remote_host: str
    remote_port: int

    @property
    def url(self) -> str:
        return f"http://{self.remote_host}:{self.remote_port}"


class _PeerParams(msgspec.Struct):
    remote_decoder: _Decoder | None = None
    remote_prefiller: _Peer | None = None
    remote_kv_source: _Peer | None = None


class MockPeerToPeer(MockDialect):
    """vLLM's tiered offloading with the p2p tier: both legs at once, or one request that fetches what a peer has."""

    recomputes = True

    def leg(self, ask: GenerationRequest, request_id: str) -> HandoffLeg:
        """Joined by the router's `kv_request_id`."""
        try:
            params = msgspec.convert(_transfer_params(ask), _PeerParams)
        except msgspec.ValidationError as error:
            raise EngineError(HTTPStatus.BAD_REQUEST, f"kv_transfer_params: {error}") from error
        if params.remote_decoder:
            return PrefillLeg(params.remote_decoder.kv_request_id)
        if params.remote_prefiller:
            return DecodeLeg(params.remote_prefiller.url, params.remote_prefiller.kv_request_id)
        return PeerLookup(params.remote_kv_source.url) if params.remote_kv_source else None

    def told(self, ask: GenerationRequest, kept: PinnedKv | None, here: PeerAddress) -> HandoffFields:
        """Nothing."""
        return HandoffFields({"kv_transfer_params": None})


def dialect_of(config: HandoffConfig) -> MockDialect:
    """The class of a dialect."""
    if config.dialect == "bootstrap":
        return MockBootstrap(config.role)
    plain = {
        "": MockDialect,
        "nixl": MockNixl,
        "mooncake": MockMooncake,
        "trtllm": MockTrtllm,
        "shared_store": MockSharedStore,
        "p2p": MockPeerToPeer,
    }
    return plain[config.dialect]()


def _transfer_params(ask: GenerationRequest) -> Mapping[str, Any]:
    return ask.handoff.get("kv_transfer_params") or {}


def _opened(state: object) -> DecodeLeg:
    try:
        return msgspec.json.decode(base64.b64decode(str(state), validate=True), type=DecodeLeg)
    except (msgspec.DecodeError, binascii.Error, UnicodeDecodeError) as error:
        raise EngineError(HTTPStatus.BAD_REQUEST, f"encoded_opaque_state: {error}") from error
