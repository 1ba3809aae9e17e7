from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.config.data import RowFormat
from mens_exp.errors import DataError, Problems
from mens_exp.rows.parse import parse_row
from mens_exp.rows.schema import TrainingPair, to_json

SAID = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


def chat(*contents, first="user"):
    """Return turns that alternate, starting with `first`."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def told(row, form=RowFormat.auto):
    with pytest.raises((DataError, Problems)) as caught:
        parse_row(row, "rows.jsonl:7", form)
    assert all(str(p).startswith("rows.jsonl:7: ") for p in str(caught.value).splitlines())
    return str(caught.value)


def test_messages_are_a_conversation():
    """The last exchange is prompt and response, and earlier ones are the history."""
    row = {"messages": [{"role": "system", "content": "s"}, *chat("a", "b", "c", "d")]}
    assert parse_row(row, "x:1") == TrainingPair(
        prompt="c", response="d", history=(("a", "b"),), system="s"
    )


def test_one_exchange_is_the_pair_that_it_says():
    """Every spelling of one exchange gives the same row with the same id."""
    pair = TrainingPair(prompt="a", response="b", system="s")
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}]
    rows = [
        {"prompt": "a", "response": "b", "system": "s"},
        {"instruction": "a", "input": "", "output": "b", "system": "s"},
        {"messages": chat("a", "b"), "system": "s"},
        {"turns": chat("a", "b"), "system": "s"},
        {"conversations": [*turns, {"from": "gpt", "value": "b"}]},
        {"conversations": [{"role": "system", "content": "s"}, *chat("a", "b")]},
        {"messages": [*turns, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "completion": "b", "system": "s"},
        {"prompt": chat("a"), "completion": chat("b", first="assistant"), "system": "s"},
        {"prompt": [{"role": "system", "content": "s"}, *chat("a")], "completion": "b"},
    ]
    assert [parse_row(row, "x:1") for row in rows] == [pair] * len(rows)
    assert {parse_row(row, "x:1").id for row in rows} == {pair.id}


@pytest.mark.parametrize(
    ("given_input", "prompt"),
    [("1, 2", "Add.\n\n1, 2"), ("", "Add."), (" \n", "Add."), (None, "Add.")],
)
def test_alpacas_input_follows_its_instruction(given_input, prompt):
    """It follows after a blank line, or is left out if empty."""
    row = {"instruction": "Add.", "input": given_input, "output": "3"}
    assert parse_row(row, "x:1").prompt == prompt


def test_history_enters_the_id():
    """The same exchange after another history has another id."""
    bare = TrainingPair(prompt="c", response="d")
    long = TrainingPair(prompt="c", response="d", history=(("a", "b"),))
    assert (
        len({bare.id, long.id, TrainingPair(prompt="c", response="d", history=(("a", "x"),)).id})
        == 3
    )


def test_place_is_no_part_of_a_row():
    """Two files may contain the same row."""
    first, second = (parse_row({"prompt": "p", "response": "r"}, f"x:{n}") for n in (1, 2))
    assert (first.place, second.place) == ("x:1", "x:2")
    assert (first, first.id, to_json(first)) == (second, second.id, to_json(second))
    assert first.name == f"row {first.id} (x:1)"


@given(turns=st.lists(st.tuples(SAID, SAID), min_size=1, max_size=4), system=st.none() | SAID)
def test_json_of_a_conversation_is_read_back(turns, system):
    """Conversations round-trip."""
    *history, (prompt, response) = turns
    pair = TrainingPair(prompt=prompt, response=response, history=tuple(history), system=system)
    assert parse_row(to_json(pair), "x:1") == pair


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (chat("a", "b", first="assistant"), "turn 1 is out of order · found assistant first"),
        ([*chat("a", "b"), *chat("c", first="assistant")], "turn 3 is out of order"),
        ([*chat("a"), *chat("b", "c")], "turn 2 is out of order · found user after user"),
        (chat("a"), "ends without an answer · found user last"),
        (chat("a", "b", "c"), "ends without an answer"),
        ([{"role": "system", "content": "s"}], "ends without an answer · found system last"),
        (
            [*chat("a", "b"), {"role": "system", "content": "s"}, *chat("c", "d")],
            "turn 3 is out of order · found system after assistant",
        ),
        (chat("a", " "), "'content' of turn 2 is empty"),
        ([{"role": "user", "content": None}, *chat("b", first="assistant")], "must be a string"),
        ([{"role": "usr", "content": "a"}, *chat("b", first="assistant")], "the nearest is user"),
        ([{"content": "a"}, *chat("b", first="assistant")], "turn 1 has no known role"),
        (
            [{"role": "function", "name": "f", "content": "4"}, *chat("a", "b")],
            "turn 1 is in OpenAI's older form of tool calls",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant"}],
            "turn 1 holds image_url",
        ),
        (["a", "b"], "turn 1 must be an object"),
        ([], "the turns must be a list that is not empty"),
        ("a", "the turns must be a list"),
        (
            [{"role": "user", "content": "a", "name": "x"}, *chat("b", first="assistant")],
            "turn 1 has an unknown key 'name'",
        ),
    ],
)
def test_turns_that_are_no_conversation_are_refused(turns, reason):
    """Each error names the turn."""
    assert reason in told({"messages": turns})


def test_empty_values_that_exporters_write_are_left_out():
    """A null beside role and content is ignored."""
    turns = [{**turn, "tool_calls": None} for turn in chat("a", "b")]
    assert parse_row({"messages": turns}, "x:1").response == "b"


def test_a_prompt_of_several_turns_is_the_history():
    """TRL's conversational format is read; its tools become those of the row."""
    row = {"prompt": chat("a", "b", "c"), "completion": chat("d", first="assistant")}
    pair = parse_row(row, "x:1")
    assert pair == TrainingPair(prompt="c", response="d", history=(("a", "b"),), unlearned=(0,))
    told = [{"role": "system", "content": "s"}, *row["prompt"]]
    whole = {"prompt": told, "completion": chat("a", "b", "c", "d")}
    assert parse_row(whole, "x:1") == replace(pair, system="s")
    several = chat("d", "e", "f", first="assistant")
    weighed = [{**several[0], "weight": 0}, *several[1:]]
    assert parse_row({**row, "completion": several}, "x:1").unlearned == (0,)
    assert parse_row({**row, "completion": weighed}, "x:1").unlearned == (0, 1)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert json.loads(parse_row({**row, "tools": tools}, "x:1").conversation)["tools"] == tools


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": chat("a")}, "the row has no 'response'"),
        ({"prompt": chat("a"), "completion": ""}, "'response' is empty"),
        ({"prompt": chat("a"), "completion": 3}, "'response' is not an answer"),
        ({"prompt": chat("a", "b"), "completion": "c"}, "turn 3 is out of order"),
        ({"prompt": chat("a"), "completion": chat("b")}, "does not begin with the prompt"),
        ({"prompt": "a", "completion": "b", "response": "c"}, "its alias 'completion' differ"),
    ],
)
def test_a_prompt_whose_completion_does_not_answer_it_is_refused(row, reason):
    """The error names the key."""
    assert reason in told(row)


