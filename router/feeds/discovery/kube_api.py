"""Sends requests to the Kubernetes API server, with the credentials of a ServiceAccount, and explains refusals.

The token is read for each request, because the kubelet replaces it; a watch lasts about a minute. The authority is read
again when its file changes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import httpx

from router.config.discovery_schema import KubernetesApi
from router.config.pod_keys import read_key
from router.errors import ConfigError
from router.feeds.discovery.kube_objects import error_message
from router.types import PodTls

MAX_BODY_BYTES = 64 * 1024 * 1024
"""A list of 500 large pods takes 10 MB."""
MAX_LINE_BYTES = 4 * 1024 * 1024
"""Twice the largest object that the API server stores."""
GATHER_S, WAITED_S = 0.1, 0.005
"""After a wait for an event, those of the next 0.1 s are read together: a wait costs ten times as much as an event."""
REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 3.0
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubeApiError(Exception):
    """A request to the API server failed. `status` 0: there was no response."""

    def __init__(self, status: int, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Permission:
    """What a request needs. `namespace`: `*` for all."""

    group: str
    """Of the API, empty for the core."""
    resource: str
    verbs: tuple[str, ...]
    namespace: str

    def refusal(self, path: str, error: KubeApiError) -> str:
        """An error of the API server with what to do."""
        if error.status not in (401, 403):
            return f"{path}: {error.status or ''} {error}".replace("  ", " ")
        if error.status == 401:
            return f"{path}: 401 {error}; the API server does not accept the token (api.token_file)"
        role = "ClusterRole" if self.namespace == "*" else f"Role in namespace {self.namespace}"
        verbs = ", ".join(f'"{verb}"' for verb in self.verbs)
        return (
            f"{path}: 403 {error}; give the router's ServiceAccount a {role} with "
            f'apiGroups: ["{self.group}"], resources: ["{self.resource}"], verbs: [{verbs}]'
        )


class KubeApi:
    """The API server. Raises `ConfigError` if its address is unknown."""

    def __init__(self, api: KubernetesApi, client: httpx.AsyncClient) -> None:
        self._api = api
        self._client = client
        self._url = api.url or _cluster_url()
        ca_file = api.ca_file if Path(api.ca_file).exists() else ""
        self._extensions = {"tls_files": PodTls(ca_file=ca_file), "timeout": {"connect": CONNECT_TIMEOUT_S}}

    async def get(self, path: str, query: Mapping[str, str]) -> bytes:
        """The body of a successful response. Raises `KubeApiError`."""
        return await self._exchange(self._client.build_request("GET", self._url + path, params=query))

    async def create(self, path: str, created: bytes) -> None:
        """Create an object, given as JSON. Raises `KubeApiError`."""
        await self._exchange(self._with_body("POST", path, created, "application/json"))

    async def patch(self, path: str, changes: bytes) -> None:
        """Change fields of an object, given as a merge patch. Raises `KubeApiError`."""
        await self._exchange(self._with_body("PATCH", path, changes, "application/merge-patch+json"))

    async def lines(self, path: str, query: Mapping[str, str], limit_s: float) -> AsyncGenerator[list[bytes], None]:
        """The lines of a response as they arrive, first none when it begins. Raises `KubeApiError`, also if it does not
        end within `limit_s`."""
        rest, now_s = b"", asyncio.get_running_loop().time
        try:
            request = self._client.build_request("GET", self._url + path, params=query)
            async with asyncio.timeout(limit_s), self._open(request) as response:
                yield []
                asked_s = now_s()
                async for piece in response.aiter_bytes():
                    *lines, rest = (rest + piece).split(b"\n")
                    if len(rest) > MAX_LINE_BYTES:
                        raise KubeApiError(0, f"watch sent a line of more than {MAX_LINE_BYTES} bytes")
                    yield lines
                    if lines and now_s() - asked_s > WAITED_S:  # else more pieces may be here already
                        await asyncio.sleep(GATHER_S)
                    asked_s = now_s()
        except TimeoutError:
            raise KubeApiError(0, f"watch sent no end within {limit_s:g} s") from None

    def _with_body(self, method: str, path: str, body: bytes, content_type: str) -> httpx.Request:
        return self._client.build_request(
            method, self._url + path, content=body, headers={"content-type": content_type}
        )

    async def _exchange(self, request: httpx.Request) -> bytes:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S), self._open(request) as response:
                return await _read(response)
        except TimeoutError:
            raise KubeApiError(0, f"{self._url}: no response within {REQUEST_TIMEOUT_S:g} s") from None

    @asynccontextmanager
    async def _open(self, request: httpx.Request) -> AsyncIterator[httpx.Response]:
        request.headers.update(self._credentials())
        request.extensions = {**request.extensions, **self._extensions}
        try:
            response = await self._client.send(request, stream=True)
            try:
                if not response.is_success:
                    raise await _refused(response)
                yield response
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise KubeApiError(0, f"{self._url}: {type(error).__name__}: {error!s:.200}") from error
        except ConfigError as error:  # the authority cannot be read
            raise KubeApiError(0, str(error)) from error

    def _credentials(self) -> dict[str, str]:
        try:
            return {"authorization": f"Bearer {read_key(self._api.token_file)}"}
        except ConfigError:
            return {}  # the API server answers 401 if it needs one


async def _read(response: httpx.Response) -> bytes:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise KubeApiError(0, f"response of more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def _refused(response: httpx.Response) -> KubeApiError:
    message = error_message(await _read(response)) or HTTPStatus(response.status_code).phrase
    after = response.headers.get("retry-after", "")
    return KubeApiError(response.status_code, message, float(after) if after.isdecimal() and len(after) < 5 else 0.0)


def _cluster_url() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            "discovery.kubernetes: this process does not run in a cluster (KUBERNETES_SERVICE_HOST is not set); "
            "set discovery.kubernetes.api.url"
        )
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"


def own_namespace() -> str:
    """The namespace of this process. Raises `ConfigError`."""
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        raise ConfigError(
            f"discovery.kubernetes.namespaces: required, because {NAMESPACE_FILE} cannot be read"
        ) from None
