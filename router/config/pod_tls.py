"""Builds the TLS contexts for connections to pods. The only place that does."""

from __future__ import annotations

import ssl
from functools import cache, partial

from router.config.certificates import load_certificate
from router.config.reloaded import Reloaded
from router.errors import ConfigError
from router.types import PodTls


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


@cache
def tls_of(files: PodTls) -> Reloaded[ssl.SSLContext]:
    """The context of these files, shared by all connections to pods that use them."""
    event = "TLS files for pods not readable; the last ones stay in use"
    return Reloaded(partial(read_tls, files), files.ca_file, files.cert_file, files.key_file, event=event)
