"""Whatever decodes bytes from outside does so through a bound of `router/guards.py`, or is listed here with a reason.

Found are: decoders of msgspec and `json.loads`, messages of sockets, numbers in text that was matched or split, and
patterns in which a repetition repeats another, which may take quadratic time. A new one fails here: state a `Bound` and
read through it, or add it below and say why nobody outside can make it expensive.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from re import _parser as parser  # type: ignore[attr-defined]

import pytest

from tests.style.test_structure import modules

TRUSTED = {
    "cli/": "a tool of the operator, who stops it",
    "config/": "files of the operator",
    "guards.py": "the bounds themselves",
}
"""Folders and files that read nothing of others."""
_CLIENT = "a client's body, within `limits`; long ones are read in a thread or in slices"
_STORES = "stores: Redis sends no value that exceeds a bound"
_ARRAY = "an array of the router's own"
EXCEPTIONS = {
    "admission/names.py:_begin": _CLIENT,
    "admission/names.py:_parts": _CLIENT,
    "admission/names.py:_unmarked": "at most 1,024 fields",
    "addresses.py:read_address": "at most five digits",
    "admission/jwt_verifier.py:read_signing_keys": "an identity provider of the configuration",
    "admission/jwt_verifier.py:JwtVerifier._verify": "a header that `limits` bounds, by the library for tokens",
    "engines/providers.py:_run_by_clients": _CLIENT,
    "engines/providers.py:provider_body": _CLIENT,
    "engines/forwarded_paths.py:": "each repetition begins with a slash, which it does not repeat",
    "engines/prometheus.py:_sample": "a line of at most 8 KiB",
    "engines/handoff/bodies.py:edited": _CLIENT,
    "engines/handoff/bodies.py:whole_response": "`read_prefill` has accepted it within its bound",
    "engines/handoff/dialect.py:split_refusal": _CLIENT,
    "engines/handoff/dialect.py:_small": "at most 64 bytes",
    "engines/handoff/vllm_connectors.py:takes_prompt_tokens": "a version of at most 1,024 characters",
    "feeds/answers_test.py:_continued": "a body of the router's own",
    "feeds/self_test.py:ContinuationTest._answer": "a body of the router's own",
    "feeds/signing_keys.py:SigningKeyFeed._fetched_keys": "an identity provider of the configuration",
    "frontends/http/large_bodies.py:ItemCounter._count_fields": _ARRAY,
    "frontends/http/relay.py:as_stream": _CLIENT,
    "index/events.py:_fields": "parts of an event, which `EVENT` bounds",
    "index/events.py:_keys": "parts of an event, which `EVENT` bounds",
    "index/masks.py:_ends": _ARRAY,
    "index/masks.py:_runs_by_tier": _ARRAY,
    "observe/recent_decisions.py:_decoded": "the router's own record",
    "prompt/apis/conversion.py:Decoder.read": _CLIENT,
    "prompt/completion.py:TokenIds.read": "slices of 64 kB",
    "prompt/completion.py:CompletionPrompts.read": _CLIENT,
    "prompt/completion.py:first_text": _CLIENT,
    "prompt/completion.py:_first": _CLIENT,
    "prompt/conversation.py:with_decoded_messages": _CLIENT,
    "prompt/conversation.py:plain_messages": _CLIENT,
    "frontends/extproc/picks.py:PickForwarder._head": "a status of three digits that a gateway has parsed",
    "prompt/harmony.py:Harmony._date_in": "tokens of the router's own",
    "prompt/harmony.py:Harmony._new_declaration": _CLIENT,
    "prompt/incremental/reader.py:IncrementalReader.continue_chat": "samples of the router's own",
    "prompt/incremental/short_chats.py:_shortened": _CLIENT,
    "prompt/incremental/short_chats.py:with_one_tool": _CLIENT,
    "prompt/pictures/uuids.py:without_uuids": _CLIENT,
    "prompt/pictures/uuids.py:_cleaned": _CLIENT,
    "prompt/pictures/uuids.py:_is_media": _CLIENT,
    "prompt/pictures/uuids.py:_is_given": _CLIENT,
    "prompt/completion.py:_lengths": _CLIENT,
    "prompt/serde.py:read_json": _CLIENT,
    "prompt/serde.py:serde_integer": "at most 21 digits",
    "prompt/tokenizer.py:Tokenizer.normalizes": "a file of the operator",
    "prompt/tokenizer.py:Tokenizer.text_of": "ids of one stream, at most a MiB",
    "prompt/conversation.py:_arguments": _CLIENT,
    "publisher/lmcache.py:_respond": "a body within `limits`, on a port inside the cluster",
    "publisher/lmcache_chunks.py:_engine_hash": "hexadecimal digits of a fixed number",
    "publisher/mooncake_source.py:parse_name": "in a thread; names of a store of the configuration",
    "request/continuation/plan.py:_body_from": _CLIENT,
    "request/continuation/plan.py:_number": _CLIENT,
    "request/continuation/terms.py:terms_of": _CLIENT,
    "request/parse.py:BodyParser.parse": _CLIENT,
    "request/parse.py:BodyParser._decoded_in_parts": _CLIENT,
    "request/parse.py:_number": "at most 64 bytes",
    "request/parse.py:without_engine_fields": _CLIENT,
    "request/parse.py:_FieldSearch._searched": _CLIENT,
    "request/parse.py:_check_items": _CLIENT,
    "request/reading.py:with_field": _CLIENT,
    "request/response_reader.py:ResponseReader._reported": "at most 12 digits, bounded by `counted_output_tokens`",
    "stores/redis_schema.py:decode_generation": _STORES,
    "stores/redis_schema.py:decode_row": _STORES,
    "stores/redis_schema.py:decode_entry": _STORES,
}
"""`file:function` of readers without a bound, and why nobody outside can make them expensive."""


def call_name(node: ast.Call) -> str:
    """`msgspec.json.decode` as `json.decode`, `x.recv` as `x.recv`."""
    function = node.func
    if isinstance(function, ast.Attribute):
        return f"{ast.unparse(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def decodes(node: ast.Call) -> bool:
    """Whether it is a call of a decoder: `bytes.decode` has no argument, or the name of an encoding."""
    name = call_name(node)
    called = name.rpartition(".")[2]
    if called == "decode" and "." in name:
        return bool(node.args) and not is_text(node.args[0])
    if name in ("int", "float"):
        return bool(node.args) and isinstance(node.args[0], ast.Subscript)
    return name in ("json.loads", "json.load") or called in ("recv", "recv_multipart", "recv_string", "recv_json")


def nests_repetitions(pattern: str | bytes) -> bool:
    """Whether an unbounded repetition contains another one, neither of which is possessive."""

    def walk(tokens: object, *, repeated: bool) -> bool:
        for operator, argument in tokens:  # type: ignore[attr-defined]
            inside = repeated
            if operator in (parser.MAX_REPEAT, parser.MIN_REPEAT) and argument[1] is parser.MAXREPEAT:
                if repeated:
                    return True
                inside = True
            parts = argument if isinstance(argument, (tuple, list)) else (argument,)
            for part in parts:
                branches = part if isinstance(part, list) else (part,)
                for branch in branches:
                    if isinstance(branch, parser.SubPattern) and walk(branch, repeated=inside):
                        return True
        return False

    return walk(parser.parse(pattern), repeated=False)


def found_in(tree: ast.AST, where: str) -> Iterator[str]:
    """Names of the functions, or "" for the module, that read without a bound."""
    for child in ast.iter_child_nodes(tree):
        inner = where
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{where}.{child.name}".strip(".")
        if isinstance(child, ast.Call):
            pattern = child.args[0] if child.args and call_name(child).startswith("re.") else None
            is_pattern = isinstance(pattern, ast.Constant) and isinstance(pattern.value, str | bytes)
            if decodes(child) or (is_pattern and nests_repetitions(pattern.value)):  # type: ignore[union-attr]
                yield where
        yield from found_in(child, inner)


def unbounded() -> dict[str, None]:
    """`file:function` of every reader outside trusted places."""
    return {
        f"{path}:{where}": None
        for path, tree in modules().items()
        if not path.startswith(tuple(TRUSTED))
        for where in found_in(tree, "")
    }


def test_every_reader_of_foreign_input_states_a_bound() -> None:
    unknown = [place for place in unbounded() if place not in EXCEPTIONS]
    assert not unknown, "these decode foreign input without a bound of router/guards.py"


def test_no_exception_is_left_over() -> None:
    """An exception goes when its reader has a bound."""
    found = unbounded()
    assert [place for place in EXCEPTIONS if place not in found] == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(x): return msgspec.json.decode(x)",
        "def f(x): return _DECODER.decode(x, strict=False)",
        "def f(x): return json.loads(x)",
        "async def f(x): return await x.recv_multipart()",
        "def f(x): return float(x[1])",
        "P = re.compile(r'(a*b?)*c')",
        'P = re.compile(rb\'(?:[^"]|"(?:[^"]|x)*")*\')',
    ],
)
def test_a_new_reader_is_found(source: str) -> None:
    assert list(found_in(ast.parse(source), ""))


@pytest.mark.parametrize(
    "source",
    [
        "def f(x): return BOUND.json(x, _DECODER)",
        "def f(x): return x.decode() + x.decode('latin-1')",
        "P = re.compile(r'(a*+b)*c')",
        "P = re.compile(r'a{1,9}(b|c)*d')",
    ],
)
def test_a_bounded_reader_is_not(source: str) -> None:
    assert not list(found_in(ast.parse(source), ""))