def test_openais_spellings_are_read():
    """The spellings of OpenAI's guides to fine-tuning and messages are read."""
    turns = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "weight": 1, "refusal": None},
    ]
    assert parse_row({"messages": turns}, "x:1") == TrainingPair(
        prompt="ab", response="c", system="s"
    )


def test_an_answer_of_weight_0_is_given_and_not_learned():
    """OpenAI's weight 0 marks an answer as unsupervised; the row round-trips."""
    turns = chat("a", "b", "c", "d", "e", "f")
    turns[3]["weight"] = 0
    pair = parse_row({"messages": turns}, "x:1")
    assert pair.unlearned == (1,)
    assert to_json(pair)["messages"] == turns
    assert pair.id != replace(pair, unlearned=()).id
    last = [*turns[:-1], turns[-1] | {"weight": 0}]
    assert "the last answer has 'weight' 0" in told({"messages": last})


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"role": "assistant", "content": "b", "weight": [1]}, "another 'weight' than 0 and 1"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "holds image_url"),
        ({"role": "user", "content": "a", "weight": 1}, "unknown key 'weight'"),
    ],
)
def test_turns_of_openais_that_say_something_else_are_refused(turn, said):
    """Otherwise an excluded answer would be trained on, or an image lost."""
    assert said in told({"messages": [*chat("a", "b"), turn, *chat("a", "b")]})


