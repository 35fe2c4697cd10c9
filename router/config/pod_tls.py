"""Builds the TLS contexts for connections to pods. The only place that does."""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path

import structlog

from router.errors import ConfigError
from router.types import PodTls

log = structlog.get_logger()


def read_tls(files: PodTls) -> ssl.SSLContext:
    """A context with the authority and the client certificate in the files. Raises `ConfigError`."""
    for path in filter(None, (files.ca_file, files.cert_file, files.key_file)):
        if not Path(path).is_file():
            raise ConfigError(f"tls: cannot read {path}: no such file")
    try:
        context = ssl.create_default_context(cafile=files.ca_file or None)
    except OSError as error:
        raise ConfigError(f"tls.ca_file: {files.ca_file} holds no certificate that can be read: {error}") from error
    if files.cert_file:
        _load_client_certificate(context, files)
    return context


def _load_client_certificate(context: ssl.SSLContext, files: PodTls) -> None:
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(files.cert_file, files.key_file or None, password="")
    except OSError as error:
        key = files.key_file or files.cert_file
        raise ConfigError(f"tls.cert_file: {files.cert_file} and the key in {key} cannot be used: {error}") from error


class PodTlsContext:
    """The current context of one set of files. If they become unreadable, the last context stays in use."""

    def __init__(self, files: PodTls) -> None:
        self._files = files
        self._context: ssl.SSLContext | None = None
        self._changed_ns: tuple[int, ...] | None = None

    def current(self) -> ssl.SSLContext:
        """The context; read again if a file has changed. Called for each new connection. Raises `ConfigError` if the
        files were never readable."""
        changed_ns = tuple(_changed_ns(path) for path in (self._files.ca_file, self._files.cert_file))
        if self._context is None or changed_ns != self._changed_ns:
            self._context = self._read()
            self._changed_ns = changed_ns
        return self._context

    def _read(self) -> ssl.SSLContext:
        try:
            return read_tls(self._files)
        except ConfigError as error:
            if self._context is None:
                raise
            log.error("TLS files for pods not readable; the last ones stay in use", error=str(error))
            return self._context


def _changed_ns(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns if path else 0
    except OSError:
        return 0


tls_of = cache(PodTlsContext)
"""The context of these files, shared by all connections to pods that use them."""
