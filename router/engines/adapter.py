"""The base class of engine adapters, with the defaults of OpenAI-compatible engines, and the values they return.

An adapter is pure: it names paths, builds bodies and reads responses, and never sends anything. For an invalid response
it returns None. For more metrics or models than are read of a pod it raises `OutOfBounds`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from router.addresses import join_address, read_address, url_host
from router.engines.lacks import COMMON_LACKS, Lack
from router.engines.prometheus import LoadGauges, read_load
from router.guards import Bound, OutOfRange, in_range
from router.prompt.apis.conversion import Conversion
from router.prompt.completion import TokenIds
from router.prompt.pictures.picture_reader import Identify
from router.types import MAX_NAME_CHARACTERS, Endpoint, Pod, PodLoad

MODELS_PATH = "/v1/models"
TOKENIZE_PATH = "/tokenize"
MAX_MODELS = 2048
"""Models and adapters of one pod that are known; further ones are ignored, as are those with too long names."""
MAX_RANKS = 64
"""Data-parallel ranks of one pod that a pod may report."""
MAX_BLOCK_TOKENS, MAX_TOKENS = 1 << 14, 1 << 31
"""Larger numbers that a pod reports of itself cannot be true."""
MAX_COUNT = 1 << 53
ANSWER = Bound("answer", 1024 * 1024, 8192, b"{")
LOAD = Bound("published load", 4096)
MODELS = Bound("list of models", 2 * 1024 * 1024, 2 * MAX_MODELS + 2, b"{")
"""vLLM has two objects a model."""
PROBE_ANSWER = Bound("answer to a probe", 256 * 1024, 1024, b"{")
TOKENS = Bound("tokens", 16 * 1024 * 1024, counted=b"")
"""They are read in slices, in a thread if there are many."""
_T = TypeVar("_T")

ReportedText: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_COUNT)]
_Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_TOKEN_IDS = TokenIds(1 << 32)

Responses: TypeAlias = Mapping[str, bytes]


class KvEventSource(msgspec.Struct, frozen=True):
    """The ZMQ addresses of one pod's KV events, as a subscriber connects to them."""

    endpoint: str
    replay_endpoint: str | None = None


class PodFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod reports about itself."""

    models: tuple[str, ...]
    """Names that clients may send, without adapters."""
    owner: str = ""
    """What /v1/models names as the owner of its models; engines name themselves."""
    dp_size: int = 1
    """Data-parallel ranks behind its URL, of which a request can select one."""
    adapters: tuple[str, ...] = ()
    version: str = ""
    front_end: str = ""
    weights: str = ""
    """The path or name that the model was loaded from; empty where it is not reported."""
    max_model_len_tokens: int | None = None
    """The longest context that all base models accept."""
    block_size_tokens: int | None = None
    """Block size of its prefix cache and its KV events."""
    capacity_tokens: int | None = None
    keeps_answers: bool | None = None
    """Whether prefill pods find the answers of this decode pod; None where it does not say."""
    load_endpoint: str = ""
    """The ZMQ address where it publishes its load; empty where it does not."""
    kv_events: KvEventSource | None = None
    """None where it publishes none, or where the pod's rank is ambiguous."""
    no_events: str = ""
    """Why there are none, and what to do; empty where the engine has none that the router reads."""


class _ModelMeta(msgspec.Struct):
    n_ctx: int | None = None


