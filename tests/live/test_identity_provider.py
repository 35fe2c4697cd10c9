"""A router that accepts the tokens of a real identity provider (oidc-provider-mock, on Authlib).

The provider makes a new key whenever it starts, and gives it no name. Its tokens are ID tokens of the authorization
code flow.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import openai
import pytest

from loadtest.commands.child_processes import RouterUrls, free_port
from tests.live.engines import HOME
from tests.live.router_process import router

pytestmark = [pytest.mark.live, pytest.mark.net]
KEY, CALLBACK = "opaque-key", "http://localhost/callback"
WITHIN_S = 30.0
"""An unknown signing key is fetched at most every 10 s."""


@dataclass
class Provider:
    """The provider's address, which stays when it starts again."""

    port: int
    url: str

    @contextmanager
    def running(self, log: Path, *options: str) -> Iterator[None]:
        command = [str(HOME / "oidc/bin/oidc-provider-mock"), "--port", str(self.port), *options]
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            until(lambda: httpx.get(f"{self.url}/jwks").status_code == 200)
            yield
        finally:
            process.terminate()
            process.wait(10)

    def token(self, audience: str = "warmroute", tenant: str = "acme") -> str:
        """An ID token of a user of this tenant, who logs in for this client."""
        with httpx.Client(base_url=self.url, timeout=10) as client:
            client.put("/users/ann", json={"tenant": tenant}).raise_for_status()
            asked = {
                "client_id": audience,
                "redirect_uri": CALLBACK,
                "response_type": "code",
                "scope": "openid",
                "nonce": str(time.time_ns()),
            }
            login = client.post("/oauth2/authorize", params=asked, data={"sub": "ann"})
            code = parse_qs(urlsplit(login.headers["location"]).query)["code"][0]
            form = {"grant_type": "authorization_code", "code": code, "redirect_uri": CALLBACK}
            answer = client.post("/oauth2/token", data=form, auth=(audience, "any")).raise_for_status()
        token: str = answer.json()["id_token"]
        return token


def until(holds: Callable[[], bool]) -> None:
    """Wait until it holds; a connection that fails does not."""
    deadline_s = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline_s:
        try:
            if holds():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("not in time")


@pytest.fixture
def provider() -> Provider:
    port = free_port()
    return Provider(port, f"http://127.0.0.1:{port}")


@contextmanager
def site(folder: Path, provider: Provider) -> Iterator[RouterUrls]:
    """A mock engine, and a router with the tenant `acme`, who has a key, too."""
    (folder / "tenants.yaml").write_text(f"""
tenants: [{{name: acme, keys: [{sha256(KEY.encode()).hexdigest()}]}}]
oidc: [{{issuer: "{provider.url}", audiences: [warmroute]}}]
""")
    port = free_port()
    engine = subprocess.Popen([sys.executable, "-m", "router.cli", "mock-engine", "--port", str(port)])
    config = {
        "pods": [{"url": f"http://127.0.0.1:{port}"}],
        "tenants": str(folder / "tenants.yaml"),
        "unlisted_models": "engine",
    }
    try:
        with router(folder, config) as urls:
            yield urls
    finally:
        engine.terminate()
        engine.wait(10)


def asked(urls: RouterUrls, key: str) -> tuple[int, str]:
    """Status and error code of a list of models."""
    answer = httpx.get(f"{urls.public}/v1/models", headers={"authorization": f"Bearer {key}"})
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]


def failing(urls: RouterUrls) -> float:
    """What the metric says."""
    text = httpx.get(f"{urls.admin}/metrics").text
    line = next(line for line in text.splitlines() if line.startswith("warmroute_identity_providers_failing "))
    return float(line.split()[1])


def test_discovery_rotation_expiry_audience_and_failure(provider: Provider, tmp_path: Path) -> None:
    """From a provider that is down at first, through two of its keys, to one that is down again."""
    log = tmp_path / "provider.log"
    with site(tmp_path, provider) as urls:
        assert asked(urls, KEY) == (200, "") and failing(urls) == 1
        with provider.running(log):
            first = provider.token()
            until(lambda: asked(urls, first) == (200, ""))
            assert failing(urls) == 0
            assert asked(urls, provider.token(audience="another")) == (401, "invalid_api_key")
            assert asked(urls, provider.token(tenant="nobody")) == (403, "access_denied")
            assert asked(urls, first[:-6] + "AAAAAA")[0] == 401
            client = openai.OpenAI(base_url=f"{urls.public}/v1", api_key=first)
            assert client.models.list().data
        with provider.running(log, "--token-max-age", "-3600"):
            assert asked(urls, provider.token())[0] == 401  # its new key is not known yet, or it has expired
            until(lambda: asked(urls, provider.token()) == (401, "invalid_api_key"))
        with provider.running(log):
            second = provider.token()
            until(lambda: asked(urls, second) == (200, ""))
        assert asked(urls, second) == (200, "") and asked(urls, KEY) == (200, "")
        assert asked(urls, first)[0] == 401  # of a key that the provider has withdrawn
