from __future__ import annotations

import json
import re

import pytest
from attacks import attack

from mens_exp.artifacts import untrusted_input
from mens_exp.config.suite import JsonlCheck, JsonlSuite
from mens_exp.errors import ConfigError, DataError, Problems
from mens_exp.evals.jsonl_suite import jsonl_suite
from mens_exp.evals.suite import Answer, file_problems, frozen_suite

DRAFT = "https://json-schema.org/draft/2020-12/schema"


@pytest.fixture
def suite_of(tmp_path):
    """Write rows to a file and return the suite with the given check."""

    def made(*rows, check="exact", function=None):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = JsonlSuite(path=str(path), check=JsonlCheck(check), function=function)
        return jsonl_suite(config)

    return made


def judged(suite, *texts):
    return suite.judge([Answer(item=suite.items[0], text=text) for text in texts], None)


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("check", "expected", "good", "bad"),
    [
        ("exact", "Paris", ["Paris", " Paris\n"], ["paris", "It is Paris", ""]),
        ("contains", "Paris", ["It is PARIS."], ["Lyon", ""]),
        ("contains", ["red", "blue"], ["blue and red"], ["red", ""]),
        ("regex", r"^\d{4}$", ["1789"], ["in 1789", "17890", ""]),
        (
            "json_schema",
            SCHEMA,
            [
                '{"age": 3}',
                '```json\n{"age": 3}\n```',
                '```json\n{"age": "3"}\n```\nNo:\n```json\n{"age": 3}\n```',
                '<think>{"age": "3"}</think>{"age": 3}',
            ],
            ['{"age": "3"}', "3"],
        ),
    ],
)
def test_each_check_accepts_and_refuses(suite_of, check, expected, good, bad):
    """The correct answer has no error; a wrong one has an error that does not reveal the answer."""
    suite = suite_of({"prompt": "?", "expected": expected}, check=check)
    assert [one.success for one in judged(suite, *good)] == [True] * len(good)
    wrong = judged(suite, *bad)
    assert [one.success for one in wrong] == [False] * len(bad)
    assert all(one.errors and "Paris" not in one.errors[0] for one in wrong)


def test_json_that_does_not_parse_does_not_compile(suite_of):
    """Only json_schema has a notion of compiling; for other checks it is null with a reason."""
    suite = suite_of({"prompt": "?", "expected": SCHEMA}, check="json_schema")
    assert [one.compiles for one in judged(suite, '{"age": 1}', "{")] == [True, False]
    endless = ["[" * 5000, "[" * 900 + "]" * 900, "[NaN]", "-Infinity"]
    deep = {"type": "array", "items": {"$ref": "#"}}
    found = judged(suite_of({"prompt": "?", "expected": deep}, check="json_schema"), *endless)
    assert [one.success for one in found] == [False] * 4
    assert [one.compiles for one in found] == [False, True, False, False]
    text = suite_of({"prompt": "?", "expected": "x"})
    (one,) = judged(text, "x")
    assert one.compiles is one.richness is None
    assert one.unknown["compiles"] == "suite=jsonl judges texts, not code"


def test_a_function_of_the_user_judges(suite_of, tmp_path):
    """A user's function returns a verdict or an error; its file enters the digest."""
    file = tmp_path / "checks.py"
    file.write_text(
        "def close(prompt, expected, answer):\n"
        "    if not answer.strip().isdigit():\n"
        "        return 'it is no number'\n"
        "    return abs(int(answer) - expected) <= 1\n"
    )
    row = {"prompt": "7 + 5?", "expected": 12, "reference": "12"}
    suite = suite_of(row, check="function", function=f"{file}:close")
    first, second, third = judged(suite, "13", "15", "about 12")
    assert (first.success, second.success, third.errors) == (True, False, ("it is no number",))
    result = suite.self_test(None)
    assert (result.problem, result.references) == (None, {"whole": 1})
    before = suite.digest
    file.write_text(file.read_text() + "\n# another\n")
    assert suite_of(row, check="function", function=f"{file}:close").digest != before
    log = tmp_path / "log"
    log.write_text("")
    more = f"log = __import__('pathlib').Path({str(log)!r})"
    more += "\nlog.write_text(log.read_text() + '.')"
    file.write_text(f"{file.read_text()}\n{more}\n")
    suite_of(row, row, row, check="function", function=f"{file}:close")
    assert log.read_text() == "."  # once for all rows


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nowhere.py:f", "file not found"),
        ("checks.py:absent", "has no function absent"),
        ("broken.py:f", "ZeroDivisionError"),
    ],
)
def test_a_function_that_is_not_there_is_refused(
    suite_of,
    tmp_path,
    monkeypatch,
    function,
    said,
):
    """The message names the function and says why it cannot be loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checks.py").write_text("def f(prompt, expected, answer): return 1\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=said):
        suite_of({"prompt": "?", "expected": 1}, check="function", function=function)


@pytest.mark.parametrize(
    ("body", "found"), [("return 1", "1"), ("raise KeyError('x')", "KeyError")]
)
def test_a_function_without_a_verdict_ends_the_evaluation(suite_of, tmp_path, body, found):
    """An exception in the user's function is not scored as a wrong answer."""
    file = tmp_path / "checks.py"
    file.write_text(f"def f(prompt, expected, answer): {body}\n")
    suite = suite_of({"prompt": "?", "expected": 1}, check="function", function=f"{file}:f")
    with pytest.raises(DataError, match=rf"returns no verdict.*found {found}"):
        judged(suite, "x")


