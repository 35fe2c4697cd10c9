"""Logs and records the changes of pods, and says why one cannot be used and what to do."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, TypeAlias

import structlog

from router.addresses import split_url, url_host
from router.engines.adapter import PodFacts
from router.engines.engine_catalog import ENGINES
from router.engines.forwarded_paths import api_end
from router.errors import UpstreamBroken, UpstreamError, shortened
from router.fleet.fleet import Fleet, Listener
from router.guards import OutOfBounds
from router.observe.changes import ChangeKind, Changes
from router.types import Pod, PodState

MAX_REASON_CHARACTERS = 400
Fetch: TypeAlias = Callable[[Pod, str, float], Awaitable[bytes]]
"""GET a path of a pod within a timeout in seconds; returns the body of a 200 response. Raises `UpstreamError`."""
Post: TypeAlias = Callable[[Pod, str, Mapping[str, Any], float], Awaitable[bytes]]
"""The same for a POST of JSON."""

_REASONS: Mapping[PodState, str] = {
    PodState.JOINING: "undrained",
    PodState.READY: "health check passed",
    PodState.DRAINING: "admin call",
    PodState.GONE: "removed, or no longer listed",
}
"""Reasons of changes for which the fleet records none."""
_SERVING = (PodState.READY, PodState.EJECTED)
_KINDS: Mapping[tuple[PodState, PodState], ChangeKind] = {
    (PodState.JOINING, PodState.READY): "joined",
    (PodState.READY, PodState.EJECTED): "ejected",
    (PodState.EJECTED, PodState.READY): "readmitted",
    **{(old, new): "left" for old in _SERVING for new in (PodState.DRAINING, PodState.GONE)},
}
"""The changes of state that change what the fleet can serve. A pod that is drained has left; its end is no change."""
_ALLOWED = " that `pods[].models` allows"
_CHECK = "check that the URL is an engine's and `engine` is right"
_DENIED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)

log = structlog.get_logger()


async def fetch_facts(fetch: Fetch, pod: Pod, timeout_s: float) -> PodFacts:
    """What the pod reports about itself. Raises `UpstreamError` if it does not list its models."""
    adapter = ENGINES[pod.engine]
    paths = adapter.describe_paths
    results = await asyncio.gather(*(fetch(pod, path, timeout_s) for path in paths), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, UpstreamError):
            raise result
    answers = {path: body for path, body in zip(paths, results, strict=True) if isinstance(body, bytes)}
    try:
        facts = adapter.describe(answers, pod)
    except OutOfBounds as error:
        raise UpstreamBroken(f"pod {pod.id}: {error}", pod=pod.id) from error
    if facts is not None:
        return facts
    if isinstance(results[0], UpstreamError):
        raise results[0]
    raise UpstreamBroken(f"{paths[0]} lists no models{_ALLOWED if pod.allowed_models else ''}; {_CHECK}")


def excess(error: Exception) -> str:
    """What the pod sent too much of; empty for errors of another cause."""
    return str(next((cause for cause in _causes(error) if isinstance(cause, OutOfBounds)), ""))


def unusable_reason(pod: Pod, error: UpstreamError) -> str:
    """What is wrong and what to do, for an error of a probe of the pod."""
    problem = _connect_problem(pod, error) or _status_problem(pod, error) or str(error)
    return shortened(problem.removeprefix(f"pod {pod.id}: "), MAX_REASON_CHARACTERS)


def _connect_problem(pod: Pod, error: UpstreamError) -> str:
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            return f"unknown host name {url_host(pod.url)!r}; correct pods[].url or the DNS of this machine"
        if isinstance(cause, ssl.SSLError):
            return _tls_problem(pod, cause)
        if isinstance(cause, ConnectionRefusedError):
            return f"connection refused by {_address(pod)}; check that the engine runs and listens there"
    return ""


def _tls_problem(pod: Pod, error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        if "mismatch" in why:
            return f"TLS certificate is not for this host ({why}); correct the host in pods[].url"
        return f"TLS certificate not trusted ({why}); set pods[].tls.ca_file to the certificate of its authority"
    return f"TLS handshake failed ({error.reason}); check that {_address(pod)} serves https, or use http in pods[].url"


def _status_problem(pod: Pod, error: UpstreamError) -> str:
    if not isinstance(error, UpstreamBroken) or error.status not in (*_DENIED, HTTPStatus.NOT_FOUND):
        return ""
    if error.status == HTTPStatus.NOT_FOUND:
        path = split_url(pod.url).path
        unneeded = api_end(path)
        wrong = f"remove {unneeded}, which the router appends, from" if unneeded else f"check the path {path} of"
        return f"{error}; {wrong} pods[].url" if path else ""
    if source := pod.bearer_file or pod.bearer_env:
        return f"{error.status} {HTTPStatus(error.status).phrase}; the engine does not accept the key of {source}"
    return f"{error}; set pods[].auth.bearer_file, or bearer_env, to the engine's API key"


def _address(pod: Pod) -> str:
    return pod.socket or split_url(pod.url).netloc


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def log_changes(fleet: Fleet, changes: Changes | None = None) -> Listener:
    """A listener of the fleet, which also adds to `changes`. An ejection is a warning, other changes are info."""
    record = (changes or Changes()).add

    def on_change(pod: Pod, old: PodState, new: PodState) -> None:
        if old is new:
            log.info("pod restarted; its cache is empty", pod=pod.id, epoch=pod.epoch)
            record("restarted", pod.id, "a new process answers; its cache is empty")
            return
        reason = "found" if old is PodState.GONE else fleet.state_reason(pod.id) or _REASONS.get(new, "")
        write = log.warning if new is PodState.EJECTED else log.info
        write("pod state changed", pod=pod.id, old=old.value, new=new.value, reason=reason)
        if kind := _KINDS.get((old, new)):
            record(kind, pod.id, reason)

    return on_change
