"""Policies of a folder, merged with the shipped ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config.load import shipped
from router.config.policy_files import PolicyFolder, load_classes, load_policies
from router.errors import ConfigError

OURS = [
    "batch",
    "cost_aware",
    "cost_aware_pd",
    "least_load",
    "ring_bounded_load",
    "round_robin",
    "session",
]


def write(file: Path, name: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"name: {name}\nabout: x\npicker:\n  lowest_cost: {{}}\n")


def test_the_shipped_policies() -> None:
    """Without the peers' formulas, which belong to the simulator."""
    assert list(load_policies(shipped("policies"))) == OURS


def test_folders_with_a_leading_dot_are_not_read(tmp_path: Path) -> None:
    """A mounted ConfigMap keeps the same files there once more."""
    write(tmp_path / "mine.yaml", "mine")
    write(tmp_path / "..2026_01_01" / "mine.yaml", "mine")
    write(tmp_path / "others" / "theirs.yaml", "theirs")
    assert list(load_policies(tmp_path)) == ["mine", "theirs"]


def test_two_policies_of_one_name_are_refused(tmp_path: Path) -> None:
    """The message names the second file."""
    write(tmp_path / "mine.yaml", "mine")
    write(tmp_path / "others" / "mine.yaml", "mine")
    with pytest.raises(ConfigError, match=r"others.mine\.yaml:1: name: duplicate policy 'mine'"):
        load_policies(tmp_path)


BASE = "name: base\nabout: x\ncosts:\n  queue: {}\n  decode: {weight: 0.5}\npicker:\n  lowest_cost: {}\nshortlist: 4\n"


def folder_with(folder: Path, **files: str) -> PolicyFolder:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return PolicyFolder(folder, "mine", {"chat", "rag"})


def error_of(folder: PolicyFolder) -> str:
    with pytest.raises(ConfigError) as caught:
        folder.read()
    return str(caught.value).replace(str(folder.folder), "")


def test_a_file_needs_only_the_keys_that_differ(tmp_path: Path) -> None:
    """Mapping by mapping; null takes a cost term away, and another picker takes the picker's place."""
    costs = "costs:\n  queue: null\n  decode: {weight: 2}\n  prefill: {}\n"
    mine = f"name: mine\nabout: y\nextends: base\n{costs}picker:\n  in_turn: {{}}\n"
    policy = folder_with(tmp_path, base=BASE, mine=mine).read().default
    assert repr(policy.costs) == "(('prefill', PrefillTerm()), ('decode', DecodeTerm(weight=2.0, pace=0.0)))"
    assert (repr(policy.picker), policy.shortlist, policy.name) == ("InTurn()", 4, "mine")


def test_match_and_percent_are_not_inherited(tmp_path: Path) -> None:
    """Otherwise a policy that extends a canary would be a canary as well."""
    base = BASE + "match: {stream: true}\npercent: 5\n"
    policy = folder_with(tmp_path, base=base, mine="name: mine\nabout: y\nextends: base\n").read().default
    assert (policy.match, policy.percent) == (None, 100.0)


def test_names_that_a_folder_lacks_are_shipped_policies(tmp_path: Path) -> None:
    """To extend and as the default; the folder's own come first."""
    mine = "name: mine\nabout: y\nextends: cost_aware\n"
    found = folder_with(tmp_path, mine=mine).read()
    assert len(found.default.costs) > 5
    assert PolicyFolder(tmp_path, "round_robin").read().default.name == "round_robin"
    assert [policy.name for policy in found.active] == ["mine"]


def test_a_shipped_policy_is_tuned_under_its_own_name(tmp_path: Path) -> None:
    """A file that extends its own name extends the shipped policy and replaces it."""
    tuned = "name: cost_aware\nabout: y\nextends: cost_aware\ncosts: {eviction: {reuse: 3}}\n"
    found = folder_with(tmp_path, cost_aware=tuned, mine="name: mine\nabout: y\nextends: cost_aware\n").read()
    shipped_one = load_policies(shipped("policies"))["cost_aware"]
    assert repr(dict(found.default.costs)["eviction"]) == "EvictionTerm(reuse=3.0, learnt=2.0, congestion=2.0)"
    assert [name for name, _ in found.default.costs] == [name for name, _ in shipped_one.costs]


