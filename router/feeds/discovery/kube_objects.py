"""Decodes pods and watch events of the Kubernetes API, only the fields that the router uses.

A decoder of `msgspec` skips the rest of an object, which is most of it: managed fields, volumes, container statuses.
Values are bounded by the size of a response and of a line. This file has no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

EXPIRED = 410
"""Status of a resource version that is too old."""
DELETED, BOOKMARK, ERROR = "DELETED", "BOOKMARK", "ERROR"
OWN_PREFIX = "warmroute.dev/"
MAX_VALUE_CHARACTERS = 1024
"""What is kept of an annotation: to say what is wrong with one of 256 KB took 26 ms. No fact is as long."""

ObjectKey: TypeAlias = tuple[str, str]
"""Namespace and name."""


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


@dataclass(frozen=True, slots=True)
class Changed:
    pod: KubePod
    version: str


@dataclass(frozen=True, slots=True)
class Deleted:
    key: ObjectKey
    uid: str
    version: str


@dataclass(frozen=True, slots=True)
class Bookmark:
    """All events before this version have been sent."""

    version: str


WatchEvent: TypeAlias = Changed | Deleted | Bookmark


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list. `more`: the token of the next one, empty on the last."""

    items: tuple[msgspec.Raw, ...]
    """Objects that are not decoded yet."""
    version: str
    more: str


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


_decode_list = msgspec.json.Decoder(_List).decode
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


def read_page(body: bytes) -> Page:
    """A page of a list. Raises `msgspec.DecodeError`."""
    found = _decode_list(body)
    return Page(tuple(found.items or ()), found.metadata.resource_version, found.metadata.continue_ or "")


def read_event(line: bytes, read: ReadPod) -> WatchEvent:
    """A line of a watch. Raises `msgspec.DecodeError`, and `KubeApiError` for a watch that failed and ends."""
    event = _decode_event(line)
    if event.type == ERROR:
        status = _decode_status(event.object)
        raise KubeApiError(status.code or 0, (status.message or "")[:500])
    if event.type == BOOKMARK:
        return Bookmark(_decode_meta(event.object).metadata.resource_version)
    if event.type == DELETED:
        meta = _decode_meta(event.object).metadata
        return Deleted((meta.namespace, meta.name), meta.uid, meta.resource_version)
    found, version = read(event.object)
    return Changed(found, version)


def error_message(body: bytes) -> str:
    """The message of an error response; empty if it has none."""
    try:
        return (_decode_status(body).message or "")[:500]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def read_labels(body: bytes) -> Mapping[str, str]:
    return _decode_meta(body).metadata.labels or {}
