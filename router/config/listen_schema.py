"""The keys `listen` and `admin` of `config/router.yaml`: the listeners of the router."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, ValidationInfo, field_validator

from router.addresses import read_host
from router.config.load import FilePath, SecretPath, Strict
from router.config.pod_schema import SocketPath


def _host(value: str) -> str:
    """The host; a link-local address may name its zone, such as fe80::1%eth0."""
    address, percent, zone = value.partition("%")
    return read_host(address) + percent + zone


def _one_process(workers: int) -> int:
    if workers != 1:
        raise ValueError(
            f"a router is one process: start {workers} with `listen: {{reuse_port: true}}`, the same `index.redis` and "
            "different --admin-port; with the chart, set `replicaCount`"
        )
    return workers


Host = Annotated[str, AfterValidator(_host)]
ListenPort = Annotated[int, Field(ge=0, le=65535)]


class ListenTls(Strict):
    """The certificate that clients see. Both files are read again when they change."""

    cert_file: FilePath
    """The certificate, followed by those of intermediate authorities, in PEM."""
    key_file: SecretPath | None = None
    """Its key, without a password. Default: it is in `cert_file`."""


class Listen(Strict):
    """The address that clients connect to."""

    host: Host = "127.0.0.1"
    """"::" is all addresses of the machine, IPv4 and IPv6; 0.0.0.0 those of IPv4."""
    port: ListenPort = 8080
    tls: ListenTls | None = None
    """TLS for clients. The admin listener has none."""
    reuse_port: bool = False
    """Whether other routers of this user may listen on the same port: the kernel then spreads connections over them.
    A router uses one core; several on one machine share `index.redis`."""
    workers: Annotated[int, AfterValidator(_one_process)] = 1
    """Accepted for configurations of older releases."""


class PickerListen(Strict):
    """What `warmroute picker` serves in place of `listen`: the endpoint picker of a gateway, by gRPC."""

    host: Host = "127.0.0.1"
    """The gateway is believed: let nothing else connect."""
    port: ListenPort = 9002
    tls: ListenTls | None = None
    """TLS for the gateway. The files are read at the start."""
    fallbacks: Annotated[int, Field(ge=0, le=8)] = 0
    """Further addresses after the best one, for retries of the gateway. Only where its cluster takes a list
    (`override_host`); one with ORIGINAL_DST refuses requests with more than one address."""
    message_timeout_s: PositiveFloat = 0.2
    """`message_timeout` of the gateway's filter, which only counts where it buffers requests: one that would take
    longer is refused by then."""
    requests: Literal["gateway", "picker"] = "gateway"
    """Who sends requests to pods: the gateway, to the pod that the picker names; or the picker, whose response the
    gateway passes on. Then requests are tried again, streams continued and KV pulled as by `warmroute serve`."""
    prefill: Literal["picker", "sidecar"] = "picker"
    """Who sends the prefill requests of handoffs: the picker, before it names the decode pod, whose body then names the
    KV; or llm-d's sidecar in the decode pod, which reads the prefill pod from `x-prefiller-host-port`."""
    test_header: bool = False
    """Whether clients may choose pods with the header `test-epp-endpoint-selection`, as the conformance tests of
    gateways do. Never where clients are not trusted."""


class AdminListen(Strict):
    """The listener for operators: /metrics, /admin and the detailed /readyz."""

    host: Host = "127.0.0.1"
    port: ListenPort = 9480
    socket: SocketPath = ""
    """A Unix socket to listen on instead. Only the router's own user can connect."""
    bearer_file: SecretPath | None = Field(default=None, validate_default=True)
    """A file with the accepted bearer tokens, one a line; read again when it changes. Required unless `host` is a
    loopback address. Without it, only processes of this machine are served."""
    gpu_hour_price: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The price of one GPU for one hour: with it, the operators' page shows the money that hits of prefix caches
    saved."""
    currency: Annotated[str, Field(max_length=8)] = "USD"
    """The currency of `gpu_hour_price`."""

    @field_validator("bearer_file")
    @classmethod
    def _others_need_a_token(cls, value: str | None, info: ValidationInfo) -> str | None:
        host = info.data.get("host", "127.0.0.1")
        if value is None and not info.data.get("socket") and not is_loopback(host):
            raise ValueError("required, because `host` is not a loopback address; name a file with a token")
        return value


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to the host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
