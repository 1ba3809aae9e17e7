"""Files in no known format are reported once, with columns that make them readable."""

from __future__ import annotations

import csv
import json
import re
import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from mens_exp.config.data import JsonlData, RowFormat
from mens_exp.corpus.mix import RowStream
from mens_exp.errors import DataError, Problems
from mens_exp.rows.readers import Reading, read_rows

TURNS = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}]
SPOKEN = [{"from": "human", "value": "p"}, {"from": "gpt", "value": "r"}]


def written(path, row, count=181):
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(count)), "utf-8")
    return path


def refused(path, **how):
    with pytest.raises((DataError, Problems)) as caught:
        read_rows(path, Reading(**how))
    return caught.value


def columns_in(remedy):
    """Parse the override in a remedy as a shell and Hydra would."""
    word = next(one for one in shlex.split(remedy) if one.startswith("data.columns"))
    override = OverridesParser.create().parse_override(word)
    value = override.value()
    return value if isinstance(value, dict) else {override.key_or_group.split(".")[2]: value}


@pytest.mark.parametrize(
    ("row", "learned"),
    [
        ({"frage": "p", "antwort": "r", "quelle": "x"}, ("p", "r")),
        ({"question": "p", "answer": "r"}, ("p", "r")),
        ({"answer": "r", "question": "p"}, ("p", "r")),
        ({"promt": "p", "respnse": "r"}, ("p", "r")),
        ({"Prompt": "p", "Response": "r"}, ("p", "r")),
        ({"id": "a-1", "frage": "p q", "antwort": "r s"}, ("p q", "r s")),
        ({"User Query": "p", 'the "reply"': "r", "n": 3}, ("p", "r")),
        ({"question": "p", "chosen": "r"}, ("p", "r")),
        ({"antwort": "r", "query": "p"}, ("p", "r")),
        ({"content": "p", "n": 3}, ("", "p")),
        ({"dialogue": TURNS, "source": "x"}, ("p", "r")),
        ({"chat": SPOKEN}, ("p", "r")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_remedy_names_columns_that_can_be_read(tmp_path, row, learned):
    """One message covers all rows, and its override, used as given, reads them all."""
    path = written(tmp_path / "rows.jsonl", row)
    problem = refused(path)
    assert isinstance(problem, DataError)
    assert problem.where == f"{path}:1"
    assert problem.what.endswith(
        "match no known format, here and in 180 more rows (2, 3, 4, 5, 6, …)"
    )
    assert problem.found == ", ".join(map(repr, row))
    columns = columns_in(problem.remedy)
    assert set(columns.values()) <= row.keys()
    found = read_rows(path, Reading(columns=columns)).pairs
    assert {(pair.prompt, pair.response) for pair in found} == {learned}


@pytest.mark.parametrize("row", [{}, {"n": 1, "m": None}, {"a": [], "b": " "}])
def test_rows_without_texts_get_no_columns(tmp_path, row):
    """Without text there is no column to train on."""
    problem = refused(written(tmp_path / "rows.jsonl", row))
    assert "data.columns" not in str(problem)
    assert '{"prompt": "…", "response": "…"}' in problem.remedy


def test_a_csv_file_of_other_columns_is_told_once(tmp_path):
    """The message gives the row; turns in a cell are recognized as JSON."""
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["chat", "n"], *[[json.dumps(TURNS), 1]] * 20])
    problem = refused(path)
    assert columns_in(problem.remedy) == {"messages": "chat"}
    assert "here and in 19 more rows" in problem.what


def test_a_format_that_is_said_does_not_hide_what_the_rows_are(tmp_path):
    """The message still describes the row, which has none of the format's keys."""
    path = written(tmp_path / "rows.jsonl", {"frage": "p", "antwort": "r"})
    assert "match no known format" in refused(path, form=RowFormat.pair).what


def test_columns_that_rows_lack_are_told_once(tmp_path):
    """The message suggests columns that the rows have."""
    path = written(tmp_path / "rows.jsonl", {"frage": "p", "antwort": "r"})
    problem = refused(path, columns={"prompt": "frage", "response": "answer"})
    assert problem.what.startswith("there is no column 'answer', here and in 180 more rows")
    assert columns_in(problem.remedy) == {"prompt": "frage", "response": "antwort"}


@pytest.mark.parametrize("key", ["answer", "chosen"])
def test_key_of_another_tool_is_renamed_by_whole_columns(tmp_path, key):
    """A single column would leave nothing to train on."""
    path = written(tmp_path / "rows.jsonl", {"instruction": "p", key: "r"})
    columns = columns_in(refused(path).remedy)
    assert columns == {"prompt": "instruction", "response": key}
    assert read_rows(path, Reading(columns=columns)).pairs[0].response == "r"


def test_a_rendered_text_beside_alpacas_keys_is_left_out_by_columns(tmp_path):
    """Alpaca's own file has `text`, the rendered prompt."""
    row = {"instruction": "p", "input": "i", "output": "r", "text": "Below is p"}
    path = written(tmp_path / "rows.jsonl", row)
    columns = columns_in(refused(path).remedy)
    assert columns == {"prompt": "instruction", "input": "input", "response": "output"}
    assert read_rows(path, Reading(columns=columns)).pairs[0].prompt == "p\n\ni"


def test_further_key_of_incomplete_rows_is_dropped_without_columns(tmp_path):
    """Suggested columns would lack the answer; a similar key is not a misspelling."""
    problems = refused(written(tmp_path / "rows.jsonl", {"prompt": "p", "frage": "x"}))
    assert [problem.remedy for problem in problems.problems] == ["drop it", None]
    assert "nearest" not in str(problems)


def test_streamed_rows_are_told_once(tmp_path):
    """The message covers the rows read so far."""
    path = written(tmp_path / "rows.jsonl", {"frage": "p", "antwort": "r"})
    stream = RowStream(JsonlData(path=[str(path)], streaming=True, shuffle_buffer=100), None)
    with pytest.raises(DataError, match="match no known format") as caught:
        stream.next_window()
    assert "here and in 99 more rows at least (2, 3, 4, 5, 6, …)" in caught.value.what
    assert columns_in(caught.value.remedy) == {"prompt": "frage", "response": "antwort"}


# https://platform.openai.com/docs/guides/fine-tuning, "Fine-tuning examples", function calls.
OPENAI = {
    "messages": [
        {"role": "user", "content": "What is the weather in San Francisco?"},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "call_id",
                    "type": "function",
                    "function": {
                        "name": "get_current_weather",
                        "arguments": '{"location": "San Francisco, USA", "format": "celsius"}',
                    },
                }
            ],
        },
    ],
    "parallel_tool_calls": False,
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get_current_weather",
                "description": "Get the current weather",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "location": {
                            "type": "string",
                            "description": "The city and country, eg. San Francisco, USA",
                        },
                        "format": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                    },
                    "required": ["location", "format"],
                },
            },
        }
    ],
}