class _ModelCard(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    owned_by: str | None = None
    max_model_len: int | None = None
    meta: _ModelMeta | None = None

    @property
    def context_tokens(self) -> int | None:
        return known_size(self.max_model_len) or known_size(self.meta.n_ctx if self.meta else None)


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


class _Tokens(msgspec.Struct):
    tokens: msgspec.Raw


class _Choice(msgspec.Struct):
    prompt_token_ids: list[_Token] | None = None
    token_ids: list[_Token] | None = None


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class Usage(msgspec.Struct):
    """The `usage` of a response; engines omit the details unless they are configured to report them."""

    prompt_tokens: _Count | None = None
    input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None
    cache_read_input_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Generated(msgspec.Struct):
    prompt_token_ids: list[_Token] | None = None
    choices: list[_Choice] = []
    usage: Usage | None = None


class EngineAdapter:
    """One engine's paths, metrics and bodies. An engine overrides what differs from these defaults."""

    owners: tuple[str, ...] = ()
    """What it names as the owner of its models in /v1/models."""
    chart_names: tuple[str, ...] = ()
    """Its names in labels and annotations of charts, besides its name here."""
    image_names: tuple[str, ...] = ()
    salted: frozenset[Endpoint] = frozenset(Endpoint) - {Endpoint.TOKENIZE, Endpoint.COUNT_TOKENS}
    """Endpoints that may receive a `cache_salt`, which keeps the prefixes of tenants apart."""
    health_path: str = "/health"
    """Cheap enough for one request a second; 200 means healthy."""
    metrics_path: str = "/metrics"
    gauges: LoadGauges
    faults_path: str = ""
    """Where its ranks report faults that the health path does not show."""
    sleep_path: str = ""
    """Where it says whether it sleeps; empty where it cannot sleep."""
    lack_answers: tuple[Lack, ...] = COMMON_LACKS
    """The answers by which a pod says that it lacks what a request needs."""
    describe_paths: tuple[str, ...] = (MODELS_PATH,)
    """Paths that `describe` reads; only the first is required."""
    kv_events_flag: str = ""
    """How its KV events are switched on; empty where it has none that the router reads."""
    returns_token_ids: bool = False
    """The engine accepts `return_token_ids` and responds with the prompt's tokens. Where False, the field must not be
    sent: some engines refuse unknown fields."""
    tokenize_fields: frozenset[str] = frozenset()
    """Fields of a chat that its /tokenize accepts; empty where the engine has no /tokenize."""
    may_force_usage: bool = False
    """It may be started so that each event of a stream has usage, which nobody has asked for."""
    lora_paths: tuple[str, str] | None = None
    """Its paths to load and to unload a LoRA adapter at run time; None if it has none. The bodies name `lora_name`."""
    conversions: Mapping[Endpoint, type[Conversion]] = {}
    """How it makes a chat of a body, for endpoints of `CONVERTED` that it has, and for chats where it reads them in its
    own way."""
    front_ends: Mapping[str, Mapping[Endpoint, type[Conversion]]] = {}
    """The same by its other front ends."""
    may_lack: Mapping[str, Sequence[str]] = {}
    """By front end, what a new pod is asked for, because others like it lack it."""
    identify_picture: Identify | None = None
    """How it identifies a picture; None where that is unknown."""

    def conversions_of(self, front_end: str) -> Mapping[Endpoint, type[Conversion]]:
        return self.front_ends.get(front_end, self.conversions)

    def describe(self, responses: Responses, pod: Pod) -> PodFacts | None:
        """The pod's facts, for the rank of `pod`; None while it reports no models."""
        return parse_models(responses.get(MODELS_PATH, b""), pod.allowed_models)

    def without_events(self, path: str, responses: Responses) -> str:
        """Why a pod has no source of KV events, which it would name at `path`, and what to do."""
        if b'"zmq"' in responses.get(path, b""):
            return "they have no TCP address for this rank; let `endpoint` of the engine's --kv-events-config be tcp://*:PORT"
        if responses.get(path, b"")[:1] == b"{":
            return f"the engine publishes none; start it with {self.kv_events_flag}"
        if_none = f"if it publishes none, start it with {self.kv_events_flag}"
        return (
            f"the engine does not answer {path}, as vLLM before 0.31; name their address in pods[].kv_events; {if_none}"
        )

    def parse_load(self, metrics: bytes, dp_rank: int | None, now_s: float) -> PodLoad | None:
        """Running, waiting and KV usage of one rank; for None, requests summed and usage averaged over all ranks."""
        return read_load(metrics, self.gauges, dp_rank, now_s)

    def parse_published_load(self, payload: bytes, now_s: float) -> PodLoad:
        """The same of a message of the pod's `load_endpoint`. Raises `OutOfRange`."""
        raise OutOfRange("this engine publishes no load")

    def around_tokens(self, count: int, pod: Pod) -> tuple[bytes, bytes] | None:
        """What its /tokenize answers in front of `count` tokens and behind them; None if that is unknown."""
        return None

    def pause_reason(self, said: bytes) -> str:
        """Why the engine serves nobody for a while, from the start of an error response; "" for any other error."""
        return ""

    def is_dead(self, said: bytes) -> bool:
        """Whether an error, in a response or an event, says that the engine is gone while its server still responds."""
        return False

    def fault(self, faults: bytes, pod: Pod) -> str:
        """Which of these faults keeps the pod from serving; "" if none does."""
        return ""

    def is_asleep(self, said: bytes) -> bool:
        """Whether the engine sleeps, by what it says at `sleep_path`."""
        return False

    def wake_calls(self, metrics: bytes) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Paths and bodies that wake the engine with these metrics; none where that is not known."""
        return ()

    def continues(self, pod: Pod) -> frozenset[Endpoint]:
        """Where the pod's release gives the token ids of a stream, and takes them back as a prompt."""
        return frozenset()

    def tokenize_body(self, model: str, prompt: Mapping[str, Any]) -> dict[str, Any] | None:
        """The body for /tokenize with the `prompt` or `messages` of a request. None where its result might differ from
        the tokens of the request: for a prompt of tokens, and for a chat with other fields than `tokenize_fields`.
        `tool_choice` does not change the tokens."""
        given = {name: value for name, value in prompt.items() if value is not None and name != "tool_choice"}
        if "messages" in given:
            accepted = given.keys() <= self.tokenize_fields
        else:
            accepted = bool(self.tokenize_fields) and isinstance(given.get("prompt"), str)
        return {"model": model, **given} if accepted else None


def decode(response: bytes, kind: type[_T], bound: Bound = ANSWER) -> _T | None:
    """A JSON response as `kind`; None where it is something else, or out of bounds."""
    try:
        return bound.json(response, msgspec.json.Decoder(kind))
    except ValueError:
        return None


def known_size(size: int | None, most: int = MAX_TOKENS) -> int | None:
    """A positive size; None for the 0 or -1 of an engine that does not report it, and for more than `most`."""
    return size if size is not None and in_range(size, 1, most) else None


def rank_count(ranks: Iterable[str]) -> int:
    """How many ranks these are, if they are numbered from 0; else 1, because the numbers of others are unknown."""
    found = set(ranks)
    count = len(found)
    return count if 1 < count <= MAX_RANKS and found == set(map(str, range(count))) else 1


def parse_models(response: bytes, allowed: Sequence[str] = ()) -> PodFacts | None:
    """The response of `/v1/models`, without names that match none of `allowed`; None if no base model is left. An
    adapter is a card that has a parent. Raises `OutOfBounds`."""
    MODELS.check_size(len(response))
    MODELS.check_items(response.count(b"{"))
    listed = decode(response, _ModelList, MODELS)
    cards = [card for card in listed.data if len(card.id) <= MAX_NAME_CHARACTERS][:MAX_MODELS] if listed else []
    if allowed:
        cards = [card for card in cards if any(fnmatchcase(card.id, pattern) for pattern in allowed)]
    base = [card for card in cards if card.parent is None]
    if not base:
        return None
    return PodFacts(
        models=tuple(card.id for card in base),
        owner=(base[0].owned_by or "")[:MAX_NAME_CHARACTERS],
        adapters=tuple(card.id for card in cards if card.parent is not None),
        weights=(base[0].root or "")[:MAX_NAME_CHARACTERS],
        max_model_len_tokens=min((card.context_tokens for card in base if card.context_tokens), default=None),
    )


def parse_tokens(response: bytes, bound: Bound = TOKENS) -> array[int] | None:
    """The tokens in the response of /tokenize, decoded in slices."""
    found = decode(response, _Tokens, bound)
    listed = memoryview(found.tokens) if found else memoryview(b"")
    try:
        return _TOKEN_IDS.read(listed) if bytes(listed[:1]) == b"[" else None
    except (ValueError, RecursionError):
        return None


def prompt_token_ids(response: bytes) -> list[int] | None:
    """The prompt's tokens from the response to a probe; None where it has none."""
    found = decode(response, _Generated, PROBE_ANSWER)
    if found is None:
        return None
    return found.prompt_token_ids or next((c.prompt_token_ids for c in found.choices if c.prompt_token_ids), None)


def answer_token_ids(response: bytes) -> list[int]:
    """The tokens of the first answer in the response to a probe; none where it has no ids."""
    found = decode(response, _Generated, PROBE_ANSWER)
    return found.choices[0].token_ids or [] if found and found.choices else []


def prompt_token_count(response: bytes) -> int | None:
    """Prompt tokens in the usage of the response to a probe; Anthropic's `input_tokens` has only those that the cache
    took no part in."""
    found = decode(response, _Generated, PROBE_ANSWER)
    if not found or not (usage := found.usage) or usage.input_tokens is None:
        return found.usage.prompt_tokens if found and found.usage else None
    return usage.input_tokens + (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)


def cached_token_count(response: bytes) -> int | None:
    """Cached tokens in the usage of the response to a probe; None where the engine does not report them."""
    found = decode(response, _Generated, PROBE_ANSWER)
    return found.usage.cached_tokens if found and found.usage else None


def rank_headers(pod: Pod) -> Mapping[str, str]:
    """Request headers that select the pod's rank behind a shared port."""
    return {} if pod.dp_rank is None else {"x-data-parallel-rank": str(pod.dp_rank)}


def on_pod(endpoint: str, pod: Pod) -> str | None:
    """The ZMQ address that a pod reports, with the host on which the pod is reached: what a pod says never makes the
    router connect elsewhere. None unless it is TCP and a port. Only the configuration names other addresses."""
    scheme, _, address = endpoint.partition("://")
    try:
        port = read_address(address.replace("*", "host"))[1] if scheme == "tcp" else 0
    except ValueError:
        return None
    return f"tcp://{join_address(url_host(pod.url), port)}" if port else None