def test_system_prompt_said_twice_is_refused():
    """It is unclear which of the two is meant."""
    turns = [{"role": "system", "content": "s"}, *chat("a", "b")]
    assert "the system prompt occurs twice" in told({"messages": turns, "system": "t"})


def test_sharegpts_names_are_no_roles_of_messages():
    """`human` in a row of messages is a mistake or another tool's format."""
    assert "no known role" in told({"messages": [{"role": "human", "content": "a"}]})


@pytest.mark.parametrize(
    ("form", "row", "reason"),
    [
        (RowFormat.pair, {"messages": chat("a", "b")}, "the row has no 'prompt'"),
        (RowFormat.messages, {"prompt": "p", "response": "r"}, "the row has no 'messages'"),
        (RowFormat.sharegpt, {"messages": chat("a", "b")}, "the row has no 'conversations'"),
        (RowFormat.pair, {"instruction": "p", "input": "i", "output": "r"}, "unknown key 'input'"),
        (RowFormat.auto, {"messages": chat("a", "b"), "source": "x"}, "data.columns"),
    ],
)
def test_row_of_another_format_is_refused(form, row, reason):
    """None of its content would be read."""
    assert reason in told(row, form)


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"b": {}}}},
}
ARGUMENTS = {"place": 'Zü"rich', "days": [1, None], "again": {"b": 1, "a": 2.5}}


