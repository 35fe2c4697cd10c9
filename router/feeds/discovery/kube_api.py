"""Reads the Kubernetes API: requests with the credentials of a ServiceAccount, and the fields of its objects that the
router uses.

The token is read for each request, because the kubelet replaces it; a watch lasts about a minute. The authority is read
again when its file changes. Connections are those of the requests to pods, which `wiring` passes in: an HTTP library
took more CPU than everything else that a watch does. A decoder of `msgspec` skips the rest of an object, which is most
of it: managed fields, volumes, container statuses. Values are bounded by the size of a response and of a line.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias
from urllib.parse import urlencode

import msgspec

from router.addresses import join_address
from router.config.credentials import check_authority
from router.config.pod_keys import read_key
from router.config.pod_schema import KubernetesApi
from router.errors import ConfigError, UpstreamError
from router.request.inbound import IncomingResponse
from router.types import PodTls

EXPIRED = 410
"""Status of a resource version that is too old."""
DELETED, BOOKMARK, ERROR = "DELETED", "BOOKMARK", "ERROR"
OWN_PREFIX = "warmroute.dev/"
MAX_VALUE_CHARACTERS = 1024
"""What is kept of an annotation: to say what is wrong with one of 256 KB took 26 ms. No fact is as long."""

ObjectKey: TypeAlias = tuple[str, str]
"""Namespace and name."""
MAX_BODY_BYTES = 64 * 1024 * 1024
"""A list of 500 large pods takes 10 MB."""
MAX_LINE_BYTES = 4 * 1024 * 1024
"""Twice the largest object that the API server stores."""
GATHER_S, WAITED_S = 0.1, 0.005
"""After a wait for an event, those of the next 0.1 s are read together: a wait costs ten times as much as an event."""
REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 3.0
QUIET_S = 120.0
"""A connection that is silent for longer is broken; watches end earlier."""
SUCCESS = range(200, 300)
NOT_ACCEPTED = "the API server does not accept the credentials"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubeApiError(Exception):
    """A request to the API server failed. `status` 0: there was no response."""

    def __init__(self, status: int, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class KubePod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod, equal if no field differs that the router uses. `ports`: (name, number) of the container that serves.
    `labels`: annotations and labels that may be facts, annotations first."""

    key: ObjectKey
    uid: str
    address: str = ""
    node: str = ""
    created: str = ""
    images: tuple[str, ...] = ()
    ports: tuple[tuple[tuple[str, int], ...], ...] = ()
    """By container, as `images`."""
    labels: Mapping[str, str] = {}
    ready: bool = False
    terminating: bool = False
    finished: bool = False
    """All containers have ended for good."""


class WatchEvent(NamedTuple):
    """A change of a pod. Of a deleted one only key and uid are known; without a pod, a bookmark: all events before
    this version have been sent."""

    version: str
    pod: KubePod | None = None
    is_deleted: bool = False


# --- the API's own shape ---


class _Camel(msgspec.Struct, rename="camel"):
    pass


class _Meta(_Camel):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Port(_Camel):
    container_port: int
    name: str | None = None


class _Container(_Camel):
    image: str | None = None
    ports: list[_Port] | None = None


class _PodSpec(_Camel):
    node_name: str | None = None
    containers: list[_Container] | None = None


class _Condition(_Camel):
    type: str
    status: str


class _PodStatus(_Camel):
    phase: str | None = None
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[_Condition] | None = None


class _Pod(_Camel):
    metadata: _Meta
    spec: _PodSpec | None = None
    status: _PodStatus | None = None


class _ListMeta(_Camel):
    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class _List(_Camel):
    """`continue_`: the token of the next page. Items are not decoded yet."""

    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(_Camel):
    message: str | None = None
    code: int | None = None


class _WithMeta(_Camel):
    metadata: _Meta


read_page = msgspec.json.Decoder(_List).decode
"""Reads a page of a list. Raises `msgspec.DecodeError`."""
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_status = msgspec.json.Decoder(_Status).decode
_decode_meta = msgspec.json.Decoder(_WithMeta).decode
_decode_pod = msgspec.json.Decoder(_Pod).decode

