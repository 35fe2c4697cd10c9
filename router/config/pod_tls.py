"""Builds the TLS contexts for connections to pods. The only place that does."""

from __future__ import annotations

import ssl
from functools import cache

import structlog

from router.config.certificates import load_certificate
from router.config.file_stamp import FileStamp, stamps_of
from router.errors import ConfigError
from router.types import PodTls

log = structlog.get_logger()


def read_tls(files: PodTls) -> ssl.SSLContext:
    """A context with the authority and the client certificate in the files. Raises `ConfigError`."""
    try:
        context = ssl.create_default_context(cafile=files.ca_file or None)
    except ssl.SSLError:
        raise ConfigError(f"tls.ca_file: {files.ca_file} does not contain a certificate in PEM") from None
    except OSError as error:
        raise ConfigError(f"tls.ca_file: cannot read {files.ca_file}: {error.strerror}") from None
    if files.cert_file:
        load_certificate(context, files.cert_file, files.key_file)
    return context


def check_authority(ca_file: str) -> None:
    """Raises `ConfigError` unless the file contains a certificate."""
    try:
        read_tls(PodTls(ca_file=ca_file))
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("tls.ca_file: ")) from None


class PodTlsContext:
    """The current context of one set of files. If they become unreadable, the last context stays in use."""

    def __init__(self, files: PodTls) -> None:
        self._files = files
        self._context: ssl.SSLContext | None = None
        self._stamps: tuple[FileStamp | None, ...] = ()

    def current(self) -> ssl.SSLContext:
        """The context; read again if a file has changed. Called for each new connection. Raises `ConfigError` if the
        files were never readable."""
        stamps = stamps_of(self._files.ca_file, self._files.cert_file, self._files.key_file)
        if self._context is None or stamps != self._stamps:
            self._context = self._read()
            self._stamps = stamps
        return self._context

    def _read(self) -> ssl.SSLContext:
        try:
            return read_tls(self._files)
        except ConfigError as error:
            if self._context is None:
                raise
            log.error("TLS files for pods not readable; the last ones stay in use", error=str(error))
            return self._context


tls_of = cache(PodTlsContext)
"""The context of these files, shared by all connections to pods that use them."""
