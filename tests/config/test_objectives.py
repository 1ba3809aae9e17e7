"""Only the table of objectives asks which objective is in use."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from mens_exp.config.objective import (
    OBJECTIVES,
    AssistantObjective,
    CausalObjective,
    LastKObjective,
    ObjectiveConfig,
    Turns,
)
from mens_exp.config.plugins import named_object
from mens_exp.rows.documents import RowDocuments

SOURCE = Path(__file__).parents[2] / "src" / "mens_exp"
NAMES = OBJECTIVES.built_in.keys()
SCHEMAS = {spec.schema.__name__ for spec in OBJECTIVES.built_in.values()}
DECLARES = "config/objective.py"


def is_objective(node):
    """Tell whether an expression reads an objective's name or its supervised tokens."""
    if isinstance(node, ast.Attribute):
        owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
        return node.attr in {"labels", "objective"} or (
            node.attr == "name" and owner == "objective"
        )
    return isinstance(node, ast.Name) and node.id in {"labels", "objective"}


def questions(source):
    """Return the lines that compare an objective's name, or name a settings class of one."""
    found = set()
    if not re.search("labels|objective", source.casefold()):
        return []  # parsing every file takes seconds
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name | ast.Attribute):
            word = node.id if isinstance(node, ast.Name) else node.attr
            found |= {node.lineno} if word in SCHEMAS else set()
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            named = {
                one.value
                for side in sides
                for one in ast.walk(side)
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
            found |= {node.lineno} if named & NAMES and any(map(is_objective, sides)) else set()
    return sorted(found)


def test_nothing_outside_asks_which_objective_it_is():
    """Anything that depends on the objective is an attribute or a method of it."""
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
        "a = config.objective.labels == 'last_k'",
        "a = labelling.objective in ('causal', 'last_k')",
        "a = config.objective.name == 'assistant'",
        "a = isinstance(config.objective, LastKObjective)",
        "a = objective.CausalObjective().labels",
    ],
)
def test_a_question_is_found(question):
    """The check finds comparisons of names, and settings classes."""
    assert questions(question) == [1]


@pytest.mark.parametrize(
    "answer", ["a = objective.spec.in_chunks", "a = turn['role'] == 'assistant'", "a = 'causal'"]
)
def test_an_answer_is_no_question(answer):
    """Calling the objective is allowed, and so are the same words in another meaning."""
    assert questions(answer) == []


def test_each_objective_has_its_settings_and_its_documents():
    """A name without an implementation would otherwise fail only in a run."""
    for name, spec in OBJECTIVES.built_in.items():
        settings = spec.schema(_target_="any")
        assert name == spec.name == settings.name
        assert OBJECTIVES.built_in[settings.labels].documents == spec.documents
        assert settings.spec is spec
        assert named_object(spec.documents, RowDocuments, of=name)


def test_settings_are_of_tokens_or_of_the_loss():
    """Settings that select tokens enter the cache key; the others are arguments of the class."""
    assistant = AssistantObjective(_target_="any", turns=Turns.last, chunk_tokens=8)
    assert assistant.spec.selected(assistant) == {"turns": "last"}
    of_loss = {"chunk_tokens": 8, "dft": False, "label_smoothing": 0.0, "z_loss": 0.0}
    assert assistant.spec.arguments(assistant, 32, on_gpu=False) == of_loss
    last = LastKObjective(_target_="any", k=3)
    assert last.spec.selected(last) == {"k": 3}
    causal = CausalObjective(_target_="any")
    assert causal.spec.selected(causal) == {}


def test_what_is_supervised_has_its_share():
    """All, half, or k of a document's tokens; k=0 means all tokens of the response."""
    share = {
        (settings.name, getattr(settings, "k", None)): settings.spec.supervised_frac(settings, 40)
        for settings in (
            CausalObjective(_target_="any"),
            AssistantObjective(_target_="any"),
            LastKObjective(_target_="any", k=4),
            LastKObjective(_target_="any", k=0),
            LastKObjective(_target_="any", k=64),
        )
    }
    assert share == {
        ("causal", None): 1,
        ("assistant", None): 0.5,
        ("last_k", 4): 0.1,
        ("last_k", 0): 0.5,
        ("last_k", 64): 1,
    }


@dataclass(kw_only=True, slots=True)
class _Own(ObjectiveConfig):
    """A user's objective, as declared by a file in `own/`."""

    weight: float = 1.0


@pytest.mark.parametrize("labels", ["assistant", "causal", "last_k"])
def test_a_class_of_the_users_is_over_the_tokens_that_it_names(labels):
    """Its documents are those of the built-in objective; its loss is not a known likelihood."""
    own = _Own(_target_="own.loss.Mine", name="mine", labels=labels)
    ours = OBJECTIVES.named(labels)
    assert (own.spec.name, own.spec.documents) == ("mine", ours.documents)
    assert (own.spec.is_likelihood, own.spec.in_chunks, own.spec.needs_reference) == (False,) * 3
    assert own.spec.arguments(own, 32, on_gpu=False) == {"weight": 1.0}
    assert own.spec.head_positions(own, 700, 32, on_gpu=False) == 700  # the logits of all tokens
    assert own.spec.last_tokens(own) is None
