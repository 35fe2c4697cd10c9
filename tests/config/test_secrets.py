"""No secret of a configuration appears in an error message or in a printed configuration.

The places of secrets are found in the schema: fields of secret types, and URLs, which may not contain a password. So a
new field is covered by these tests.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, SecretStr, ValidationError

from router.config.credentials import BearerFile
from router.config.index_schema import RedisIndex, RedisUrl
from router.config.load import Strict, load, validate_options
from router.config.mistakes import may_hold_secret
from router.config.pod_keys import read_key
from router.config.router_file import load_router
from router.config.schema import RouterConfig
from router.errors import ConfigError
from router.stores.redis_connection import read_credentials

CANARY = "canary7sesame"
URL = f"redis://me:{CANARY}@127.0.0.1:1/0"
MALFORMED = {
    "no scheme": f"me:{CANARY}@h",
    "only the password": CANARY,
    "wrong scheme": f"http://me:{CANARY}@h",
    "user name missing": f"http://:{CANARY}@h",
    "host missing": f"redis://me:{CANARY}@",
    "@ and host missing": f"http://me:{CANARY}",
    "port is a word": f"redis://me:{CANARY}@h:{CANARY}",
    "port too high": f"redis://me:{CANARY}@h:99999",
    "port negative": f"http://me:{CANARY}@h:-1",
    "a slash in the password": f"redis://me:{CANARY}/{CANARY}@h",
    "a question mark in the password": f"http://me:{CANARY}?{CANARY}@h",
    "a hash in the password": f"http://me:{CANARY}#{CANARY}@h",
    "spaces": f"redis://me:{CANARY} {CANARY}@h",
    "a line end": f"redis://me:{CANARY}\n{CANARY}@h",
    "an open bracket": f"redis://me:{CANARY}@[::1",
    "a closing bracket": f"http://me:{CANARY}]@h",
    "no address in brackets": f"redis://[{CANARY}]",
    "full-width characters": f"http://me:{CANARY}＠h",
    "a list": [f"redis://me:{CANARY}@h"],
    "a mapping": {URL: URL},
    "a key": {f"url redis://me:{CANARY}@h": None},
}
WRONG: list[Any] = [None, [], {}, {URL: URL}, "?", -1, True, [URL]]

Place = tuple[str, Callable[[Any], Any], Callable[[str, Any], Any]]
"""Name of the field, a document with a value for it, and one with a value for another key next to it."""


def minimal(model: type[BaseModel]) -> dict[str, Any]:
    """Values of the required fields."""
    fields = {name: field.annotation for name, field in model.model_fields.items() if field.is_required()}
    return {name: get_args(kind)[0] if get_origin(kind) is Literal else "x" for name, kind in fields.items()}


def fields_of(annotation: Any) -> Iterator[tuple[str, Any, type[BaseModel], Callable[[Any], Any]]]:
    """Every field below a type: its path, its type, its model, and what builds a document from the model's values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            kind = field.rebuild_annotation()
            yield name, kind, annotation, lambda values: values

            def outer(values: Any, name: str = name) -> Any:
                return {**minimal(annotation), name: values}

            for path, inner, model, build in fields_of(kind):
                yield f"{name}.{path}", inner, model, lambda values, build=build, outer=outer: outer(build(values))  # type: ignore[misc]
        return
    in_list = get_origin(annotation) is tuple
    for inner in get_args(annotation):
        for path, kind, model, build in fields_of(inner):
            yield path, kind, model, (lambda values, build=build: [build(values)]) if in_list else build  # type: ignore[misc]


def places() -> Iterator[Place]:
    """Every field that may hold a secret. Names of files and variables with one are shown if they are right."""
    for path, kind, model, build in fields_of(RouterConfig):
        if may_hold_secret(kind) and not any(True for _ in fields_of(kind)) and not path.endswith(("_file", "_env")):
            name = path.rpartition(".")[2]

            def holding(value: Any, build: Any = build, name: str = name, model: Any = model) -> Any:
                return build({**minimal(model), name: value})

            def alongside(key: str, value: Any, build: Any = build, name: str = name, model: Any = model) -> Any:
                return build({**minimal(model), name: URL, key: value})

            yield f"{model.__name__}.{path}", holding, alongside