def test_openais_rows_of_tool_calls_are_read_as_documented(tmp_path):
    """Tools and calls are read; parallel_tool_calls is not part of the text."""
    (pair,) = read_rows(written(tmp_path / "rows.jsonl", OPENAI, 1)).pairs
    held = json.loads(pair.conversation)
    assert held["tools"] == OPENAI["tools"]
    (call,) = held["messages"][1]["tool_calls"]
    assert call["function"]["arguments"] == {"location": "San Francisco, USA", "format": "celsius"}
    assert "parallel" not in pair.conversation


def parallel(value, calls=1):
    turn = OPENAI["messages"][1]
    turn = {**turn, "tool_calls": turn["tool_calls"] * calls}
    return {**OPENAI, "messages": [OPENAI["messages"][0], turn], "parallel_tool_calls": value}


@pytest.mark.parametrize(
    "row", [parallel(None, 2), parallel(True, 2), parallel(True), parallel(False)]
)
def test_calls_may_be_parallel_unless_the_row_says_no(tmp_path, row):
    """Two calls in one turn need parallel_tool_calls to be true or absent."""
    assert len(read_rows(written(tmp_path / "rows.jsonl", row, 1)).pairs) == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (parallel(False, 2), "a turn calls several tools, and 'parallel_tool_calls' is false"),
        (parallel("no"), "'parallel_tool_calls' must be true or false · found string 'no'"),
        (
            {"prompt": "p", "response": "r", "parallel_tool_calls": True},
            "is a key of messages rows",
        ),
    ],
)
def test_parallel_calls_that_are_not_as_the_row_says_are_refused(tmp_path, row, said):
    """An accepted key must not be ignored."""
    assert re.search(re.escape(said), str(refused(written(tmp_path / "rows.jsonl", row, 1))))