def test_every_file_with_a_match_is_in_force(tmp_path: Path) -> None:
    """In addition to the default."""
    slow = "name: slow\nabout: y\nextends: base\nmatch: {class: [rag], prompt_tokens: {min: 100}}\npercent: 50\n"
    found = folder_with(tmp_path, mine="name: mine\nabout: y\nextends: base\n", base=BASE, slow=slow).read()
    assert [policy.name for policy in found.active] == ["slow", "mine"]


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ("extends: bse\n", "/mine.yaml:3: extends: unknown policy 'bse'; did you mean 'base'?"),
        ("extends: mine\n", "/mine.yaml:3: extends: circular: mine extends mine"),
        ("extends: [base]\n", "/mine.yaml:3: extends: must be text"),
        ("extends: base\ncosts:\n  decod: null\n", "/mine.yaml:5: costs.decod: unknown key; did you mean 'decode'?"),
        ("extends: base\ncosts:\n  prefill:\n", "/mine.yaml:5: costs.prefill: empty value"),
        ("extends: base\npd: {split: false}\n", "/mine.yaml:4: pd.split: unknown key; did you mean 'splits'?"),
        ("extends: base\nmatch: {clas: chat}\n", "/mine.yaml:4: match.clas: unknown key; did you mean 'class'?"),
        (
            "extends: base\nmatch: {class: chatt}\n",
            "/mine.yaml:4: match.class: unknown class 'chatt'; did you mean",
        ),
        ("extends: base\nmatch:\n  stream: maybe\n", "/mine.yaml:5: match.stream: must be true or false"),
        ("extends: base\npercent: 5\n", "requires `match`"),
        ("extends: base\nmatch: {}\npercent: 0\n", "/mine.yaml:5: percent: must be greater than 0"),
        (
            "extends: base\nslo: {ttft_ms: 5}\n",
            "/mine.yaml:4: slo: was removed; write `slo: {ttft_ms: ..}` at the model's",
        ),
        ("extends: base\nshadow: {policy: base}\n", "/mine.yaml:4: shadow: was removed; record receipts"),
        (
            "extends: base\nretry: {attempts: 0}\n",
            "/mine.yaml:4: retry.attempts: must be greater than or",
        ),
        ("extends: broken\n", "/broken.yaml:1: costs.queu: unknown key; did you mean 'queue'?"),
    ],
)
def test_a_mistake_is_named_in_the_file_that_makes_it(tmp_path: Path, mine: str, message: str) -> None:
    """With its line, its key and what was probably meant; also in what is extended."""
    files = {"base": BASE, "mine": f"name: mine\nabout: y\n{mine}"}
    if "broken" in mine:
        files["broken"] = "{name: broken, about: x, costs: {queu: {}}, picker: {in_turn: {}}}\n"
    assert message in error_of(folder_with(tmp_path, **files))


def test_a_longer_circle_is_reported_in_full(tmp_path: Path) -> None:
    """Who extends whom."""
    extends = {"mine": "a", "a": "b", "b": "mine"}
    files = {name: f"name: {name}\nabout: y\nextends: {other}\n" for name, other in extends.items()}
    assert "circular: a extends b extends mine extends a" in error_of(folder_with(tmp_path, **files))


def test_a_folder_that_is_not_there_is_no_empty_one(tmp_path: Path) -> None:
    """The shipped ones do not take its place silently."""
    assert "policy folder not found" in error_of(PolicyFolder(tmp_path / "policys", "cost_aware"))


def test_the_stamp_changes_with_every_file_and_only_then(tmp_path: Path) -> None:
    """Content, another file, one less, the target of a link."""
    folder = folder_with(tmp_path, mine=BASE)
    stamps = [folder.stamp(), folder.stamp()]
    (tmp_path / "mine.yaml").write_text(BASE + "# longer\n")
    stamps.append(folder.stamp())
    (tmp_path / "other.yaml").symlink_to("mine.yaml")
    stamps.append(folder.stamp())
    (tmp_path / "third.txt").write_text(BASE)
    (tmp_path / "other.yaml").unlink()
    (tmp_path / "other.yaml").symlink_to("third.txt")
    stamps.append(folder.stamp())
    (tmp_path / "other.yaml").unlink()
    stamps.append(folder.stamp())
    assert stamps[0] == stamps[1] and stamps[2] == stamps[5]
    assert len(set(stamps)) == 4


def test_the_shipped_workload_classes() -> None:
    """Used without a file."""
    assert load_classes(None).names == {"chat", "rag", "agent", "batch", "long_context", "one_off"}


def test_a_file_of_classes_replaces_the_shipped_ones(tmp_path: Path) -> None:
    """All of them."""
    file = tmp_path / "classes.yaml"
    file.write_text("rules:\n- {class: vip, request: {tenant: acme}}\n- {class: rest}\n")
    assert load_classes(str(file)).names == {"vip", "rest"}


def test_a_mistake_in_classes_names_file_line_and_key(tmp_path: Path) -> None:
    """And the key that was probably meant."""
    file = tmp_path / "classes.yaml"
    file.write_text("rules:\n- class: agent\n  min_turns: 2\n- class: rest\n")
    with pytest.raises(
        ConfigError, match=r"classes\.yaml:3: rules\.0\.min_turns: unknown key; did you mean 'min_turn'"
    ):
        load_classes(str(file))
