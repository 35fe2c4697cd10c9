"""Reads certificates, private keys and bearer tokens from files, again when these change.

Certificates are those of the listener and of connections to pods; what is wrong with them is found before they are
used. Keys that the router presents to pods are in `pod_keys.py`.
"""

from __future__ import annotations

import asyncio
import hmac
import ssl
from functools import cache, partial

from router.config.load import read_named
from router.config.schema import AdminListen, ListenTls
from router.config.watched_file import StaleFile, WatchedFile, watched
from router.errors import ConfigError
from router.types import PodTls


def load_certificate(context: ssl.SSLContext, cert_file: str, key_file: str | None) -> None:
    """Use them in new connections of the context. Raises `ConfigError`, and then the context keeps what it has."""
    key_file = key_file or cert_file
    read_named("tls.cert_file", cert_file)
    read_named("tls.key_file", key_file)
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(trial, cert_file, key_file)
    _check_validity(trial, cert_file)
    _load(context, cert_file, key_file)


def _load(context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(cert_file, key_file, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"tls.key_file: {key_file} is not the key of the certificate in {cert_file}") from None
        certificate = _is_certificate(cert_file)
        key, path, expected = (
            ("key_file", key_file, "a private key without a password")
            if certificate
            else ("cert_file", cert_file, "a certificate")
        )
        raise ConfigError(f"tls.{key}: {path} does not contain {expected} in PEM") from None


def _is_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (OSError, ValueError):
        return False
    return True


def _check_validity(server: ssl.SSLContext, cert_file: str) -> None:
    """Raises `ConfigError` if the certificate is not valid today: a client that trusts it refuses a handshake in
    memory."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert_file)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    for end in (*ends, *ends):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in _INVALID_TODAY:
                raise ConfigError(
                    f"tls.cert_file: {cert_file}: {error.verify_message}; renew it, or set the clock"
                ) from None
            return
        except ssl.SSLError:
            return


_INVALID_TODAY = (9, 10)
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""
CERTIFICATE_CHECK_S = 1.0


class ListenCertificate:
    """The TLS context of the public listener. Raises `ConfigError` if its files cannot be used."""

    def __init__(self, files: ListenTls) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self._files = files
        event = "certificate of the listener not usable; the last one stays in use"
        self._loaded = watched(self._load, files.cert_file, files.key_file, event=event)
        self.refresh()

    def refresh(self) -> None:
        """Read the files again if they have changed. If they cannot be used, the last certificate stays in use."""
        self._loaded.current()

    async def follow(self) -> None:
        """Refresh until cancelled."""
        while True:
            await asyncio.sleep(CERTIFICATE_CHECK_S)
            self.refresh()

    @property
    def stale(self) -> StaleFile | None:
        problem = f"not usable; the last one stays in use: {self._loaded.error}"
        return StaleFile(self._files.cert_file, problem, self._loaded.failed_since_s) if self._loaded.error else None

    def _load(self) -> ssl.SSLContext:
        load_certificate(self.context, self._files.cert_file, self._files.key_file)
        return self.context


# --- connections to pods ---


def read_tls(files: PodTls) -> ssl.SSLContext:
    """A context with the authority and the client certificate in the files. Raises `ConfigError`."""
    if files.ca_file:
        read_named("tls.ca_file", files.ca_file)
    try:
        context = ssl.create_default_context(cafile=files.ca_file or None)
    except ssl.SSLError:
        raise ConfigError(f"tls.ca_file: {files.ca_file} does not contain a certificate in PEM") from None
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
def tls_of(files: PodTls) -> WatchedFile[ssl.SSLContext]:
    """The context of these files, shared by all connections to pods that use them."""
    event = "TLS files for pods not readable; the last ones stay in use"
    return watched(partial(read_tls, files), files.ca_file, files.cert_file, files.key_file, event=event)


# --- bearer tokens ---


class BearerFile:
    """The tokens in a file, one a line: with two of them, a token is rotated without a gap. A file that becomes
    unreadable accepts no token. Raises `ConfigError` if it has none at first. `key` is the file's in router.yaml."""

    def __init__(self, path: str, key: str) -> None:
        self._file = watched(partial(_read_tokens, path, key), path, event="bearer tokens cannot be read")
        self._file.current()

    def accepts(self, token: bytes) -> bool:
        """Whether the file contains this token. Compares in constant time."""
        tokens = self._file.current()
        return not self._file.error and any(hmac.compare_digest(token, known) for known in tokens)


def _read_tokens(path: str, key: str) -> list[bytes]:
    tokens = list(filter(None, map(bytes.strip, read_named(key, path).splitlines())))
    if not tokens:
        raise ConfigError(f"{key}: {path} contains no token; write one on a line of its own")
    return tokens


def admin_tokens(listen: AdminListen) -> BearerFile | None:
    """The tokens that the admin listener accepts; None if it needs none. Raises `ConfigError`."""
    return BearerFile(listen.bearer_file, "admin.bearer_file") if listen.bearer_file else None
