"""Only the table of adapter methods asks which method or initialization is in use."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mens_exp.artifacts.adapter_tensors import FORMS
from mens_exp.config.lora import ADAPTERS, INITS, LoraConfig, LoraInit, LoraVariant
from mens_exp.lora.method import initialization_of, method_of

SOURCE = Path(__file__).parents[2] / "src" / "mens_exp"
NAMES = (ADAPTERS.built_in.keys() | INITS.keys()) - {"lora", "default"}
ENUMS = {"LoraVariant", "LoraInit"}
DECLARES = "config/lora.py"


def is_member(node):
    """Tell whether an expression is a member of one of the two enums, by name."""
    owner = node.value if isinstance(node, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id in ENUMS and not node.attr.startswith("_")


def asks(node):
    """Tell whether one side of a comparison reads the method or the initialization."""
    words = {getattr(one, "attr", getattr(one, "id", "")) for one in ast.walk(node)}
    return bool(words & {"variant", "init"})


def questions(source):
    """Return the lines that use an enum member or compare with one of its names."""
    found = set()
    if not any(word in source for word in ("variant", "init", *ENUMS, *NAMES)):
        return []  # parsing every file takes seconds
    for node in ast.walk(ast.parse(source)):
        if is_member(node):
            found.add(node.lineno)
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            named = {
                one.value
                for side in sides
                for one in ast.walk(side)
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
            if named & NAMES or (named & {"lora", "default"} and any(map(asks, sides))):
                found.add(node.lineno)
    return sorted(found)


def test_nothing_outside_asks_which_method_or_initialization_it_is():
    """Anything that depends on the method is an attribute or a method of it."""
    asked = {
        f"{file}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        if (file := path.relative_to(SOURCE).as_posix()) != DECLARES
        for line in questions(path.read_text("utf-8"))
    }
    assert asked == set()


@pytest.mark.parametrize(
    "question",
    [
        "a = config.lora.variant is LoraVariant.dora",
        "a = config.lora.init in {LoraInit.pissa, LoraInit.loftq}",
        "a = manifest.variant == 'rslora'",
        "a = lora.init.value != 'default'",
        "a = adapter.variant == 'lora'",
        "table = {LoraVariant.lora: 1}",
    ],
)
def test_a_question_is_found(question):
    """The check finds enum members and comparisons with names."""
    assert questions(question) == [1]


@pytest.mark.parametrize(
    "answer",
    ["a = lora.spec.peft", "a = LoraVariant(name)", "a = kind == 'lora'", "say = 'use dora'"],
)
def test_an_answer_is_no_question(answer):
    """Calling the method, choosing from its names, and messages are allowed."""
    assert questions(answer) == []


def test_the_schema_accepts_what_the_tables_have():
    """A mismatch between schema and table would otherwise show only in a run."""
    assert {one.value for one in LoraVariant} == ADAPTERS.built_in.keys()
    assert {one.value for one in LoraInit} == INITS.keys()
    for spec in ADAPTERS.built_in.values():
        assert method_of(spec)
        assert spec.form is FORMS[spec.name]
        assert spec.inits <= INITS.keys()
    assert all(initialization_of(spec) for spec in INITS.values() if spec.from_weights)


def test_a_record_of_another_method_is_unknown():
    """Records may come from other programs, with names that do not exist here."""
    assert ADAPTERS.known("oft") is None


def test_a_group_hands_on_to_its_method_and_initialization():
    """The config group has the settings; method and initialization interpret them."""
    plain = LoraConfig(name="x", targets=["qkv"], r=8, alpha=4)
    assert plain.spec.described(plain) == ["r 8", "alpha 4", "dropout 0.05"]
    dora = LoraConfig(name="x", targets=["qkv"], variant=LoraVariant.dora, rank_pattern={"q": 2})
    assert dora.spec.described(dora)[:2] == ["dora", "r 16 and others"]
    assert not plain.start_changes_base
    for init, iters, changes in ((LoraInit.pissa, 1, True), (LoraInit.loftq, 1, False)):
        lora = LoraConfig(name="x", targets=["qkv"], init=init, loftq_iters=iters)
        assert lora.start_changes_base is changes
        assert LoraConfig(name="x", targets=[], init=init, loftq_iters=2).start_changes_base
