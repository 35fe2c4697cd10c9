"""The keys `receipts`, `log` and `tracing` of `config/router.yaml`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from router.config.load import FilePath, HttpUrl, Strict


class Receipts(Strict):
    """Records of decisions. They contain prompts only with `prompts`, and never responses."""

    keep: NonNegativeInt = 1000
    """Decisions in memory, for `warmroute explain`: 7 KiB each with 10 pods, 13 with 100, 37 with 500."""
    file: FilePath | None = None
    """Append one line of JSON per request to this file, within a second."""
    max_file_bytes: NonNegativeInt = 256 * 1024 * 1024
    """A larger file is renamed to FILE.1, FILE.1 to FILE.2 and so on. 0: never."""
    rotated_files: PositiveInt = 4
    """Number of renamed files to keep."""
    replay_data: bool = True
    """Add to each line what `warmroute replay` needs."""
    prompts: bool = False
    """Add the prompts."""


class UsageFile(Strict):
    """What each request used, for bills."""

    file: FilePath | None = None
    """Append one line of JSON for each request that ended, in any way: tenant, model, adapter, prompt, cached, computed
    and output tokens, time to first token, status, and an id that no other line has. Lines that cannot be written, as
    on a full disk, are kept in memory (64 MiB) and written later."""


def _receipts(value: Any) -> Any:
    return {"file": value} if value is None or isinstance(value, str) else value


ReceiptsOrFile: TypeAlias = Annotated[Receipts, BeforeValidator(_receipts)]


class Log(Strict):
    """The log on stderr."""

    format: Literal["auto", "console", "json"] = "auto"
    """`auto`: console lines on a terminal, else JSON."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Less important lines are omitted. The line of a request has the level info."""
    requests: bool = True
    """One line for each request that ended: id, model, pod, policy, status, cached tokens, times."""
    requests_sample: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the requests that are logged."""


class TracingConfig(Strict):
    """OpenTelemetry traces of requests, exported over OTLP (HTTP, protobuf). Needs the extra `otel`."""

    enabled: bool = False
    endpoint: HttpUrl | None = None
    """Base URL of the collector, such as http://collector:4318. Default: `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or
    `OTEL_EXPORTER_OTLP_ENDPOINT` of the environment, else http://localhost:4318. `OTEL_EXPORTER_OTLP_HEADERS` and the
    SDK's other variables apply as well."""
    sample_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the requests without a `traceparent` that are traced; with one, its sampled flag decides."""
    max_requests_per_s: PositiveInt = 100
    """Traced requests a second, a bound because clients can set the sampled flag."""
