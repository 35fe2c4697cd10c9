"""The file of tenants and its files of keys."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

import pytest

from router.admission.tenant import Slo
from router.config.load import load
from router.config.schema import RouterConfig
from router.config.tenant_file import TenantFile
from router.errors import ConfigError


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def written(folder: Path, text: str, keys: str | None = None) -> TenantFile:
    (folder / "tenants.yaml").write_text(text)
    if keys is not None:
        (folder / "keys.txt").write_text(keys)
    return TenantFile(folder / "tenants.yaml")


def test_a_tenant_has_everything_that_its_entry_says(tmp_path: Path) -> None:
    """What is not there has a default that restricts nothing."""
    text = """
tenants:
- name: acme
  models: [qwen, llama-*]
  adapters: []
  weight: 2
  band: 1
  slo: {ttft_ms: 2000}
  suspended: true
- {name: open, slo: {}}
"""
    acme, plain = written(tmp_path, text).read().by_name.values()
    assert (acme.name, acme.weight, acme.band, acme.slo, acme.is_suspended) == ("acme", 2, 1, Slo(ttft_ms=2000), True)
    assert acme.may_use("qwen", "") and acme.may_use("llama-3", "")
    assert not (acme.may_use("qwen-2", "") or acme.may_use("qwen", "lora"))
    assert plain.may_use("any", "lora") and plain.weight == 1 and plain.slo is None


def test_salts_differ_except_in_a_group(tmp_path: Path) -> None:
    """Also between a tenant and a group of the same name."""
    text = "tenants: [{name: a}, {name: b}, {name: c, share: a}, {name: d, share: a}]"
    a, b, c, d = (tenant.salt for tenant in written(tmp_path, text).read().by_name.values())
    assert len({a, b, c}) == 3 and c == d
    assert all(len(salt) == 32 and salt.isalnum() for salt in (a, b, c))


def test_keys_are_read_from_all_files(tmp_path: Path) -> None:
    """With and without an end, in lower or upper case."""
    text = f"""
tenants:
- name: a
  keys: ['{digest("k1")}', '{digest("k2").upper()} until 2026-01-01T00:00:01Z']
- name: b
key_files: [keys.txt]
"""
    keys = f"# of b\n\nb {digest('k3')}   # the first\n  b\t{digest('k4')} until 1970-01-02\n"
    tenants = written(tmp_path, text, keys.replace("\t", " ")).read()
    at_s = {"k1": (9e9, 9e9), "k2": (1767225600, 1767225601), "k3": (9e9, 9e9), "k4": (86399, 86400)}
    for key, (valid_s, end_s) in at_s.items():
        tenant = tenants.find(key.encode(), valid_s)
        assert tenant is not None and tenant.name == ("a" if key < "k3" else "b")
        assert end_s == 9e9 or tenants.find(key.encode(), end_s) is None
    assert tenants.find(b"k5", 0) is None


def test_tokens_of_providers_name_tenants_or_values_that_are_mapped_to_them(tmp_path: Path) -> None:
    """The issuer stays as it is written, because tokens are compared with it."""
    text = """
tenants: [{name: acme}, {name: other}]
oidc:
- {issuer: https://login.example.com/, audiences: [w]}
- {issuer: "http://127.0.0.1:9", audiences: [w], claim: groups, tenants: {eng: acme, ops: acme}, jwks_url: "https://h/k?p=1"}
"""
    tenants = written(tmp_path, text).read()
    plain, mapped = tenants.issuers["https://login.example.com/"], tenants.issuers["http://127.0.0.1:9"]
    assert (plain.claim, plain.tenants, plain.keys_url) == ("tenant", tenants.by_name, "")
    acme = tenants.by_name["acme"]
    assert (mapped.claim, mapped.tenants, mapped.keys_url) == ("groups", {"eng": acme, "ops": acme}, "https://h/k?p=1")


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the file is read, not when the first token comes."""
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"`pip install '\.\[oidc\]'` in the clone"):
        written(tmp_path, PROVIDER).read()


