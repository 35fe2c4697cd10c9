"""The KV connectors of vLLM: Nixl, Mooncake, p2p offloading, and stores that pods share.

Source: docs/handoff.md#vllm.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from router.addresses import join_address, url_host
from router.engines.adapter import ReportedText, decode
from router.engines.handoff.bodies import edited, read_prefill
from router.engines.handoff.dialect import Dialect, Handoff, Order, Pair
from router.types import Endpoint, Pod

BOOTSTRAP_PORT = 8998
P2P_PORT = 5710
ANY_TOKEN = 5
"""The token of a prompt whose answer nobody reads; every vocabulary has it."""

_EMPTY: Mapping[str, Any] = {}
_VERSION = re.compile(r"v?(\d+)\.(\d+)")
_NIXL_REQUEST = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def one_token_body(
    endpoint: Endpoint, body: bytes, put: Mapping[str, Any] = _EMPTY, drop: Collection[str] = ()
) -> bytes:
    """The client's body for one token, unstreamed: only such a response has transfer parameters. vLLM refuses
    `min_tokens` above `max_tokens`."""
    return edited(
        body,
        {"max_tokens": 1, "stream": False, **put},
        drop=("stream_options", "min_tokens", "n", *drop),
        amend={"max_completion_tokens": 1} if endpoint is Endpoint.CHAT else _EMPTY,
    )


def takes_prompt_tokens(pod: Pod) -> bool:
    """True for vLLM 0.27 and later, which read `prompt_token_ids` among the `kv_transfer_params` of a chat."""
    release = _VERSION.match(pod.version)
    return release is not None and (int(release[1]), int(release[2])) >= (0, 27)


class Nixl(Dialect):
    """NixlConnector and NixlPushConnector: the prefill pod leases the blocks and returns their address; the decode pod
    reads them once. The parameters are opaque and never reused: old ones give wrong text without an error."""

    hold_s = 10.0
    """A third of the lease, after which the blocks may hold another prompt (docs/handoff.md#nixl)."""

    def prefill_body(self, endpoint: Endpoint, body: bytes, pair: Pair) -> bytes:
        return one_token_body(endpoint, body, {"kv_transfer_params": _NIXL_REQUEST, "return_token_ids": True})

    def read_handoff(self, response: bytes) -> Handoff | None:
        prefilled = read_prefill(response)
        if prefilled is None or not prefilled.kv_transfer_params:
            return None
        return Handoff(prefilled.kv_transfer_params, prefilled.token_ids(), prefilled.cached_tokens)

    def decode_body(self, endpoint: Endpoint, body: bytes, pair: Pair, handoff: Handoff) -> bytes:
        params = dict(handoff.params)
        if handoff.prompt_token_ids and endpoint is Endpoint.CHAT and takes_prompt_tokens(pair.decode):
            params["prompt_token_ids"] = handoff.prompt_token_ids
        return edited(body, {"kv_transfer_params": params})

    def return_body(self, model: str, params: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """One token for a prompt of one token: a peer that was to read a handoff reads one block and reports the end of
        the transfer, one that was offered the KV of a turn reads nothing and releases it."""
        is_offer = bytes(params.get("do_remote_decode", b"")) == b"true"
        returned = {**params, "remote_num_tokens": 0} if is_offer else params
        return {"model": model, "prompt": [ANY_TOKEN], "max_tokens": 1, "kv_transfer_params": returned}


class _MooncakeRank(msgspec.Struct):
    engine_id: ReportedText


class Mooncake(Dialect):
    """MooncakeConnector since 0.16: both requests are sent at once and joined by a transfer id. The decode pod connects
    to the prefill pod's bootstrap server, from which the router reads the engine id once per epoch."""

    order = Order.TOGETHER

    def facts_url(self, prefill: Pod) -> str | None:
        return f"{self._bootstrap(prefill)}/query"

    def parse_facts(self, response: bytes, prefill: Pod) -> Mapping[str, Any] | None:
        """The engine of the pod's rank. A pod without a rank must have a single engine."""
        ranks = decode(response, dict[str, _MooncakeRank]) or {}
        only = next(iter(ranks), "") if len(ranks) == 1 else ""
        found = ranks.get(only if prefill.dp_rank is None else str(prefill.dp_rank))
        return {"engine_id": found.engine_id} if found else None

    def prefill_body(self, endpoint: Endpoint, body: bytes, pair: Pair) -> bytes:
        """Only a request that ended by its length is handed over, so every other stop condition is removed."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": _transfer_id(pair)}
        put = {"kv_transfer_params": params, "ignore_eos": True}
        return one_token_body(endpoint, body, put, drop=("stop", "stop_token_ids"))

    def decode_body(self, endpoint: Endpoint, body: bytes, pair: Pair, handoff: Handoff) -> bytes:
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": self._bootstrap(pair.prefill),
            "remote_engine_id": pair.facts["engine_id"],
            "transfer_id": _transfer_id(pair),
        }
        return edited(body, {"kv_transfer_params": params})

    def _bootstrap(self, prefill: Pod) -> str:
        return f"http://{join_address(url_host(prefill.url), prefill.handoff_port or BOOTSTRAP_PORT)}"


class P2p(Dialect):
    """OffloadingConnector with a secondary tier of type `p2p`. One side channel serves handoffs, whose requests
    are sent at once, and pulls of blocks that a peer already holds. Rank r of a pod listens at its port + r."""

    order = Order.TOGETHER
    answers_setting = "offload_prompt_only: false on it, and pulls: p2p on both pods in router.yaml"

    def prefill_body(self, endpoint: Endpoint, body: bytes, pair: Pair) -> bytes:
        params: dict[str, Any] = {"remote_decoder": {"kv_request_id": _kv_request_id(pair)}}
        if pair.source is not None:
            params["remote_kv_source"] = self._source(pair.source)
        return one_token_body(endpoint, body, {"kv_transfer_params": params})

    def decode_body(self, endpoint: Endpoint, body: bytes, pair: Pair, handoff: Handoff) -> bytes:
        return edited(body, {"kv_transfer_params": {"remote_prefiller": self._source(pair)}})

    def pull_body(self, body: bytes, pair: Pair) -> bytes | None:
        return edited(body, {"kv_transfer_params": {"remote_kv_source": self._source(pair)}})

    def _source(self, pair: Pair) -> dict[str, Any]:
        return {
            "kv_request_id": _kv_request_id(pair),
            "remote_host": url_host(pair.prefill.url),
            "remote_port": (pair.prefill.handoff_port or P2P_PORT) + (pair.prefill.dp_rank or 0),
        }


class SharedStore(Dialect):
    """Pods with a common KV store (MooncakeStoreConnector, LMCacheMPConnector, a shared file system, 3FS): the prefill
    pod saves, the decode pod looks up, and what was not saved in time is computed again."""

    answers_setting = "save_decode_cache: true on it (MooncakeStoreConnector, LMCache)"

    def prefill_body(self, endpoint: Endpoint, body: bytes, pair: Pair) -> bytes:
        return one_token_body(endpoint, body)


def _transfer_id(pair: Pair) -> str:
    return f"xfer-{pair.id:016x}"


def _kv_request_id(pair: Pair) -> str:
    return f"kr-{pair.id:016x}"