def test_rows_keep_their_names_turns_and_groups(suite_of):
    """The id defaults to the line number; turns stay as given; a row may have its own check."""
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Name?"},
    ]
    suite = suite_of(
        {"prompt": "A?", "system": "Be brief.", "expected": "a", "group": "easy"},
        {"id": "name", "messages": turns, "expected": "ada", "check": "contains"},
    )
    first, second = suite.items
    assert (first.id, first.group, first.reference) == ("1", "easy", "a")
    assert [turn["role"] for turn in first.messages] == ["system", "user"]
    assert (second.id, list(second.messages), second.prompt) == ("name", turns, "Name?")
    answers = [Answer(item=second, text="I am Ada.")]
    assert suite.judge(answers, None)[0].success


def test_a_group_whose_kpi_would_replace_another_is_refused(tmp_path):
    """A group called semantic would have the KPI semantic_task_success."""
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "A?", "expected": "a", "group": group} for group in ("easy", "semantic")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (problem,) = file_problems(JsonlSuite(path=str(path)))
    assert "'semantic': semantic_task_success" in str(problem)
    with pytest.raises(DataError, match="the name of another KPI"):
        frozen_suite(JsonlSuite(path=str(path)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?"}, "expected: missing key"),
        ({"prompt": "?", "expectd": "x", "expected": "x"}, "unknown key.*the nearest is expected"),
        ({"expected": "x"}, "needs exactly one prompt"),
        ({"prompt": "?", "messages": [], "expected": "x"}, "needs exactly one prompt"),
        ({"messages": [{"role": "assistant", "content": "x"}], "expected": "x"}, "not in order"),
        ({"messages": [{"role": "user"}], "expected": "x"}, "not in order"),
        ({"prompt": "?", "expected": "x", "check": "fuzzy"}, "check: wrong value"),
        ({"prompt": "?", "expected": ""}, "must be a text"),
        ({"prompt": "?", "expected": [], "check": "contains"}, "or a list of texts"),
        ({"prompt": "?", "expected": "(", "check": "regex"}, "is not a pattern"),
        ({"prompt": "?", "expected": {"type": 1}, "check": "json_schema"}, "is not a JSON schema"),
        (
            {"prompt": "?", "expected": {"pattern": "("}, "check": "json_schema"},
            "is not a JSON schema",
        ),
    ],
)
def test_a_row_that_is_none_is_refused(suite_of, row, message):
    """The error gives the line of the bad row."""
    with pytest.raises((DataError, Problems), match=message) as caught:
        suite_of(row)
    assert "rows.jsonl" in str(caught.value)


def test_two_rows_of_one_name_are_refused(suite_of):
    """A line number that serves as an id counts too."""
    with pytest.raises(DataError, match=r"rows\.jsonl:2: id: .*already exists"):
        suite_of({"prompt": "?", "expected": "x"}, {"id": "1", "prompt": "!", "expected": "x"})


def test_no_row_is_refused(suite_of):
    """An empty file is refused."""
    with pytest.raises(DataError, match="contains no rows"):
        suite_of()


