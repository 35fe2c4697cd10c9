"""Serves gateways by gRPC: the endpoint picker, and the health checks of `grpc.health.v1`.

On SIGTERM the health checks fail, so that gateways stop asking. After a delay no stream is accepted. Streams may end
by themselves; those that remain are closed without an error, and their responses go on without the picker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import structlog

from router.addresses import join_address
from router.config.schema import ListenTls, RouterConfig
from router.errors import ConfigError
from router.frontends.extproc.gateway_exchange import AnsweringExchange, GatewayExchange, GatewayTerms
from router.frontends.extproc.messages import HealthCheckRequest, HealthCheckResponse
from router.frontends.extproc.metadata import aliases
from router.frontends.http.http_edge import HttpEdge

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_SERVICES = frozenset({b"", b"liveness", b"readiness", b"inference-extension", SERVICE.encode()})
_SERVING, _NOT_SERVING = 1, 2
_MESSAGE_BYTES = 4 * 1024 * 1024
"""What a message may have, in addition to a whole body where the gateway may buffer it: gRPC's own limit. gRPC buffers
messages. A gateway under load sends all that it has buffered at once, which may be more than its own limit of 1 MiB."""

log = structlog.get_logger()


class PickerServer:
    """The gRPC server. `is_ready`: whether the fleet can serve. `priority`: of requests, by their objective."""

    def __init__(
        self, edge: HttpEdge, config: RouterConfig, is_ready: Callable[[], bool], priority: Callable[[bytes], int]
    ) -> None:
        self._edge = edge
        self._picker = config.picker
        self._is_ready = is_ready
        names = aliases(config.edge.tenant_header)
        self._terms = GatewayTerms(edge, names, priority, config.picker.test_header)
        self._exchange = AnsweringExchange if config.picker.requests == "picker" else GatewayExchange
        if config.providers and not self._exchange.answers:
            log.warning("providers are not asked", hint="the gateway sends all requests; see picker.requests")
        whole_bytes = 0 if self._exchange.answers else config.limits.max_body_bytes
        self._exchanges: dict[GatewayExchange, asyncio.Task[Any]] = {}
        options = [
            ("grpc.max_receive_message_length", _MESSAGE_BYTES + whole_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.max_ping_strikes", 0),  # a gateway may check its connection as often as it wants
            ("grpc.keepalive_permit_without_calls", 1),
        ]
        self._server = grpc.aio.server(options=options)
        process = grpc.stream_stream_rpc_method_handler(self._process)
        check = grpc.unary_unary_rpc_method_handler(self._check)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
                grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),
            )
        )

    async def open(self) -> int:
        """Listen. Returns the port. Raises `ConfigError` if it is taken."""
        files, address = self._picker.tls, join_address(self._picker.host, self._picker.port)
        try:
            if files is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, _credentials(files))
        except RuntimeError as error:
            raise ConfigError(f"picker.port: cannot listen on {address}: {error}") from error
        await self._server.start()
        return int(port)

    async def close(self, delay_s: float, timeout_s: float) -> None:
        """Stop without losing a response."""
        self._edge.is_stopping = True
        await asyncio.sleep(delay_s)
        stopping = asyncio.ensure_future(self._server.stop(timeout_s + 1.0))
        if self._exchanges:
            await asyncio.wait([*self._exchanges.values(), stopping], timeout=timeout_s)
        for exchange, task in self._exchanges.items():
            exchange.is_stopping = True
            task.cancel()
        await stopping

    @property
    def streams(self) -> int:
        """Requests in progress."""
        return len(self._exchanges)

    async def _check(self, data: bytes, call: Any) -> bytes:
        """Answer a health check. `liveness` is served while the process lives."""
        service = HealthCheckRequest.FromString(data).service
        if service not in HEALTH_SERVICES:
            await call.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        serves = service == b"liveness" or self._is_ready()
        answer: bytes = HealthCheckResponse(status=_SERVING if serves else _NOT_SERVING).SerializeToString()
        return answer

    async def _process(self, _requests: Any, call: Any) -> None:
        """Serve one stream, which is one request."""
        task = asyncio.current_task()
        assert task is not None
        exchange = self._exchange(call, self._terms)
        self._exchanges[exchange] = task
        try:
            await exchange.serve()
        except asyncio.CancelledError:
            if not exchange.is_stopping:
                raise
            await exchange.stop()
        finally:
            del self._exchanges[exchange]
        if exchange.was_reset:
            raise asyncio.CancelledError  # gRPC has nothing to send any more


def _credentials(files: ListenTls) -> grpc.ServerCredentials:
    certificate, key = Path(files.cert_file), Path(files.key_file or files.cert_file)
    return grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