ReadPod: TypeAlias = Callable[[bytes | msgspec.Raw], tuple[KubePod, str]]
"""Decodes a pod and its version. Raises `msgspec.DecodeError`."""


def pod_reader(keys: frozenset[str]) -> ReadPod:
    """Reads pods; of their annotations and labels only `keys` and our own are kept."""

    def read(data: bytes | msgspec.Raw) -> tuple[KubePod, str]:
        pod = _decode_pod(data)
        meta, spec, status = pod.metadata, pod.spec or _PodSpec(), pod.status or _PodStatus()
        containers = spec.containers or []
        kept = KubePod(
            key=(meta.namespace, meta.name),
            uid=meta.uid,
            address=status.pod_ip or "",
            node=spec.node_name or "",
            created=meta.creation_timestamp or "",
            images=tuple(container.image or "" for container in containers),
            ports=tuple(
                tuple((port.name or "", port.container_port) for port in container.ports or ())
                for container in containers
            ),
            labels={
                key: value[: MAX_VALUE_CHARACTERS + 1]
                for given in (meta.labels, meta.annotations)
                for key, value in (given or {}).items()
                if key in keys or key.startswith(OWN_PREFIX)
            },
            ready=any(one.type == "Ready" and one.status == "True" for one in status.conditions or ()),
            terminating=meta.deletion_timestamp is not None,
            finished=status.phase in ("Succeeded", "Failed"),
        )
        return kept, meta.resource_version

    return read


def read_event(line: bytes, read: ReadPod) -> WatchEvent:
    """A line of a watch. Raises `msgspec.DecodeError`, and `KubeApiError` for a watch that failed and ends."""
    event = _decode_event(line)
    if event.type == ERROR:
        status = _decode_status(event.object)
        raise KubeApiError(status.code or 0, (status.message or "")[:500])
    if event.type == BOOKMARK:
        return WatchEvent(_decode_meta(event.object).metadata.resource_version)
    if event.type == DELETED:
        meta = _decode_meta(event.object).metadata
        gone = KubePod(key=(meta.namespace, meta.name), uid=meta.uid)
        return WatchEvent(meta.resource_version, gone, is_deleted=True)
    pod, version = read(event.object)
    return WatchEvent(version, pod)


def error_message(body: bytes) -> str:
    """The message of an error response; empty if it has none."""
    try:
        return (_decode_status(body).message or "")[:500]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def read_labels(body: bytes) -> Mapping[str, str]:
    return _decode_meta(body).metadata.labels or {}


class ServerConnections(Protocol):
    async def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> IncomingResponse:
        """Wait for the headers of the response. Raises `UpstreamError`, `ConfigError` if a TLS file cannot be read."""

    def close(self) -> None:
        """Close idle connections."""


Connect: TypeAlias = Callable[[str, PodTls], ServerConnections]
"""Maps a URL and TLS files to connections, which are opened by requests."""


@dataclass(frozen=True, slots=True)
class Permission:
    """What a request needs. `namespace`: `*` for all."""

    group: str
    """The API group, empty for the core."""
    resource: str
    verbs: tuple[str, ...]
    namespace: str

    def refusal(self, path: str, error: KubeApiError, verb: str = "") -> str:
        """An error of the API server with what to do. `verb`: of the request that failed, if `verbs` are several."""
        if error.status not in (401, 403):
            return f"{path}: {error.status or ''} {error}".replace("  ", " ")
        if error.status == 401:
            return f"{path}: 401 {error}; {NOT_ACCEPTED} (discovery.kubernetes.api)"
        role = "ClusterRole" if self.namespace == "*" else f"Role in namespace {self.namespace}"
        verbs = ", ".join(f'"{verb}"' for verb in self.verbs)
        refused = f"{verb} is not permitted: " if verb else ""
        return (
            f"{path}: 403 {error}; {refused}give the router's ServiceAccount a {role} with "
            f'apiGroups: ["{self.group}"], resources: ["{self.resource}"], verbs: [{verbs}]'
        )