SECRET = "sk-canary"
OIDC = "oidc:\n- "
PROVIDER = f"{OIDC}issuer: https://h\n  audiences: [w]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tenants: [{name: a}, {name: a}]", "tenants.yaml:1: tenants.1.name: duplicate tenant 'a'"),
        ("tenants:\n- name: a\n  keys: [sk-canary]", "tenants.yaml:3: tenants.0.keys.0: must be the SHA-256 of a key"),
        ("tenants:\n- {name: a, keys: [0]}", "tenants.yaml:2: tenants.0.keys.0: must be text"),
        ("tenants:\n- name: a b", "tenants.yaml:2: tenants.0.name: "),
        ("tenants:\n- name: a\n  wieght: 2", "tenants.yaml:3: tenants.0.wieght: unknown key; did you mean 'weight'?"),
        ("tenants:\n- name: a\n  weight: 0", "tenants.yaml:3: tenants.0.weight: "),
        ("key_files: [other.txt]", "other.txt: cannot be read"),
        ("version: 2", "tenants.yaml:1: version: must be 1"),
        (f"{OIDC}issuer: http://login.example.com", "tenants.yaml:2: oidc.0.issuer: must look like https://"),
        (f"{OIDC}issuer: https://me:sk-canary@h", "tenants.yaml:2: oidc.0.issuer: must look like https://"),
        (f"{OIDC}issuer: https://h\n  audiences: []", "tenants.yaml:3: oidc.0.audiences: "),
        (
            f"{PROVIDER}\n  tenants:\n    eng: acmee\ntenants: [{{name: acme}}]",
            "tenants.yaml:5: oidc.0.tenants.eng: unknown tenant 'acmee'; did you mean 'acme'?",
        ),
        (f"{PROVIDER}\n- issuer: https://h\n  audiences: [w]", "tenants.yaml:4: oidc.1.issuer: duplicate issuer"),
        ("key_files: [keys.txt]\ntenants: [{name: acme}]", "keys.txt:2: unknown tenant; did you mean 'acme'?"),
    ],
)
def test_a_mistake_is_named_with_file_and_line(tmp_path: Path, text: str, expected: str) -> None:
    """Never with the value of a key."""
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, text, f"\nacmee {digest('k')}").read()
    assert expected in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"a {SECRET}", "must be the SHA-256 of a key"),
        (f"{SECRET}", "must be the SHA-256 of a key"),
        (f"{SECRET} {digest('x')}", "unknown tenant"),
        (f"a {digest('k')} {SECRET}", "must be the SHA-256 of a key"),
        (f"a {digest('x')} until {SECRET}", "`until` must be followed by a date"),
        (f"a {digest('k')}", "duplicate key"),
    ],
)
def test_a_wrong_line_of_a_key_file_is_named_but_not_shown(tmp_path: Path, line: str, expected: str) -> None:
    """It may be a key."""
    text = f"tenants: [{{name: a, keys: [{digest('k')}]}}]\nkey_files: [keys.txt]"
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, text, f"a {digest('other')}\n{line}\n").read()
    assert f"{tmp_path / 'keys.txt'}:2: {expected}" in str(caught.value)
    assert SECRET not in str(caught.value) and digest("k") not in str(caught.value)


def test_many_mistakes_are_cut(tmp_path: Path) -> None:
    """A file in another form has one in every line."""
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, "key_files: [keys.txt]", "wrong\n" * 100_000).read()
    assert str(caught.value).count("\n") < 30


def test_the_stamp_changes_with_every_file(tmp_path: Path) -> None:
    """Also if one is missing."""
    file = written(tmp_path, "key_files: [keys.txt]", "")
    file.read()
    stamps = [file.stamp()]
    assert file.read_stamp == stamps[0]
    (tmp_path / "keys.txt").write_text("# more")
    stamps.append(file.stamp())
    (tmp_path / "keys.txt").unlink()
    stamps.append(file.stamp())
    (tmp_path / "tenants.yaml").write_text("tenants: []")
    stamps.append(file.stamp())
    assert len(set(stamps)) == 4


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_keys_of_tenants_are_not_forwarded_to_pods(tmp_path: Path, name: str) -> None:
    """The two settings exclude each other."""
    written(tmp_path, "tenants: []")
    (tmp_path / "router.yaml").write_text(f"tenants: tenants.yaml\nedge:\n  forward_headers: [cookie, {name}]\n")
    with pytest.raises(ConfigError, match=rf"router\.yaml:3: edge\.forward_headers: {name} would send the keys"):
        load(tmp_path / "router.yaml", RouterConfig)