PLACES = {name: (holding, alongside) for name, holding, alongside in places()}
MODELS = {f"{model.__name__}.{path.rpartition('.')[0]}": model for path, _, model, _ in fields_of(RouterConfig)}


def said(document: Any, folder: Path | None = None, read: Callable[[Path], RouterConfig] | None = None) -> str:
    """All that is printed for this configuration: error messages with their traceback, or the configuration itself."""
    config: Any
    try:
        if folder is None:
            config = validate_options(RouterConfig, document)
        else:
            file = folder / "router.yaml"
            file.write_text(document if isinstance(document, str) else json.dumps(document))
            config = read(file) if read else load(file, RouterConfig)
    except ConfigError as error:
        return f"{error}{error!r}" + "".join(traceback.format_exception(error))
    return f"{config}{config!r}{config.model_dump()}{config.model_dump_json()}{config.index!r}"


def test_the_places_are_found_in_the_schema() -> None:
    """Also in lists and unions."""
    assert PLACES.keys() >= {
        "RedisIndex.index.redis.url",
        "PodConfig.pods.url",
        "PodConfig.pods.advertised_url",
        "MooncakeStore.publish.stores.url",
        "StandardBackend.publish.stores.url",
    }


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("value", [URL, *MALFORMED.values()], ids=["valid", *MALFORMED])
def test_a_secret_is_not_printed(name: str, value: Any, tmp_path: Path) -> None:
    """Valid or malformed, in a file or from options."""
    holding, _ = PLACES[name]
    assert CANARY not in said(holding(value), tmp_path)
    assert CANARY not in said(holding(value))


@pytest.mark.parametrize("name", PLACES)
def test_a_mistake_next_to_a_secret_does_not_print_it(name: str) -> None:
    """A neighbour of the wrong type, an unknown key, the secret under a similar key."""
    _, alongside = PLACES[name]
    neighbours = [*MODELS[name.rpartition(".")[0]].model_fields, "unknown", "urll", "pass word", URL]
    documents = [alongside(key, value) for key in neighbours for value in WRONG]
    assert not [document for document in documents if CANARY in said(document)]


@pytest.mark.parametrize("name", PLACES)
def test_a_secret_at_the_wrong_depth_is_not_printed(name: str) -> None:
    """In place of any list or mapping around it."""
    for value in (URL, CANARY):
        documents = list(misplaced(PLACES[name][0](value), value))
        assert len(documents) > 3
        assert not [document for document in documents if CANARY in said(document)]


def misplaced(node: Any, value: str) -> Iterator[Any]:
    yield from (value, [value], {"x": value}, {URL: value})
    if isinstance(node, list):
        yield from ([inner] for inner in misplaced(node[0], value))
    elif isinstance(node, dict):
        for key in node:
            yield from ({**node, key: inner} for inner in misplaced(node[key], value))


# --- a key in the wrong place ---

KEY = f"sk-{CANARY}"
SHAPES: list[Any] = [KEY, KEY * 40, f"Bearer {KEY}", [KEY], {KEY: KEY}, {"bearer": KEY}, {"key": KEY}]


def near_secrets() -> Iterator[tuple[str, Any]]:
    """Every key next to and above one that can hold or name a secret, as a document with the value at this key."""
    leaves = ((kind, model) for _, kind, model, _ in fields_of(RouterConfig) if not any(True for _ in fields_of(kind)))
    secret = {model for kind, model in leaves if may_hold_secret(kind)}
    for path, kind, model, build in fields_of(RouterConfig):
        if model in secret or may_hold_secret(kind):
            name = path.rpartition(".")[2]
            yield path, lambda value, build=build, model=model, name=name: build({**minimal(model), name: value})


NEAR = dict(near_secrets())


def test_keys_near_secrets_are_found_in_the_schema() -> None:
    assert NEAR.keys() >= {
        "admin",
        "admin.host",
        "admin.bearer_file",
        "pods.auth",
        "pods.role",
        "pods.hardware",
        "pods.auth.bearer_env",
        "pods.auth.bearer_file",
        "index.redis.password_file",
        "discovery.kubernetes.api.token_file",
        "discovery.kubernetes.pod.auth",
    }


