"""Logging to stderr, as console lines or JSON: events through structlog, and one line for each request.

Prompts and responses are never logged.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from select import PIPE_BUF
from typing import Literal, TypeAlias

import msgspec
import structlog

from router.decision import Split
from router.errors import shortened
from router.observe.ended import Ended
from router.types import PromptPrefix

MAX_FIELD_CHARACTERS = 8192
"""A longer text in a field is shortened."""
MAX_ERROR_CHARACTERS = 500
"""A longer error of a request is shortened."""
MAX_FIELD_ITEMS = 50
"""A list in a field is cut here."""
WRITE_INTERVAL_S, MAX_WAITING_LINES = 0.1, 64

LogFormat: TypeAlias = Literal["auto", "console", "json"]
"""`auto`: console lines on a terminal, else JSON."""
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

_encode = msgspec.json.Encoder().encode


def configure_logging(log_format: LogFormat, level: LogLevel = "info") -> None:
    """Set up structlog, and the standard library's warnings and errors in the same form. Call once at start."""
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if not _is_json(log_format):
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    common: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _shortened_fields,
    ]
    structlog.configure(
        processors=[*common, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=common, processors=[remove_meta, renderer])
    )
    logging.basicConfig(handlers=[handler], level=max(LEVELS[level], logging.WARNING), force=True)


def _is_json(log_format: LogFormat) -> bool:
    return log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())


def _shortened_fields(_logger: object, _method: str, fields: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Limits every field, also tracebacks, whose last line may repeat what a client or a pod sent."""
    return {name: _shortened_field(value) for name, value in fields.items()}


def _shortened_field(value: object) -> object:
    if isinstance(value, str):
        return shortened(value, MAX_FIELD_CHARACTERS)
    return value[:MAX_FIELD_ITEMS] if isinstance(value, list | tuple) else value


class _Line(msgspec.Struct, omit_defaults=True, tag_field="event", tag="request", gc=False):
    """The names of the fields. A struct, because omitting those without a value takes a fifth of the time of a dict."""

    id: str = ""
    trace_id: str = ""
    client_request_id: str = ""
    endpoint: str = ""
    model: str = ""
    name: str = ""
    fallback: str = ""
    pod: str = ""
    prefill_pod: str = ""
    policy: str = ""
    workload: str = ""
    status: int = 0
    result: str = ""
    error: str = ""
    tries: int = 1
    continued: tuple[str, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    level: str = ""
    timestamp: datetime | None = None


LINE_FIELDS = _Line.__struct_fields__


def _line_of(ended: Ended) -> _Line:
    served, error, ttft_ms, e2e_ms = ended.served, ended.error, ended.ttft_ms, ended.e2e_ms
    return _Line(
        ended.id,
        ended.trace_id,
        ended.client_request_id,
        ended.endpoint,
        ended.model,
        ended.name,
        ended.fallback,
        served.pod.id if served is not None else "",
        served.plan.prefill.id if served is not None and isinstance(served.plan, Split) else "",
        ended.policy,
        ended.workload,
        ended.status,
        ended.result,
        shortened(error, MAX_ERROR_CHARACTERS) if error else "",
        ended.tries or 1,
        ended.continued,
        ended.prompt_tokens,
        ended.output_tokens,
        ended.cached_tokens,
        None if ttft_ms is None else round(ttft_ms, 1),
        round(e2e_ms, 1) if ended.is_read else None,
        "info",
        datetime.fromtimestamp(ended.at_s + e2e_ms / 1000, UTC),
    )


class RequestLog:
    """Writes a line for a share (0 to 1) of the requests, without structlog, which takes ten times as much CPU.

    With `later(delay_s, call)`, a timer, lines are written together, at most `WRITE_INTERVAL_S` late."""

    def __init__(
        self,
        log_format: LogFormat,
        share: float = 1.0,
        write: Callable[[str], object] | None = None,
        later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self._format = _json_line if _is_json(log_format) else _console_line
        self._share = share
        self._write = write or sys.stderr.write
        self._later = later
        self._credit = 0.0
        self._waiting: list[Ended] = []

    def ended(self, ended: Ended, _prompt: PromptPrefix | None = None) -> None:
        """Log one request, if it is in the sample."""
        self._credit += self._share
        if self._credit < 1:
            return
        self._credit -= 1
        self._waiting.append(ended)
        if self._later is None or len(self._waiting) >= MAX_WAITING_LINES:
            self._flush()
        elif len(self._waiting) == 1:
            self._later(WRITE_INTERVAL_S, self._flush)

    def close(self) -> None:
        """Write the lines that wait now, and later ones at once."""
        self._later = None
        self._flush()

    def _flush(self) -> None:
        """Write the lines that wait, in pieces that a pipe takes at once: lines of two processes do not mix."""
        waiting, self._waiting = self._waiting, []
        piece, piece_bytes = "", 0
        for text in map(self._format, map(_line_of, waiting)):
            text_bytes = len(text.encode())
            if piece and piece_bytes + text_bytes > PIPE_BUF:
                self._write(piece)
                piece, piece_bytes = "", 0
            piece, piece_bytes = piece + text, piece_bytes + text_bytes
        if piece:
            self._write(piece)


def _json_line(line: _Line) -> str:
    return _encode(line).decode() + "\n"


def _console_line(line: _Line) -> str:
    """Formatted as by structlog. Where a value has spaces or control characters, all values are quoted."""
    facts = zip(LINE_FIELDS[:-2], msgspec.structs.astuple(line), _DEFAULTS, strict=False)
    fields = {name: value for name, value, default in facts if value != default}
    text = " ".join([f"{name}={value}" for name, value in fields.items()])
    if not text.isprintable() or text.count(" ") >= len(fields):
        plain = {name: str(value) if isinstance(value, str) else value for name, value in fields.items()}  # no enum
        text = " ".join([f"{name}={value!r}" for name, value in plain.items()])
    return f"{line.timestamp:%Y-%m-%dT%H:%M:%S.%fZ} [{line.level:9}] request  {text}\n"


_DEFAULTS = msgspec.structs.astuple(_Line())