class KubeApi:
    """The API server. Raises `ConfigError` if its address is unknown or its authority cannot be read: a kubelet mounts
    it before a container starts, and the system's authorities must not stand in for it."""

    def __init__(self, api: KubernetesApi, connect: Connect) -> None:
        self._url = api.url or _cluster_url()
        self._token_file = api.token_file
        self._server = connect(self._url, PodTls(ca_file=_authority(api, self._url)))

    def close(self) -> None:
        """Close idle connections; requests may follow."""
        self._server.close()

    async def get(self, path: str, query: Mapping[str, str]) -> bytes:
        """The body of a successful response. Raises `KubeApiError`."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S), self._open(path, query) as response:
                return await _read(response)
        except TimeoutError:
            raise KubeApiError(0, f"{self._url}: no response within {REQUEST_TIMEOUT_S:g} s") from None

    async def lines(self, path: str, query: Mapping[str, str], limit_s: float) -> AsyncGenerator[list[bytes], None]:
        """The lines as they arrive, first none when it begins. Raises `KubeApiError`, also after `limit_s`."""
        rest, now_s = b"", asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(limit_s), self._open(path, query) as response:
                yield []
                asked_s = now_s()
                while piece := await response.read():
                    *lines, rest = (rest + piece).split(b"\n")
                    if len(rest) > MAX_LINE_BYTES:
                        raise KubeApiError(0, f"watch sent a line of more than {MAX_LINE_BYTES} bytes")
                    yield lines
                    if lines and now_s() - asked_s > WAITED_S:  # else more pieces may be here already
                        await asyncio.sleep(GATHER_S)
                    asked_s = now_s()
        except TimeoutError:
            raise KubeApiError(0, f"watch sent no end within {limit_s:g} s") from None

    @asynccontextmanager
    async def _open(self, path: str, query: Mapping[str, str]) -> AsyncIterator[IncomingResponse]:
        try:
            response = await self._server.send("GET", _target(path, query), self._credentials(), b"")
            try:
                if response.status not in SUCCESS:
                    raise await _refused(response)
                yield response
            finally:
                response.close()
        except UpstreamError as error:
            raise KubeApiError(0, f"{error!s:.300}".removeprefix("pod ")) from error
        except ConfigError as error:  # the authority cannot be read
            raise KubeApiError(0, str(error)) from error

    def _credentials(self) -> dict[str, str]:
        try:
            return {"authorization": f"Bearer {read_key(self._token_file)}"}
        except ConfigError:
            return {}  # the API server answers 401 if it needs one


def _authority(api: KubernetesApi, url: str) -> str:
    ca_file = api.ca_file if url.startswith("https:") else ""
    try:
        if ca_file:
            check_authority(ca_file)
    except ConfigError as error:
        raise ConfigError(
            f"discovery.kubernetes.api.ca_file: {error}; in a cluster, mount the ServiceAccount token "
            '(automountServiceAccountToken); elsewhere, name the authority, or write "" for those of the system'
        ) from None
    return ca_file


def _target(path: str, query: Mapping[str, str]) -> str:
    """The path with those fields of the query that are not empty."""
    given = {name: value for name, value in query.items() if value}
    return f"{path}?{urlencode(given)}" if given else path


async def _read(response: IncomingResponse) -> bytes:
    body = bytearray()
    while piece := await response.read():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise KubeApiError(0, f"response of more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def _refused(response: IncomingResponse) -> KubeApiError:
    message = error_message(await _read(response)) or "without a message"
    after = dict(response.headers).get(b"retry-after", b"")
    retry_after_s = float(after) if after.isdigit() and len(after) < 5 else 0.0
    return KubeApiError(response.status, message, retry_after_s)


def _cluster_url() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            "discovery.kubernetes: this process does not run in a cluster (KUBERNETES_SERVICE_HOST is not set); "
            "set discovery.kubernetes.api.url; `kubectl proxy` serves http://127.0.0.1:8001"
        )
    return f"https://{join_address(host, port)}"


def own_namespace() -> str:
    """The namespace of this process. Raises `ConfigError`."""
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        raise ConfigError(
            f"discovery.kubernetes.namespaces: required, because {NAMESPACE_FILE} cannot be read"
        ) from None
