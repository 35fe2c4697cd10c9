"""Reads how to reach an API server from a kubeconfig file, for a router outside the cluster.

Only what needs no other program: server, authority, and token or client certificate of the current context. Plugins are
refused, and so is everything that would weaken TLS.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.config.certificates import read_tls
from router.config.load import Document, checked_url, plain, read_document
from router.errors import ConfigError
from router.types import PodTls

_REFUSED: Mapping[str, str] = {
    "exec": "plugins are not run; use a context with a token or a client certificate, such as that of a ServiceAccount "
    "(`kubectl create token`)",
    "auth-provider": "plugins are not run; use a context with a token or a client certificate",
    "username": "passwords are not supported; use a token or a client certificate",
    "insecure-skip-tls-verify": "not supported, since the token would reach any server; name its certificate-authority",
    "tls-server-name": "not supported; use a server address that is in its certificate",
    "proxy-url": "not supported; use a server address that needs no proxy",
}
_TOKEN = re.compile(r"[!-~]{1,8192}")


@dataclass(frozen=True, slots=True)
class KubeAccess:
    """How to reach an API server. Without `token`, it is read from `token_file`, if that exists."""

    url: str
    tls: PodTls
    token_file: str = ""
    token: str = ""


def read_kubeconfig(path: Path, folder: Path) -> KubeAccess:
    """The access of the current context. Certificates inside the file are written to `folder`. Raises `ConfigError`
    with file and line."""
    document = read_document(path)
    kubeconfig = _Kubeconfig(document, plain(document.data), folder)
    context = kubeconfig.named("contexts", "context", kubeconfig.text(kubeconfig.data, "current-context", ()))
    cluster = kubeconfig.named("clusters", "cluster", kubeconfig.text(context.values, "cluster", context.place))
    user = kubeconfig.named("users", "user", kubeconfig.text(context.values, "user", context.place))
    for section in cluster, user:
        kubeconfig.refuse(section)
    try:
        url = checked_url(kubeconfig.text(cluster.values, "server", cluster.place))
    except ValueError as error:
        raise kubeconfig.wrong((*cluster.place, "server"), str(error)) from None
    ca_file = kubeconfig.file(cluster, "certificate-authority")
    cert_file, key_file = kubeconfig.file(user, "client-certificate"), kubeconfig.file(user, "client-key")
    token, token_file = user.values.get("token", ""), kubeconfig.file(user, "tokenFile")
    if token and not (isinstance(token, str) and _TOKEN.fullmatch(token)):
        raise kubeconfig.wrong((*user.place, "token"), "must be one token, without spaces")
    if not (token or token_file or cert_file):
        raise kubeconfig.wrong(user.place, "has neither token nor client certificate")
    tls = PodTls(ca_file, cert_file, key_file)
    try:
        read_tls(tls)
    except ConfigError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix('tls.')}") from None
    return KubeAccess(url, tls, token_file, token)


@dataclass(frozen=True, slots=True)
class _Section:
    place: tuple[str | int, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Kubeconfig:
    document: Document
    data: Any
    folder: Path

    def wrong(self, place: tuple[str | int, ...], problem: str) -> ConfigError:
        """The error of a key. Values are not shown: they may be secrets."""
        file, line = self.document.place_of(place)
        return ConfigError(f"{file}:{line}: {'.'.join(map(str, place))}: {problem}")

    def text(self, values: Any, key: str, place: tuple[str | int, ...]) -> str:
        found = values.get(key) if isinstance(values, dict) else None
        if not isinstance(found, str) or not found:
            raise self.wrong((*place, key), "missing")
        return found

    def named(self, section: str, key: str, name: str) -> _Section:
        """The entry with this name of a list."""
        entries = self.data.get(section)
        for number, entry in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get(key), dict):
                return _Section((section, number, key), entry[key])
        raise self.wrong((section,), f"no entry named {name[:100]!r}, which the current context needs")

    def refuse(self, section: _Section) -> None:
        for key, problem in _REFUSED.items():
            if section.values.get(key):
                raise self.wrong((*section.place, key), problem)

    def file(self, section: _Section, key: str) -> str:
        """The path of a file: as named, relative to the kubeconfig, or with the data under `KEY-data`. Empty: none."""
        data = section.values.get(f"{key}-data")
        if data:
            try:
                content = base64.b64decode(data, validate=True)
            except (binascii.Error, TypeError, ValueError):
                raise self.wrong((*section.place, f"{key}-data"), "not base64") from None
            path = self.folder / key
            path.touch(mode=0o600)
            path.write_bytes(content)
            return str(path)
        named = section.values.get(key, "")
        if not isinstance(named, str):
            raise self.wrong((*section.place, key), "must be the path of a file")
        return str(self.document.path.parent / named) if named else ""
