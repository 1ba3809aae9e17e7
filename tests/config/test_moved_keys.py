"""Root keys of earlier releases that moved into a task: refused if typed, read if stored."""

from __future__ import annotations

import shlex

import pytest
import yaml

from mens_exp import cli
from mens_exp.config.compose import compose, from_yaml, to_yaml, typed
from mens_exp.config.overrides import check
from mens_exp.config.root import MOVED
from mens_exp.config.task import ExportFormat
from mens_exp.errors import ConfigError

MERGE = ["task=merge", "adapter.file=a.safetensors", "out=o"]
# A command of the key's task, the old key, a value, and the new key.
COMMANDS = [
    (["task=compare", "path=p"], "factors", "[lora.r,seed]", "compare.factors"),
    ([*MERGE, "merge.meta=m"], "base_shard", "[b.safetensors]", "merge.base_shard"),
    ([*MERGE, "merge.base_shard=[b.safetensors]"], "meta", "m.json", "merge.meta"),
    (["task=inspect", "path=p"], "replay", "true", "inspect.replay"),
    (["task=promote", "ledger=l"], "replay", "true", "promote.replay"),
    (["task=inspect", "path=p"], "verify", "true", "inspect.verify"),
    (["task=promote", "ledger=l"], "open", "june", "promote.open_cycle"),
    (["task=export", "path=p"], "format", "gguf", "export.format"),
    (["task=chat", "path=p"], "prompt", "why", "chat.prompt"),
    (["task=push", "path=p"], "repo", "me/it", "push.repo"),
]
TYPED = {
    "true": True,
    "gguf": ExportFormat.gguf,
    "june": "june",
    "me/it": "me/it",
    "why": "why",
    "[lora.r,seed]": ["lora.r", "seed"],
    "[b.safetensors]": ["b.safetensors"],
    "m.json": "m.json",
}


def test_every_moved_key_is_tried():
    """There is a command for every pair of old and new key."""
    places = {(old, new) for old, several in MOVED.items() for new in several}
    assert {(old, new) for _, old, _, new in COMMANDS} == places


@pytest.mark.parametrize(("command", "old", "value", "new"), COMMANDS)
@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_typed_key_is_answered_with_the_whole_command_of_today(command, old, value, new, prefix):
    """Other problems are reported too: the same ones that the suggested command has."""
    problems = check([*command, f"{prefix}{old}={value}", "lora.rang=3"]).problems
    (moved,) = [one for one in problems if one.what == f"{old} is now {new}"]
    assert moved.exit_code == 2
    written = ["python", "-m", "mens_exp", *command, f"{new}={value}", "lora.rang=3"]
    assert moved.remedy == f"write {shlex.join(written)}"
    again = check(written[3:]).problems
    assert {str(one) for one in problems} == {str(moved), *map(str, again)}
    assert any(one.where == "lora.rang" for one in again)


def test_the_command_line_answers_with_exit_code_2(capfd, monkeypatch, tmp_path):
    """Nothing is written; the suggested command keeps -m and has the right quoting."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["-m", "task=promote", "ledger=a b", "open=one,two"]) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "open is now promote.open_cycle" in said
    assert "-m mens_exp -m task=promote 'ledger=a b' promote.open_cycle=one,two" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["opens", "lora.open", "promote.open"])
def test_other_keys_are_unknown_as_before(key):
    """Only a whole key is looked up."""
    (problem,) = check(["task=promote", "ledger=l", "promote.replay=true", f"{key}=x"]).problems
    assert "is now" not in problem.what
    assert problem.where == key


@pytest.mark.parametrize(("command", "old", "value", "new"), COMMANDS)
def test_a_stored_configuration_is_read_with_the_old_key(command, old, value, new, tmp_path):
    """The task's section of that release may be there or missing."""
    today = compose([[*command, f"{new}={value}"]])[0].values
    section, _, key = new.partition(".")
    plain = yaml.safe_load(to_yaml(today))
    plain[old] = plain[section].pop(key)
    assert plain[old] == yaml.safe_load(value)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(plain), "utf-8")
    assert typed(from_yaml(file)) == typed(today)
    del plain[section]
    file.write_text(yaml.safe_dump(plain), "utf-8")
    assert from_yaml(file)[section][key] == TYPED[value]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("open: june\npromote: {open_cycle: july}", "open"),
        ("open: june\npromote: none", "open"),
        ("open: [june]", "Cannot convert"),
        ("opens: june", "opens"),
    ],
)
def test_a_stored_key_without_a_place_is_refused(text, found, tmp_path):
    """The new key exists too, the type is wrong, or no release had the key."""
    file = tmp_path / "config.yaml"
    plain = yaml.safe_load(to_yaml(compose([["task=promote"]])[0].values))
    del plain["promote"]["open_cycle"]
    file.write_text(yaml.safe_dump({**plain, **yaml.safe_load(text)}), "utf-8")
    with pytest.raises(ConfigError) as refused:
        from_yaml(file)
    assert found in str(refused.value.found)


@pytest.mark.parametrize("group", ["experiment", "preset"])
def test_a_file_of_the_users_names_its_key_of_today(group, monkeypatch, tmp_path):
    """The message has the file's path, before composition; the new key composes."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "conf" / group / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\n# e\nopen: june\n", "utf-8")
    (problem,) = check([f"{group}=mine"]).problems
    assert str(problem) == f"conf/{group}/mine.yaml: open is now promote.open_cycle"
    file.write_text("# @package _global_\n# e\npromote: {open_cycle: june}\n", "utf-8")
    (cell,) = check([f"{group}=mine"]).cells
    assert cell.config.promote.open_cycle == "june"


def test_a_deletion_of_a_moved_key_is_not_advised():
    """Settings cannot be removed, so the command to write is without it."""
    removed, moved = check(["~format", "seed=3"]).problems
    assert moved.remedy == "write python -m mens_exp seed=3"
    assert removed.remedy == "drop ~export.format, which leaves the default"