def calling(arguments, **extra):
    """Return a conversation in which the assistant calls a tool and gets a result."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "And today?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "grey", "tool_call_id": "c1", **extra},
        {"role": "assistant", "content": "It is grey."},
    ]


def test_calls_results_and_tools_are_part_of_a_row():
    """All spellings of arguments and tools become the form that chat templates take."""
    row = {"messages": calling(ARGUMENTS), "tools": [WEATHER], "system": "s"}
    pair = parse_row(row, "x:1")
    spelled = {
        **row,
        "messages": calling(json.dumps(ARGUMENTS)),
        "tools": json.dumps([WEATHER["function"]]),
    }
    assert parse_row(spelled, "x:2") == pair
    held = json.loads(pair.conversation)
    assert held["tools"] == [WEATHER]
    assert held["messages"] == [
        {**turn, "content": turn["content"] or ""} for turn in row["messages"]
    ]
    (asked, call), (result, said) = pair.exchanges
    assert (asked, result, said) == ("And today?", "grey", "It is grey.")
    assert json.loads(call) == {"name": "weather", "arguments": ARGUMENTS}
    other = parse_row({**row, "messages": calling({**ARGUMENTS, "days": []})}, "x:3")
    assert other.id != pair.id


def test_sharegpt_has_calls_and_observations():
    """The spelling is LLaMA-Factory's."""
    call = {"name": "weather", "arguments": ARGUMENTS}
    turns = [
        {"from": "human", "value": "And today?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "grey"},
        {"from": "gpt", "value": "It is grey."},
    ]
    pair = parse_row({"conversations": turns, "tools": json.dumps([WEATHER])}, "x:1")
    bare = calling(ARGUMENTS)
    del bare[1]["tool_calls"][0]["id"], bare[2]["tool_call_id"]
    assert pair == parse_row({"messages": bare, "tools": [WEATHER]}, "x:2")


def test_a_row_with_tools_is_read_back_with_its_keys_in_order():
    """Keys are sorted only for hashing, since templates write tools in the order of their keys."""
    pair = parse_row({"messages": calling(ARGUMENTS, name="weather"), "tools": [WEATHER]}, "x:1")
    stored = json.dumps(to_json(pair), sort_keys=True)
    again = parse_row(json.loads(stored), "x:2")
    assert again.id == pair.id
    call = json.loads(again.conversation)["messages"][1]["tool_calls"][0]["function"]
    assert list(call["arguments"]) == ["place", "days", "again"]
    assert list(call["arguments"]["again"]) == ["b", "a"]


def test_an_empty_result_of_a_tool_makes_no_plain_text():
    """The last exchange then has no prompt of its own, and is still a conversation."""
    turns = calling(ARGUMENTS)
    turns[2]["content"] = ""
    pair = parse_row({"messages": turns}, "x:1")
    assert (pair.prompt, pair.is_text) == ("", False)
    assert parse_row(to_json(pair), "x:2") == pair


CALLING = calling({})
CALL = {"name": "weather", "arguments": {}}


def asking(call):
    return [CALLING[0], {"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [*CALLING[:2], CALLING[0], CALLING[3]]}, "turn 3 is out of order"),
        (
            {"messages": [CALLING[0], *CALLING[2:]]},
            "turn 2 is out of order · found tool after user",
        ),
        ({"messages": calling({}, tool_call_id="c2")}, "turn 3 answers no call"),
        ({"messages": calling("{", tool_call_id="c1")}, "'tool_calls' of turn 2 has a call"),
        ({"messages": calling("[NaN]")}, "'tool_calls' of turn 2 has a call that is none"),
        (
            {"messages": calling('{"a": 1, "a": 2}')},
            "'tool_calls' of turn 2 has a call that is none",
        ),
        ({"messages": calling({"a": float("nan")})}, "has a number that is not finite"),
        ({"messages": calling({"a": ["\ud83d"]})}, "holds half a surrogate pair"),
        ({"messages": calling({"\ud83d": 1})}, "holds half a surrogate pair"),
        (
            {"messages": CALLING, "tools": [{**WEATHER["function"], "description": "\ud83d"}]},
            "a text of tool 1 holds half a surrogate pair",
        ),
        ({"messages": asking({**CALL, "thought": 1})}, "has an unknown key 'thought'"),
        (
            {"messages": asking({**CALL, "id": 1})},
            "'id' of a call in 'tool_calls' of turn 2 must be a string",
        ),
        ({"messages": calling({}, content=7)}, "'content' of turn 3 must be a string"),
        ({"messages": CALLING, "tools": "weather"}, "'tools' must be a list"),
        ({"messages": CALLING, "tools": [{"name": ""}]}, "tool 1 is not a function"),
        ({"prompt": "p", "input": "i", "output": "r", "tools": []}, "unknown key 'tools'"),
    ],
)
def test_tools_that_cannot_be_rendered_are_refused(row, reason):
    """Each error names the turn."""
    assert reason in told(row)


def test_a_row_may_end_with_calls():
    """A final call without a result is the answer to learn."""
    pair = parse_row({"messages": CALLING[:2]}, "x:1")
    assert json.loads(pair.response) == {"name": "weather", "arguments": {}}


def test_a_row_of_a_million_keys_is_told_in_a_few_lines():
    """Naming each key took quadratic time: an hour for a line of ten megabytes."""
    keys = {f"k{number}": 1 for number in range(20_000)}
    with pytest.raises(DataError, match=r"match no known format.*'k49' and 19950 more"):
        parse_row(keys, "rows.jsonl:1")
    with pytest.raises(Problems) as refused:
        parse_row({"prompt": "p", "response": "r", **keys}, "rows.jsonl:1")
    told = [problem.what for problem in refused.value.problems]
    assert len(told) < 60
    assert any("unknown keys" in what for what in told)
    assert "19950 more" in str(refused.value)
