"""Untrusted YAML files: plain data or a `MensError`, without delay."""

from __future__ import annotations

import datetime as dt

import pytest
import yaml
from attacks import attack

from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.config.compose import from_yaml
from mens_exp.config.user_config import user_config_problems
from mens_exp.errors import ConfigError, DataError, Problems
from mens_exp.evals.harness_files import read_task_files
from mens_exp.layout.checkpoint_files import license_of


def doubled(first, line, times=60):
    """Write a chain of anchors, each of which contains the previous one twice."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{n}: &a{n} " + line.replace("@", f"*a{n - 1}") for n in range(1, times)]
    return "\n".join(lines) + "\n"


BOMBS = {
    "aliases in lists": doubled("[x, x]", "[@, @]"),
    "aliases in mappings": doubled("{x: 1}", "{p: @, q: @}"),
    "merged mappings": doubled("{x: 1}", "{<<: [@, @]}"),
    "nested lists": "a: " + "[" * 50_000 + "]" * 50_000,
    "nested mappings": "".join(" " * n + "a:\n" for n in range(1_000)),
    "nested lines": "a:\n" + " " * 4 + "- " * 5_000 + "x\n",
    "many values": "a: [" + "1," * 300_000 + "]",
    "a number of many digits": "a: " + "9" * 5_000,
    "a number of 64 bits and more": f"a: {2**70}",
    "a number of 64 bits and more to base 16": f"a: {2**96:#x}",
    "keys with equal hashes": "".join(f"{n * (2**61 - 1)}: 1\n" for n in range(1, 90_000)),
    "a number to base 60": "a: " + ":".join(["59"] * 400_000),
    "a number to base 2": "a: 0b" + "1" * 5_000_000,
}
WRONG = {
    "a date that is none": "a: 2020-13-45",
    "an integer without digits": '!!int ""',
    "a float that is none": "!!float x",
    "a time that is none": "!!timestamp x",
    "a boolean that is none": "!!bool x",
    "a list as a key": "? [1]\n: 2",
    "bytes that are no text": b"\xff\xfe\x00",
    "a class": "!!python/object/apply:os.system [ls]",
    "an alias of nothing": "*a",
    "two documents": "a: 1\n---\nb: 2\n",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_what_is_small_in_the_file_and_large_in_memory_is_refused(text):
    """The file is refused before any object is built."""
    end = attack(parse_yaml, text, "x.yaml")
    assert end.how == "refused", end
    assert end.message.startswith("x.yaml: the YAML is too large for a configuration")


@pytest.mark.parametrize(
    "value", [2**64 - 1, -(2**63), 1.5e300, "deadbeef" * 5, "1" * 8, "0" * 19 + "e5", "a1" * 32]
)
def test_numbers_of_64_bits_and_digests_are_read(value):
    """The values equal those of PyYAML."""
    text = f"a: {value}"
    assert parse_yaml(text, "x.yaml") == yaml.safe_load(text)


@pytest.mark.parametrize("text", [*WRONG.values(), doubled("[x]", "[@, @")], ids=[*WRONG, "cut"])
def test_what_is_no_yaml_is_an_error_of_ours(text):
    """Includes files on which PyYAML's constructors raise Python's own errors."""
    with pytest.raises(DataError, match=r"^x\.yaml: is not valid YAML"):
        parse_yaml(text, "x.yaml")


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: {<<: *a}}", "&a {b: *a}"])
def test_a_value_that_contains_itself_is_refused(tmp_path, text):
    """Walking such a value would never end; a stored configuration is refused, too."""
    with pytest.raises(DataError, match=r"^x\.yaml: a value contains itself · found \*a"):
        parse_yaml(text, "x.yaml")
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="a value contains itself"):
        from_yaml(tmp_path / "config.yaml")


def test_aliases_of_a_usual_size_stay():
    """Ordinary use of aliases is accepted."""
    text = "a: &a {b: [1, 2.5, null, true, 2026-01-05]}\nc: *a\nd: {<<: *a, e: f}\n"
    held = [1, 2.5, None, True, dt.date(2026, 1, 5)]
    assert parse_yaml(text, "x.yaml") == {
        "a": {"b": held},
        "c": {"b": held},
        "d": {"b": held, "e": "f"},
    }
    assert parse_yaml("", "x.yaml") is None
    assert parse_yaml("a: " + "1 apple, " * 1_000, "x.yaml")["a"].startswith("1 apple")


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_no_reader_takes_longer_over_a_bomb(text, tmp_path, monkeypatch):
    """Run configurations, the harness's task files, model cards and files of ./conf."""
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "README.md").write_text(f"---\n{text}\n---\n", encoding="utf-8")
    (tmp_path / "conf" / "logger").mkdir(parents=True)
    (tmp_path / "conf" / "logger" / "mine.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def told(read, *given):
        end = attack(read, *given)
        return end.how, end.message

    for read, given in ((from_yaml, "config.yaml"), (read_functions, ".")):
        how, message = told(read, tmp_path / given)
        assert how == "refused", message
        assert "config.yaml" in message
    assert told(license_of, tmp_path) == ("returned", "None")
    how, message = told(lambda: [str(one) for one in user_config_problems()])
    assert how == "returned"
    assert "conf/logger/mine.yaml" in message


def read_functions(directory):
    return read_task_files(directory, calls_functions=False)


def test_task_files_that_include_each_other_are_read_once_each(tmp_path):
    """Each of 40 files includes the next one twice."""
    for number in range(40):
        (tmp_path / f"t{number}.yaml").write_text(
            f"task: t{number}\ninclude: [t{number + 1}.yaml, t{number + 1}.yaml]\n"
        )
    (tmp_path / "t40.yaml").write_text("task: t40\n")
    end = attack(lambda: len(read_functions(tmp_path).tasks))
    assert (end.how, end.message) == ("returned", "41")
    (tmp_path / "t40.yaml").write_text("task: t40\ninclude: [5]\n")
    with pytest.raises(Problems, match="is not a path"):
        read_functions(tmp_path)