@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize("shape", SHAPES, ids=map(str, range(len(SHAPES))))
def test_a_key_in_the_wrong_place_is_not_printed(name: str, shape: Any, tmp_path: Path) -> None:
    """Under or next to a key that can hold or name a secret: a pod's key as its `auth`, or in place of its file."""
    for error in (refused(NEAR[name](shape), tmp_path, load_router), refused(NEAR[name](shape))):
        assert CANARY not in error


def refused(document: Any, folder: Path | None = None, read: Callable[[Path], RouterConfig] | None = None) -> str:
    """What is printed if the configuration is refused."""
    printed = said(document, folder, read)
    return printed if "Traceback" in printed else ""


@pytest.mark.parametrize("name", ["username_file", "password_file", "username_env", "password_env"])
def test_a_password_in_place_of_its_source_is_not_printed(name: str) -> None:
    """These are read when a connection begins."""
    with pytest.raises(ConfigError) as caught:
        read_credentials(RedisIndex.model_validate({"url": "redis://one", name: KEY}))
    assert CANARY not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"admin": KEY}, "must be a mapping of keys to values (got text of 16 characters, not shown"),
        ({"admin": True}, "must be a mapping of keys to values (got True)"),
        ({"pods": [{"url": "http://h:1", "auth": 7}]}, "must be a mapping of keys to values (got 7)"),
    ],
)
def test_the_type_and_length_of_a_value_that_is_not_shown_are(document: Any, message: str) -> None:
    assert message in said(document)


def test_a_piece_of_a_password_is_not_printed_as_a_key(tmp_path: Path) -> None:
    """A comma in a flow mapping ends the value."""
    printed = said(f"index: {{redis: {{url: redis://:ses,{CANARY},ame@h, tls: {{}}}}}}\n", tmp_path)
    assert "index.redis....: unknown key; valid keys: " in printed
    assert CANARY not in printed


@pytest.mark.parametrize(
    "text",
    [
        f"url: {URL}\n    url: {URL}",
        f"url:{URL}",
        f"url {URL}",
        f"{URL}: url",
        f"url: {URL}\n   mode: single",
        f"url: {URL}: x",
        f"url: '{URL}",
        f'url: "{URL}\\{CANARY}"',
        f"url: *{CANARY}",
        f"url: !{CANARY}!x y",
        f"url: !<{CANARY} y",
        f"url: !!int {CANARY}",
        f'url: !!int "{CANARY}\'{CANARY}"',
        f"url: !!timestamp {CANARY}",
        f"url: !!binary {CANARY}",
        f"url: !!set {CANARY}",
        f"url: !other {URL}",
        f"url: %{CANARY}",
        f"url: @{CANARY}",
        f"url: {URL}\0",
        f"? {{{URL}: {URL}}}\n    : x\n    ? {{a: {{}}}}",
        f"<<: {URL}",
        f"url: [{URL}",
        f"url: |{CANARY}",
    ],
)
def test_broken_yaml_is_reported_without_its_content(text: str, tmp_path: Path) -> None:
    """The library quotes values, aliases and tags."""
    printed = said(f"index:\n  redis:\n    {text}\n", tmp_path)
    assert CANARY not in printed
    assert "router.yaml" in printed
    assert CANARY not in said(f"index: {{redis: {{{text}}}}}\n", tmp_path)


def test_a_validation_error_that_nobody_catches_shows_no_value() -> None:
    with pytest.raises(ValidationError) as caught:
        RouterConfig.model_validate({"index": {"redis": {"url": CANARY}}, "pods": CANARY})
    assert CANARY not in "".join(traceback.format_exception(caught.value))


# --- files ---

SOURCES = {"file": "path: x", "dns": "name: x, port: 1", "kubernetes": "selector: x"}
KEY_FILES = {
    "providers.key_file": (
        "providers: [{name: a, url: 'https://h', model: m, key_file: FILE, "
        "price: {prompt: 1, output: 1}, budget_per_hour: 1}]\n"
    ),
    "pods.auth.bearer_file": "pods: [{url: 'http://h', auth: {bearer_file: FILE}}]\n",
    **{
        f"discovery.{source}.pod.auth.bearer_file": (
            f"discovery: {{{source}: {{{keys}, pod: {{auth: {{bearer_file: FILE}}}}}}}}\n"
        )
        for source, keys in SOURCES.items()
    },
}
"""Files that are read with the configuration."""


