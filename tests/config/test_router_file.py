"""Cost priors and link classes that router.yaml names must exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config.router_file import load_router
from router.errors import ConfigError

GOOD = """\
policy: cost_aware
models:
- name: one
  cost: {model: llama-3.1-8b, hardware: h100x1}
pods:
- url: http://a:1
  hardware: h100x1
links:
  elsewhere: rdma_100
"""


def check(path: Path, text: str) -> None:
    path.write_text(text)
    load_router(path)


@pytest.mark.parametrize(
    ("right", "wrong", "where"),
    [
        ("model: llama-3.1-8b", "model: llama-9", "4: models.0.cost.model: no prior named 'llama-9'"),
        ("  hardware: h100x1", "  hardware: tpu", "7: pods.0.hardware: no prior of 'llama-3.1-8b' on this hardware"),
        ("rdma_100", "rdma_101", "9: links.elsewhere: unknown link class 'rdma_101'"),
    ],
)
def test_an_unknown_name_is_refused_with_its_line(tmp_path: Path, right: str, wrong: str, where: str) -> None:
    """With file, line, key and the known names."""
    path = tmp_path / "router.yaml"
    check(path, GOOD)
    with pytest.raises(ConfigError) as caught:
        check(path, GOOD.replace(right, wrong))
    assert str(caught.value).startswith(f"{path}:{where}")
    assert "known: " in str(caught.value)


@pytest.mark.parametrize("content", [None, "two words"])
def test_a_credential_file_without_a_key_is_refused_with_its_line(tmp_path: Path, content: str | None) -> None:
    """Before any pod is called."""
    path, key = tmp_path / "router.yaml", tmp_path / "key"
    text = GOOD.replace("links:", f"- url: http://b:1\n  auth:\n    bearer_file: {key}\nlinks:")
    key.write_text("token")
    check(path, text)
    key.unlink()
    if content is not None:
        key.write_text(content)
    with pytest.raises(ConfigError) as caught:
        check(path, text)
    assert str(caught.value).startswith(f"{path}:10: pods.1.auth.bearer_file: ")
    assert (str(key) in str(caught.value)) is (content is not None)  # a file that does not exist may be a key
    assert "two words" not in str(caught.value)


def test_pods_are_woken_only_where_requests_can_wait_for_them(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    check(path, f"{GOOD}limits: {{hold_s: 300}}\nscaling: {{wake_pods: true}}\n")
    with pytest.raises(ConfigError, match=r"^.*:10: scaling\.wake_pods: needs limits\.hold_s"):
        check(path, f"{GOOD}scaling: {{wake_pods: true}}\n")


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ("admin:\n  host: 0.0.0.0\n  bearer_file: FILE\n", r"3: admin\.bearer_file"),
        ("index:\n  redis:\n    url: rediss://one\n    tls: {cert_file: FILE, key_file: FILE}\n",
         r"4: index\.redis\.tls\.cert_file"),
    ],
)  # fmt: skip
def test_a_missing_file_is_refused_with_its_line(tmp_path: Path, section: str, place: str) -> None:
    path, file = tmp_path / "router.yaml", tmp_path / "secret"
    text = section.replace("FILE", str(file)) + GOOD
    with pytest.raises(ConfigError, match=rf"^{path}:{place}: cannot read a file"):
        check(path, text)
    file.write_text("token")
    check(path, text)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_wrong_authority_of_an_api_server_is_refused_with_its_line(tmp_path: Path, content: str | None) -> None:
    """The default is that of a pod in the cluster, which another machine does not have. http needs none."""
    path, ca = tmp_path / "router.yaml", tmp_path / "ca.crt"
    text = f"{GOOD}discovery:\n  kubernetes:\n    selector: app=vllm\n    api:\n      url: https://10.0.0.1\n"
    check(path, text)
    if content is not None:
        ca.write_text(content)
    with pytest.raises(ConfigError, match=rf"^{path}:15: discovery\.kubernetes\.0\.api\.ca_file: .*{ca}"):
        check(path, f"{text}      ca_file: {ca}\n")
    check(path, f"{text.replace('https', 'http')}      ca_file: {ca}\n")
    check(path, f"{text}      ca_file: ''\n")


PROVIDER = """providers:
- name: hosted
  url: https://a
  model: m
  key_file: {key}
  price: {{prompt: 1, output: 2}}
  budget_per_hour: 3
"""


@pytest.mark.parametrize(
    ("right", "wrong", "where"),
    [
        ("https://a", "http://a", "12: providers.0.url: must begin with https://"),
        ("name: hosted", "name: one", "11: providers.0.name: is also that of models.0"),
        ("{prompt: 1, output: 2}", "{prompt: 1}", "15: providers.0.price.output: "),
        ("budget_per_hour: 3", "budget_per_hour: 0", "16: providers.0.budget_per_hour: "),
        ("key_file: ", "key_file: /nowhere", "14: providers.0.key_file: "),
        ("  model: m", "  api: gemini\n  model: m", "13: providers.0.api: "),
    ],
)
def test_a_mistake_in_a_provider_is_refused_with_its_line(tmp_path: Path, right: str, wrong: str, where: str) -> None:
    path, key = tmp_path / "router.yaml", tmp_path / "key.txt"
    key.write_text("the-key")
    text = GOOD + PROVIDER.format(key=key)
    check(path, text)
    with pytest.raises(ConfigError) as caught:
        check(path, text.replace(right, wrong))
    assert str(caught.value).startswith(f"{path}:{where}") and "the-key" not in str(caught.value)
