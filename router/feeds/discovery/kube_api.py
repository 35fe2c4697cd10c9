"""Sends requests to the Kubernetes API server, with the credentials of a ServiceAccount.

The token is read for each request, because the kubelet replaces it; a watch lasts about a minute. The authority is read
again when its file changes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
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


class KubeApi:
    """The API server. Raises `ConfigError` if its address is unknown."""

    def __init__(self, api: KubernetesApi, client: httpx.AsyncClient) -> None:
        self._api = api
        self._client = client
        self._url = api.url or _cluster_url()
        ca_file = api.ca_file if Path(api.ca_file).exists() else ""
        self._extensions = {"tls_files": PodTls(ca_file=ca_file), "timeout": {"connect": CONNECT_TIMEOUT_S}}

    async def get(self, path: str, query: Mapping[str, str]) -> bytes:
        """The body of a 200 response. Raises `KubeApiError`."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S), self._open(path, query) as response:
                return await _read(response)
        except TimeoutError:
            raise KubeApiError(0, f"{self._url}: no response within {REQUEST_TIMEOUT_S:g} s") from None

    async def lines(self, path: str, query: Mapping[str, str], limit_s: float) -> AsyncGenerator[list[bytes], None]:
        """The lines of a response as they arrive, first none when it begins. Raises `KubeApiError`, also if it does not
        end within `limit_s`."""
        rest, now_s = b"", asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(limit_s), self._open(path, query) as response:
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

    @asynccontextmanager
    async def _open(self, path: str, query: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        request = self._client.build_request("GET", self._url + path, params=query, headers=self._headers())
        request.extensions = {**request.extensions, **self._extensions}
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != HTTPStatus.OK:
                    raise await _refused(response)
                yield response
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise KubeApiError(0, f"{self._url}: {type(error).__name__}: {error!s:.200}") from error
        except ConfigError as error:  # the authority cannot be read
            raise KubeApiError(0, str(error)) from error

    def _headers(self) -> dict[str, str]:
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
