"""Files of TLS: of engines that ask for a client certificate of a private authority, and of the router's listener."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.config.credentials import ListenCertificate, tls_of
from router.config.schema import ListenTls
from router.errors import ConfigError, UpstreamError
from router.frontends.http.upstream import UpstreamPools
from router.types import PodTls
from tests.kit.deadlines import DEADLINE_S, GENEROUS
from tests.kit.raw_pods import OK, RawPod, answering
from tests.kit.scenes import make_pod
from tests.redis_servers.server import TlsFiles, tls_material

pytestmark = [
    pytest.mark.net,
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates"),
]


@asynccontextmanager
async def engine(files: TlsFiles) -> AsyncIterator[str]:
    """The URL of a pod that accepts only clients with a certificate of the authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.certificate, files.key)
    async with await asyncio.start_server(RawPod((answering(OK),)), "127.0.0.1", 0, ssl=context) as server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_requests_and_self_tests_use_the_authority_and_the_certificate(tmp_path: Path) -> None:
    """Without a certificate the engine refuses them."""
    files = tls_material(tmp_path)
    own = PodTls(str(files.ca), str(files.certificate), str(files.key))
    pools = UpstreamPools(GENEROUS)
    async with engine(files) as url:
        assert await pools.fetch(make_pod(url=url, tls=own), "/health", DEADLINE_S) == b"ok"
        pools.remove("a")
        with pytest.raises(UpstreamError):
            await pools.fetch(make_pod(url=url, tls=PodTls(str(files.ca))), "/health", DEADLINE_S)
        pools.close()


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    """Unreadable ones are not: the last context stays in use."""
    files = tls_material(tmp_path)
    context = tls_of(PodTls(str(files.ca)))
    first = context.current()
    assert context.current() is first
    os.utime(files.ca, ns=(1, 1))
    second = context.current()
    assert second is not first
    files.ca.write_text("no certificate")
    assert context.current() is second


def test_a_renewed_key_alone_is_noticed(tmp_path: Path) -> None:
    """The certificate may be written first."""
    files = tls_material(tmp_path)
    context = tls_of(PodTls(str(files.ca), str(files.certificate), str(files.key)))
    first = context.current()
    os.utime(files.key, ns=(1, 1))
    assert context.current() is not first


def test_unreadable_files_are_an_error_at_the_start(tmp_path: Path) -> None:
    """The file is named."""
    with pytest.raises(ConfigError, match=r"tls\.ca_file: cannot read .*ca\.crt"):
        tls_of(PodTls(str(tmp_path / "ca.crt"))).current()


def test_a_certificate_without_its_key_is_not_used(tmp_path: Path) -> None:
    """Until the key follows, the last pair stays in use."""
    folders = [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        folder.mkdir()
    old, new = map(tls_material, folders)
    listener = ListenCertificate(ListenTls(cert_file=str(old.certificate), key_file=str(old.key)))
    shutil.copy(new.certificate, old.certificate)
    listener.refresh()
    assert _presented(listener.context, tls_authority=new) is None
    shutil.copy(new.key, old.key)
    listener.refresh()
    assert _presented(listener.context, tls_authority=new)


def _presented(server: ssl.SSLContext, tls_authority: TlsFiles) -> bytes | None:
    """The certificate that a client of this authority gets in a handshake; None if it refuses it."""
    client = ssl.create_default_context(cafile=tls_authority.ca)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (asking, answering, asking):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError:
            return None
    return asking.getpeercert(binary_form=True)
