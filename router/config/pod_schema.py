"""The frozen models of `pods[]` in `config/router.yaml`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from router.addresses import read_address, read_host
from router.config.load import FilePath, HttpUrl, SecretPath, SecretVariable, Strict
from router.config.mistakes import not_one_of, wrong_at
from router.engines.engine_catalog import DIALECTS, ENGINES, PULL_DIALECTS
from router.types import PodSpeed, PodTls, Role

MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux."""


def _socket_path(value: str) -> str:
    if value and (not value.startswith("/") or len(value.encode()) > MAX_SOCKET_PATH_BYTES):
        raise ValueError(f"must be an absolute path of at most {MAX_SOCKET_PATH_BYTES} bytes")
    return value


def _one_of(*names: str) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise not_one_of(names)
        return value

    return AfterValidator(check)


HostName = Annotated[str, AfterValidator(read_host)]
SocketPath = Annotated[str, AfterValidator(_socket_path)]
EngineName = Annotated[str, _one_of(*ENGINES)]
HandoffName = Annotated[str, _one_of(*DIALECTS, "")]
PullDialectName = Annotated[str, _one_of(*PULL_DIALECTS, "")]


class PodAuth(Strict):
    """The router's own credentials at a pod. Clients' are not forwarded, see `edge.forward_headers`."""

    bearer_file: SecretPath | None = None
    """A file with the pod's API key, sent as `authorization: Bearer KEY` with each request of the router to the pod.
    It is read again when it changes."""
    bearer_env: SecretVariable | None = None
    """An environment variable with the key, instead of a file."""

    @model_validator(mode="after")
    def _one_source(self) -> PodAuth:
        if bool(self.bearer_file) == bool(self.bearer_env):
            raise ValueError("needs either `bearer_file` or `bearer_env`, and not both")
        return self


class PodTlsFiles(Strict):
    """TLS to a pod whose URL begins with https. The files are read again when they change."""

    ca_file: FilePath | None = None
    """The certificate of the authority that signed the pod's, in PEM. Default: the system's authorities."""
    cert_file: FilePath | None = None
    """The router's own certificate, for pods that ask for one."""
    key_file: SecretPath | None = None
    """The key of `cert_file`, without a password. Default: it is in `cert_file`."""

    @model_validator(mode="after")
    def _a_key_needs_its_certificate(self) -> PodTlsFiles:
        if self.key_file and not self.cert_file:
            raise ValueError("`key_file` needs `cert_file`")
        return self


def credential_fields(auth: PodAuth | None, tls: PodTlsFiles | None) -> dict[str, Any]:
    """The fields of a `Pod` with these credentials."""
    fields = auth.model_dump(exclude_none=True) if auth else {}
    return {**fields, "tls": PodTls(**tls.model_dump(exclude_none=True))} if tls else fields


def _zmq_address(value: str) -> str:
    scheme, _, place = value.partition("://")
    if scheme not in ("tcp", "ipc") or not place:
        raise ValueError("must be tcp://HOST:PORT or ipc://PATH")
    if scheme == "tcp":
        read_address(place.replace(HOST, "host").replace("*", "host"))
    return value


HOST = "{host}"
"""Replaced by a pod's host in the KV event endpoints of discovered pods."""
ZmqAddress: TypeAlias = Annotated[str, AfterValidator(_zmq_address)]


class KvEvents(Strict):
    """Where a pod publishes its KV events. If the endpoint contains `*`, the router binds it and engines connect."""

    endpoint: ZmqAddress
    replay_endpoint: ZmqAddress | None = None


class PodSettings(Strict):
    """What a router can be configured with about one pod or a group of pods, apart from addresses and credentials."""

    engine: EngineName = "vllm"
    """Default: as the pod reports, and vllm until then."""
    role: Role = Role.BOTH
    handoff: HandoffName = ""
    """Dialect for handing KV over between prefill and decode; required with role `prefill` or `decode` (discovered pods
    have a default)."""
    handoff_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on which peers read this pod's KV. Default: the dialect's (mooncake and bootstrap 8998, p2p 5710)."""
    handoff_hosts: tuple[HostName, ...] = ()
    """Hosts besides that of its URL that its handoffs may name: of a network for KV, or its address where the URL has a
    name. The decode pod connects to them; a handoff with another one is not used."""
    pulls: PullDialectName = ""
    """Dialect for fetching KV from a peer."""
    dp_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Data-parallel ranks. Default: as many as the pod reports, and 1 until then."""
    models: tuple[str, ...] = ()
    """Names of the models and adapters that it may serve; `*` stands for any characters. Others that it lists are
    ignored. Default: all that it lists."""
    pool: str = ""
    """The group of pods that is scaled as one, for example its Deployment; a label of metrics."""
    hardware: str = ""
    """Overrides the hardware of the model's cost prior."""
    speed: PodSpeed | None = None
    """Overrides the cost prior, in milliseconds."""
    kv_events: KvEvents | Literal["auto", "off"] = "auto"
    """`auto` asks the engine; the router predicts the caches of engines that do not publish. With a cluster index,
    `auto` leaves the pod's events to `warmroute publish`."""
    host: str = ""
    rack: str = ""
    zone: str = ""


def default_id(url: str) -> str:
    """Host, port and path of the URL, as written."""
    return url.partition("://")[2]


class PodConfig(PodSettings):
    """One pod."""

    url: HttpUrl
    """Address of the pod; also its default id and host."""
    socket: SocketPath = ""
    """A Unix socket to connect to instead of the URL's address."""
    auth: PodAuth | None = None
    """For engines with an API key."""
    tls: PodTlsFiles | None = None
    """For engines with a certificate of a private authority, or that ask for a client certificate."""
    id: str = ""
    advertised_url: HttpUrl | None = None
    """For `warmroute publish`: the pod's URL in the routers' configuration, if different."""

    @model_validator(mode="before")
    @classmethod
    def _not_a_bare_address(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError("must be a mapping; write `- url: http://HOST:PORT`")
        return value

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of its pods: one per data-parallel rank, `id#rank` if there are several. The default id is host, port
        and path of the URL."""
        own = self.id or default_id(self.url)
        return tuple(f"{own}#{rank}" for rank in range(self.dp_size)) if self.dp_size > 1 else (own,)

    @property
    def credentials(self) -> dict[str, Any]:
        """The fields of a `Pod` with which the router connects to it."""
        return credential_fields(self.auth, self.tls)

    @model_validator(mode="after")
    def _tls_needs_https(self) -> Self:
        if self.tls and not self.url.startswith("https://"):
            raise wrong_at(("tls",), "needs a `url` that begins with https://")
        return self

    @model_validator(mode="after")
    def _split_roles_need_a_handoff(self) -> Self:
        if self.role is not Role.BOTH and not self.handoff:
            raise ValueError(
                f"a pod with `role: {self.role.value}` needs a handoff dialect, for example `handoff: nixl`; "
                f"known: {', '.join(DIALECTS)}"
            )
        return self
