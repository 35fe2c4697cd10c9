"""A router outside the cluster reaches the API server as a kubeconfig file says."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from router.errors import ConfigError
from router.feeds.discovery.kubeconfig import read_kubeconfig
from tests.redis_servers.server import tls_material


def kubeconfig(user: dict[str, Any], **cluster: Any) -> dict[str, Any]:
    """What kubectl writes, with two contexts."""
    return {
        "apiVersion": "v1",
        "current-context": "kind",
        "contexts": [
            {"name": "other", "context": {"cluster": "none", "user": "none"}},
            {"name": "kind", "context": {"cluster": "c", "user": "u", "namespace": "models"}},
        ],
        "clusters": [{"name": "c", "cluster": {"server": "https://10.0.0.1:6443", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }


def written(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "config"
    with path.open("w") as file:
        YAML(typ="safe").dump(data, file)
    return path


def test_a_token_and_files_next_to_the_kubeconfig(tmp_path: Path) -> None:
    """Paths are relative to it, as for kubectl."""
    authority = tls_material(tmp_path).ca.rename(tmp_path / "authority.crt")
    path = written(tmp_path, kubeconfig({"token": "secret"}, **{"certificate-authority": "authority.crt"}))
    found = read_kubeconfig(path, tmp_path)
    assert (found.url, found.token, found.tls.ca_file) == ("https://10.0.0.1:6443", "secret", str(authority))
    found = read_kubeconfig(written(tmp_path, kubeconfig({"tokenFile": "/run/token"})), tmp_path)
    assert (found.token_file, found.token, found.tls.ca_file) == ("/run/token", "", "")


def test_a_client_certificate_inside_the_file(tmp_path: Path) -> None:
    """Only the router's own user can read the copies."""
    files = tls_material(tmp_path)
    user = {"client-certificate-data": encoded(files.certificate), "client-key-data": encoded(files.key)}
    path = written(tmp_path, kubeconfig(user, **{"certificate-authority-data": encoded(files.ca)}))
    (tmp_path / "copies").mkdir()
    tls = read_kubeconfig(path, tmp_path / "copies").tls
    copies = [Path(file) for file in (tls.ca_file, tls.cert_file, tls.key_file)]
    assert [file.read_bytes() for file in copies] == [
        each.read_bytes() for each in (files.ca, files.certificate, files.key)
    ]
    assert {file.stat().st_mode & 0o777 for file in copies} == {0o600}


def encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def test_an_authority_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """With the kubeconfig that names it."""
    path = written(tmp_path, kubeconfig({"token": "secret"}, **{"certificate-authority": "none.crt"}))
    with pytest.raises(ConfigError, match=rf"^{path}: ca_file: cannot read a file"):
        read_kubeconfig(path, tmp_path)


@pytest.mark.parametrize(
    ("user", "cluster", "where"),
    [
        ({"exec": {"command": "aws"}}, {}, r"users\.0\.user\.exec: plugins are not run; .*kubectl create token"),
        ({"auth-provider": {"name": "gcp"}}, {}, r"users\.0\.user\.auth-provider: plugins are not run"),
        ({"username": "admin", "password": "secret"}, {}, r"users\.0\.user\.username: passwords"),
        ({"token": "secret"}, {"insecure-skip-tls-verify": True}, r"clusters\.0\.cluster\.insecure-skip-tls-verify"),
        ({"token": "secret"}, {"proxy-url": "http://p"}, r"clusters\.0\.cluster\.proxy-url"),
        ({"token": "secret"}, {"server": "secret"}, r"clusters\.0\.cluster\.server: must look like http"),
        ({"token": "secret two"}, {}, r"users\.0\.user\.token: must be one token"),
        ({"token": "secret"}, {"certificate-authority-data": "sec ret"}, r"certificate-authority-data: not base64"),
        ({}, {}, r"users\.0\.user: has neither"),
    ],
)
def test_what_is_not_supported_is_refused_with_file_and_line(
    tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], where: str
) -> None:
    """Without the values, which may be secrets."""
    path = written(tmp_path, kubeconfig(user, **cluster))
    with pytest.raises(ConfigError, match=rf"^{path}:\d+: .*{where}") as refused:
        read_kubeconfig(path, tmp_path)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("wrong", [[], {}, {"current-context": 7}, {"current-context": "x", "contexts": "y"}])
def test_a_file_that_is_no_kubeconfig_is_an_error(tmp_path: Path, wrong: Any) -> None:
    """It names the key that is missing."""
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/config:1: (current-context|contexts): "):
        read_kubeconfig(written(tmp_path, wrong), tmp_path)