def test_a_pattern_that_an_empty_answer_matches_fails_the_test_of_the_suite(
    suite_of,
):
    """So does a reference that fails its own check."""
    stub = suite_of({"prompt": "?", "expected": "a*", "check": "regex"}).self_test(None)
    assert stub.problem == "empty answers judged right: 1 (1 in all)"
    row = {"prompt": "?", "expected": "^a$", "check": "regex", "reference": "b"}
    wrong = suite_of(row).self_test(None)
    assert wrong.problem == "references judged wrong: 1 (1 in all)"


@pytest.mark.parametrize(
    ("check", "expected", "answer"),
    [
        ("regex", "(a+)+$", "a" * 60 + "!"),
        ("json_schema", {"pattern": "(a+)+$"}, json.dumps("a" * 60 + "!")),
        ("json_schema", {"patternProperties": {"(a+)+$": {}}}, json.dumps({"a" * 60 + "!": 1})),
        (
            "json_schema",
            {"properties": {"a": {"$schema": DRAFT, "pattern": "(a+)+$"}}},
            json.dumps({"a": "a" * 60 + "!"}),
        ),
        (
            "json_schema",
            {"$schema": DRAFT, "properties": {"a": {"$ref": "#"}}, "pattern": "(a+)+$"},
            json.dumps({"a": "a" * 60 + "!"}),
        ),
    ],
)
def test_a_pattern_that_never_ends_on_an_answer_is_refused(
    suite_of, monkeypatch, check, expected, answer
):
    """A pattern with catastrophic backtracking cannot hang the evaluation."""
    monkeypatch.setattr(untrusted_input, "_MOST_S", 0.3)
    suite = suite_of({"prompt": "?", "expected": expected}, check=check)

    def judge():
        untrusted_input._WORKER.end()
        return judged(suite, answer)

    end = attack(judge)
    assert end.how == "refused", end
    assert "suite.path: a pattern that is expected: the regular expression takes" in end.message


def test_patterns_of_a_schema_are_searched_for(suite_of):
    """A pattern may match anywhere in a string or key, as JSON Schema specifies."""
    schema = {"patternProperties": {"^n": {"type": "integer"}, "t": {"pattern": "b[0-9]"}}}
    suite = suite_of({"prompt": "?", "expected": schema}, check="json_schema")
    good, number, text = '{"n": 1, "at": "ab1"}', '{"no": "1"}', '{"at": "ab"}'
    assert [one.success for one in judged(suite, good, number, text)] == [True, False, False]


@pytest.mark.parametrize("ref", ["https://evil.example/s.json", "file:///etc/passwd", "other.json"])
def test_a_schema_fetches_nothing(suite_of, monkeypatch, ref):
    """A remote `$ref`, which the library itself would open, is not fetched."""
    monkeypatch.setattr("urllib.request.urlopen", lambda *_: pytest.fail("it went out"))
    said = rf"refers to a schema that is not in it: {re.escape(ref)}; put the schema into \$defs"
    with pytest.raises((DataError, Problems), match=said):
        suite_of(
            {"prompt": "?", "expected": {"properties": {"a": {"$ref": ref}}}}, check="json_schema"
        )


def test_a_schema_refers_to_its_own_parts(suite_of):
    """A `$ref` may use a local path, the schema's own `$id`, or the draft's meta-schema."""
    part = {"$id": "https://evil.example/part.json", "type": "integer"}
    refs = ("#/$defs/part", "https://evil.example/part.json")
    draft = "https://json-schema.org/draft/2020-12/schema"
    for ref, right, wrong in (*((ref, "1", '"a"') for ref in refs), (draft, "{}", "3")):
        schema = {"properties": {"a": {"$ref": ref}}, "$defs": {"part": part}}
        suite = suite_of({"prompt": "?", "expected": schema}, check="json_schema")
        answers = [f'{{"a": {value}}}' for value in (right, wrong)]
        assert [one.success for one in judged(suite, *answers)] == [True, False], ref


def test_a_reference_to_a_part_that_is_not_there_is_named(suite_of):
    """A missing `$ref` target is reported when the first answer is validated."""
    schema = {"properties": {"a": {"$ref": "#/$defs/part"}}}
    suite = suite_of({"prompt": "?", "expected": schema}, check="json_schema")
    with pytest.raises(DataError, match=r"a part that is missing.*/\$defs/part"):
        judged(suite, '{"a": 1}')
