"""Nobody puts an address together or takes one apart by hand: IPv6 needs brackets, and parsers differ."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = "router/addresses.py"
EXCEPTIONS = {
    "router/cli/__init__.py": "module:attribute",
    "router/config/index_schema.py": "user:password",
    "router/feeds/discovery/pod_facts.py": "the id of a pod and a port",
    "router/frontends/extproc/gateway_exchange.py": "the family before a gRPC peer",
    "router/frontends/extproc/messages.py": "the type of a field",
    "loadtest/faults/hostile_soak.py": "the kind of an attack",
    "loadtest/peers/compare.py": "a line of /proc",
    "loadtest/faults/soak.py": "an address of /proc, in hexadecimal digits",
}
"""Files with something else than addresses that has a colon, and what."""
PARSERS = ("urlsplit", "urlparse")
SPLITS = ("split", "rsplit", "partition", "rpartition")


def by_hand(tree: ast.AST) -> Iterator[int]:
    """Lines that split at a colon, that write `{host}:{port}`, or that parse a URL."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name), args=[ast.Constant(value=":"), *_]) if name in SPLITS:
                yield node.lineno
            case ast.JoinedStr(values=values):
                if any(map(_is_address, values, values[1:], values[2:])):
                    yield node.lineno
            case ast.ImportFrom(module="urllib.parse", names=names) if {one.name for one in names} & {*PARSERS}:
                yield node.lineno


def _is_address(host: ast.expr, colon: ast.expr, port: ast.expr) -> bool:
    is_colon = isinstance(colon, ast.Constant) and colon.value in (":", "]:")
    return is_colon and isinstance(host, ast.FormattedValue) and "port" in ast.unparse(port)


def found() -> dict[str, list[int]]:
    paths = [path for folder in ("router", "loadtest", "helm") for path in sorted((ROOT / folder).rglob("*.py"))]
    lines = {str(path.relative_to(ROOT)): list(by_hand(ast.parse(path.read_text("utf-8")))) for path in paths}
    return {path: where for path, where in lines.items() if where and path != OWN}


def test_addresses_are_read_and_written_in_one_place() -> None:
    assert not {path: lines for path, lines in found().items() if path not in EXCEPTIONS}, f"use {OWN}"


def test_every_exception_is_needed() -> None:
    assert not EXCEPTIONS.keys() - found().keys()


@pytest.mark.parametrize(
    "line",
    [
        'url = f"http://{host}:{port}"',
        'url = f"http://[{host}]:{self.port}/v1"',
        'host, _, port = address.rpartition(":")',
        'host, port = address.split(":")',
        "from urllib.parse import quote, urlsplit",
    ],
)
def test_what_was_written_by_hand_before_would_be_found(line: str) -> None:
    """So that the test above can fail."""
    assert list(by_hand(ast.parse(line)))