def read_redis_secret(path: str, key: str) -> object:
    read_credentials(RedisIndex.model_validate({"url": "redis://one", key.rpartition(".")[2]: path}))
    return None


LATER: dict[str, Callable[[str, str], object]] = {
    "admin.bearer_file": BearerFile,
    "index.redis.password_file": read_redis_secret,
    "discovery.kubernetes.api.token_file": lambda path, _: read_key(path) and None,
    "index.redis.username_file": read_redis_secret,
}
"""Files that are read when they are needed."""
TLS_FILES = {
    f"{tls}.{name}"
    for tls in ("index.redis.tls", "pods.tls", *(f"discovery.{source}.pod.tls" for source in SOURCES))
    for name in ("ca_file", "cert_file", "key_file")
} | {"discovery.kubernetes.api.ca_file", "listen.tls.cert_file", "listen.tls.key_file"}
TLS_FILES |= {"providers.ca_file", "picker.tls.cert_file", "picker.tls.key_file"}
"""Files that OpenSSL reads."""
CONTENTS = {
    "two words": f"{CANARY} {CANARY}".encode(),
    "two lines": f"{CANARY}\n{CANARY}\n".encode(),
    "too long": CANARY.encode() * 10_000,
    "not ASCII": f"{CANARY}é".encode("latin-1"),
    "a control character": f"{CANARY}\0{CANARY}".encode(),
    "valid": CANARY.encode(),
}


def test_every_file_with_a_secret_is_covered_here() -> None:
    """A new field that ends in `_file` needs an entry."""
    found = {path for path, _, _, _ in fields_of(RouterConfig) if path.endswith("_file")}
    assert found == KEY_FILES.keys() | LATER.keys() | TLS_FILES


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_the_content_of_a_file_is_not_printed(content: bytes, tmp_path: Path) -> None:
    """Valid or not."""
    file = tmp_path / "key"
    file.write_bytes(content)
    for text in KEY_FILES.values():
        assert CANARY not in said(text.replace("FILE", str(file)), tmp_path, load_router)
    for name, read in LATER.items():
        try:
            printed = repr(read(str(file), name))
        except ConfigError as error:
            printed = "".join(traceback.format_exception(error))
        assert CANARY not in printed


# --- no secret in a plain string ---

SUSPICIOUS = ("password", "secret", "token", "key", "credential", "auth", "bearer", "user", "url", "uri", "dsn")
HARMLESS = {
    "models.tokenizer": "a folder, package or hub name",
    "publish.stores.key_prefix": "the name of a model",
}


def is_text(kind: Any) -> bool:
    """Also with conditions."""
    return kind is str or any(is_text(inner) for inner in get_args(kind))


def unsafe_fields(model: type[BaseModel]) -> list[str]:
    """Fields of plain text whose name suggests a secret. `_file` and `_env` name where a secret is read."""
    return [
        path
        for path, kind, _, _ in fields_of(model)
        if any(word in path.rpartition(".")[2] for word in SUSPICIOUS)
        and not path.endswith(("_file", "_env"))
        and is_text(kind)
        and not may_hold_secret(kind)
    ]


def test_no_plain_text_field_is_named_like_a_secret() -> None:
    """Such a field needs a secret type, `HttpUrl`, a name that ends in `_file` or `_env`, or an entry in the table."""
    assert set(unsafe_fields(RouterConfig)) == HARMLESS.keys()


def test_a_field_that_is_named_like_a_secret_is_noticed() -> None:
    class Inner(Strict):
        api_key: str = ""
        broker_url: str | None = None
        password_file: str = ""
        token: SecretStr = SecretStr("")
        redis: RedisUrl = SecretStr("")

    class Outer(Strict):
        inner: tuple[Inner, ...] = ()

    assert unsafe_fields(Outer) == ["inner.api_key", "inner.broker_url"]
