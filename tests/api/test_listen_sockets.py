"""Addresses that are in use, Unix sockets and their files."""

from __future__ import annotations

import socket
import stat
import sys
from pathlib import Path

import pytest

from router.config.schema import AdminListen
from router.errors import ConfigError
from router.frontends.http.server import address_of, bind_admin, bind_port, open_port

pytestmark = pytest.mark.net


def test_a_port_in_use_is_refused() -> None:
    """Two routers may share one if both say so (`listen.reuse_port`)."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for exclusive in (True, False):
            with pytest.raises(
                ConfigError, match=rf"listen: cannot bind 127\.0\.0\.1:{port}: .*set listen\.port or --port"
            ):
                bind_port("127.0.0.1", port, exclusive=exclusive)
        with pytest.raises(
            ConfigError, match=rf"admin: cannot bind 127\.0\.0\.1:{port}: .*set admin\.port or --admin-port"
        ):
            bind_admin(AdminListen(port=port))
    with bind_port("127.0.0.1", 0) as one, bind_port("127.0.0.1", one.getsockname()[1]) as two:
        assert one.getsockname() == two.getsockname()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the second cannot bind it")
def test_of_two_routers_that_load_tokenizers_at_once_one_opens_the_port() -> None:
    """Both can bind it before one of them listens."""
    with (
        bind_port("127.0.0.1", 0, exclusive=True) as one,
        bind_port(*one.getsockname(), exclusive=True) as two,
    ):
        open_port(one, 1)
        with pytest.raises(ConfigError, match=r"^listen: cannot open .*set listen\.port or --port$"):
            open_port(two, 1)


def test_two_colons_are_all_addresses_of_both_families() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with bind_port("::", 0) as both:
        open_port(both, 2)
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, both.getsockname()[1]), timeout=60).close()


def test_the_admin_port_belongs_to_one_router() -> None:
    """A second process of the same user cannot share it."""
    with bind_admin(AdminListen(port=0)) as ours:
        with pytest.raises(ConfigError, match="admin"):
            bind_admin(AdminListen(port=ours.getsockname()[1]))
        with pytest.raises(ConfigError):
            bind_port(*ours.getsockname())


def test_only_the_routers_own_user_can_connect_to_its_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with bind_admin(AdminListen(socket=str(path))) as ours:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert address_of(ours) == f"unix:{path}"


def test_a_unix_socket_is_replaced_unless_a_process_listens_on_it(tmp_path: Path) -> None:
    """A router that was killed leaves its file behind; another kind of file is not touched."""
    path = tmp_path / "admin.sock"
    listen = AdminListen(socket=str(path))
    bind_admin(listen).close()
    with bind_admin(listen), pytest.raises(ConfigError, match=rf"admin\.socket: {path} is in use"):
        bind_admin(listen)
    path.unlink()
    path.write_text("kept")
    with pytest.raises(ConfigError, match=rf"admin\.socket: cannot bind {path}"):
        bind_admin(listen)
    assert path.read_text() == "kept"


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")])
def test_an_address_is_shown_as_a_url(host: str, address: str) -> None:
    with bind_port(host, 0) as sock:
        assert address_of(sock) == f"{address}{sock.getsockname()[1]}"
