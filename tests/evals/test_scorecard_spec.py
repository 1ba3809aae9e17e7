from __future__ import annotations

import copy
import json

import pytest

from mens_exp.errors import DataError, Problems
from mens_exp.evals.attempts import Plan, answer_all
from mens_exp.evals.scorecard_spec import FixtureEngine, SpecSuite, read_spec
from mens_exp.evals.suite import Answer

SPEC = {
    "schema_version": 1,
    "prompt_pack_version": "2026-11",
    "max_retries": 1,
    "conditions": [
        {
            "id": "old",
            "label": "Answers of last week",
            "mode": "fixture_file",
            "backend": "base",
            "model_id": "smol",
            "fixture": "old.json",
        },
        {
            "id": "new",
            "label": "The server",
            "mode": "http_generate",
            "backend": "qlora",
            "model_id": "smol-tuned",
            "adapter_revision": "abc",
            "base_url": "http://127.0.0.1:1/v1",
        },
    ],
    "tasks": [
        {
            "id": "add",
            "prompt": "Write add.",
            "expected_contains": ["def add"],
            "semantic_expected_contains": ["a + b"],
            "reference": "def add(a, b):\n    return a + b",
        },
        {
            "id": "say",
            "prompt": "Say hello.",
            "expected_contains": ["hello"],
            "language": "text",
        },
    ],
}


def written(path, spec):
    path.write_text(json.dumps(spec))
    return path


def suite(path):
    return SpecSuite(spec=read_spec(written(path / "spec.json", SPEC)))


def test_a_specification_comes_back_as_written(tmp_path):
    """A specification round-trips; optional keys may be absent."""
    assert read_spec(written(tmp_path / "spec.json", SPEC)) == SPEC


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("schema_version",), 2, "schema_version: wrong value.*expected 1"),
        (("max_retries",), 9, "max_retries: wrong value.*0 to 8"),
        (("conditions",), [], "conditions: wrong value"),
        (("conditions", 0, "id"), "new", "each once"),
        (("conditions", 0, "mode"), "http", "mode: wrong value"),
        (("conditions", 0, "backend"), "qlor", "backend.*the nearest is qlora"),
        (("conditions", 0, "mode"), "http_generate", "base_url alone with mode http_generate"),
        (("conditions", 1, "fixture"), "x.json", "found base_url, fixture"),
        (("tasks", 0, "expected_contains"), ["", "x"], "texts that are not empty"),
        (("tasks", 0, "prompt"), "Say hello.", "a prompt twice"),
        (("tasks", 1, "expcted"), [], "unknown key"),
        (("prompts",), [], "unknown key"),
    ],
)
def test_a_wrong_specification_is_refused(tmp_path, place, value, message):
    """The error gives the path of the wrong value."""
    spec = copy.deepcopy(SPEC)
    node = spec
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    with pytest.raises((DataError, Problems), match=message):
        read_spec(written(tmp_path / "spec.json", spec))


def test_models_are_no_part_of_the_digest(tmp_path):
    """Tasks, retries and prompt version enter the digest; models do not."""
    first = suite(tmp_path)
    other = SpecSuite(spec={**first.spec, "conditions": first.spec["conditions"][:1]})
    assert other.digest == first.digest
    assert SpecSuite(spec={**first.spec, "max_retries": 2}).digest != first.digest
    assert SpecSuite(spec={**first.spec, "tasks": first.spec["tasks"][:1]}).digest != first.digest


@pytest.mark.parametrize(
    ("text", "compiles", "success", "semantic"),
    [
        ("def add(a, b):\n    return a + b", True, True, True),
        ("```python\ndef add(a, b):\n    return a + b\n```", True, True, True),
        ("def add(a, b):\n    return sum([a, b])", True, True, False),
        ("def add(a, b):\n    # a + b\n    pass", True, True, False),  # a stub
        ("def plus(a, b):\n    return a + b", True, False, False),
        ("def add(a, b:", False, False, False),
        ("", False, False, False),
    ],
)
def test_code_is_judged_by_what_it_contains(tmp_path, text, *, compiles, success, semantic):
    """Code must parse and contain the expected text; a stub is not semantically correct."""
    one = suite(tmp_path)
    (judged,) = one.judge([Answer(item=one.items[0], text=text)], None)
    assert (judged.compiles, judged.success, judged.semantic) == (compiles, success, semantic)
    assert bool(judged.errors) is not success


def test_text_is_not_compiled(tmp_path):
    """For text, `compiles` is null with a reason."""
    one = suite(tmp_path)
    (judged,) = one.judge([Answer(item=one.items[1], text="Oh, hello there.")], None)
    assert (judged.compiles, judged.success) == (None, True)
    assert judged.unknown["compiles"] == "the answer is text, not code"


def test_the_references_pass_the_suites_own_test(tmp_path):
    """References that are given must pass, and an empty answer must not."""
    result = suite(tmp_path).self_test(None)
    assert result is not None
    assert (result.problem, result.references, result.stubs) == (
        None,
        {"whole": 1, "fenced": 1},
        2,
    )
    spec = copy.deepcopy(SPEC)
    spec["tasks"][0]["reference"] = "def plus(): pass"
    wrong = SpecSuite(spec=read_spec(written(tmp_path / "spec.json", spec))).self_test(None)
    assert wrong is not None
    assert wrong.problem == "references judged wrong: add (1 in all)"


def test_a_fixture_answers_attempt_by_attempt(tmp_path):
    """The second answer is used for the first repair; unrecorded counts are null."""
    one = suite(tmp_path)
    answers = {"add": ["def add(", "def add(a, b):\n    return a + b"], "say": ["no"]}
    engine = FixtureEngine(written(tmp_path / "old.json", answers), one.spec["tasks"])
    add, say = answer_all(one, engine, None, Plan(max_retries=3), "old")
    assert (add["attempts"], add["repair_depth"], add["task_success"]) == (2, 1, True)
    assert (say["attempts"], say["task_success"], say["completion"]) == (1, False, "no")
    assert add["tokens_in"] is add["latency_ms"] is add["time_to_first_valid_ms"] is None
    assert add["unknown"]["tokens_in"] == "the answers were made before, and nobody counted"
    assert add["condition"] == "old"


def test_a_fixture_without_a_task_is_refused(tmp_path):
    """The error names the task that the fixture lacks."""
    one = suite(tmp_path)
    with pytest.raises(DataError, match=r"lacks answers.*found say"):
        FixtureEngine(written(tmp_path / "old.json", {"add": ["x"]}), one.spec["tasks"])
