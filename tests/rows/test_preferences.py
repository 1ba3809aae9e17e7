"""Rows that prefer one answer to another, and rows with a label for a single answer."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from mens_exp.errors import DataError
from mens_exp.rows.documents import Labelling
from mens_exp.rows.encode import encode
from mens_exp.rows.parse import parse_row
from mens_exp.rows.readers import read_rows
from mens_exp.rows.roles import role_counts
from mens_exp.rows.schema import TrainingPair, to_json
from mens_exp.tokenizer.implementations import VoxTokenizer

PAIR = TrainingPair(prompt="p", response="good", fields=(("rejected", "bad"),))
LABELLED = TrainingPair(prompt="p", response="good", fields=(("label", 1),))
EARLIER = replace(PAIR, history=(("a", "b"),), system="s")


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def human(text):
    return {"from": "human", "value": text}


def gpt(text):
    return {"from": "gpt", "value": text}


SYSTEM = {"role": "system", "content": "s"}
LONG = [SYSTEM, user("a"), said("b"), user("p")]
SPELLINGS = {
    "TRL, texts": ({"prompt": "p", "chosen": "good", "rejected": "bad"}, PAIR),
    "TRL, turns": (
        {"prompt": [user("p")], "chosen": [said("good")], "rejected": [said("bad")]},
        PAIR,
    ),
    "TRL, implicit prompt": (
        {"chosen": [*LONG, said("good")], "rejected": [*LONG, said("bad")]},
        EARLIER,
    ),
    "a system prompt in the prompt alone": (
        {"prompt": LONG, "chosen": [*LONG[1:], said("good")], "rejected": [*LONG, said("bad")]},
        EARLIER,
    ),
    "a system prompt in the answers alone": (
        {"prompt": LONG[1:], "chosen": [*LONG, said("good")], "rejected": [*LONG, said("bad")]},
        EARLIER,
    ),
    "OpenAI": (
        {
            "input": {"messages": [user("p")], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [said("good")],
            "non_preferred_output": [said("bad")],
        },
        PAIR,
    ),
    "OpenAI, several turns": (
        {
            "input": {"messages": LONG},
            "preferred_output": [said("good")],
            "non_preferred_output": [said("bad")],
        },
        EARLIER,
    ),
    "a prompt and whole conversations": (
        {
            "prompt": "p",
            "chosen": [user("p"), said("good")],
            "rejected": [user("p"), said("bad")],
        },
        PAIR,
    ),
    "turns and texts": ({"messages": LONG, "chosen": "good", "rejected": "bad"}, EARLIER),
    "LLaMA-Factory, sharegpt": (
        {
            "system": "s",
            "conversations": [human("a"), gpt("b"), human("p")],
            "chosen": gpt("good"),
            "rejected": gpt("bad"),
        },
        EARLIER,
    ),
    "LLaMA-Factory, alpaca": (
        {"instruction": "p", "input": "q", "chosen": "good", "rejected": "bad"},
        replace(PAIR, prompt="p\n\nq"),
    ),
    "TRL, labelled": ({"prompt": "p", "completion": "good", "label": True}, LABELLED),
    "TRL, labelled turns": (
        {"prompt": LONG, "completion": [said("good")], "label": False},
        replace(EARLIER, fields=(("label", 0),)),
    ),
    "LLaMA-Factory, labelled": (
        {"conversations": [human("p"), gpt("good")], "kto_tag": True},
        LABELLED,
    ),
    "LLaMA-Factory, labelled alpaca": (
        {"instruction": "p", "input": "", "output": "good", "kto_tag": True},
        LABELLED,
    ),
}


@pytest.mark.parametrize(("row", "pair"), SPELLINGS.values(), ids=SPELLINGS)
def test_each_spelling_is_read(row, pair):
    """The format is recognized by its keys, and the row round-trips."""
    assert parse_row(row, "rows.jsonl:1") == pair
    assert parse_row(to_json(pair), "rows.jsonl:1") == pair


def test_further_fields_and_tools_are_kept():
    """A weight that an objective reads and an earlier tool call are kept."""
    found = parse_row(
        {"prompt": "p", "chosen": "good", "rejected": "bad", "fields": {"weight": 2}}, "f:1"
    )
    assert found.fields == (("rejected", "bad"), ("weight", 2))
    call = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"x": 1}}]}
    turns = [user("a"), call, {"role": "tool", "content": "2"}]
    row = {"prompt": turns, "chosen": [said("good")], "rejected": [said("bad")]}
    found = parse_row(row, "f:1")
    assert json.loads(found.conversation)["messages"][-1] == said("good")
    assert found.fields == (("rejected", "bad"),)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "p", "chosen": "good", "rejected": " good\n"},
            "'chosen' and 'rejected' are the same answer",
        ),
        ({"prompt": "p", "chosen": "good", "rejected": ""}, "'rejected' is empty"),
        ({"prompt": "p", "chosen": "good", "rejected": None}, "'rejected' is not an answer"),
        ({"prompt": "p", "rejected": "bad"}, "the row has no 'chosen'"),
        ({"prompt": "p", "chosen": "good"}, "a preference row has 'rejected' too"),
        ({"chosen": "p good", "rejected": "p bad"}, "'chosen' has no prompt"),
        (
            {"input": {"messages": [user("p")], "message": "p"}}
            | {"preferred_output": "good", "non_preferred_output": "bad"},
            "unknown key 'message' in 'input'",
        ),
        (
            {"input": {"messages": [user("p")]}, "tools": [], "chosen": "a", "rejected": "b"}
            | {"messages": [user("p")]},
            "'messages' occurs twice",
        ),
        (
            {"chosen": [user("p"), said("good")], "rejected": [user("q"), said("bad")]},
            "do not answer the same prompt · found 'p' and 'q'",
        ),
        (
            {
                "prompt": [SYSTEM, user("p")],
                "chosen": [SYSTEM | {"content": "t"}, user("p"), said("good")],
                "rejected": "bad",
            },
            "'chosen' has another system prompt than the prompt has · found 't'",
        ),
        (
            {"prompt": "p", "chosen": [user("q"), said("good")], "rejected": "bad"},
            "does not begin with the prompt",
        ),
        (
            {"prompt": "p", "chosen": "good", "rejected": [user("p")]},
            "in 'rejected', the conversation ends without an answer",
        ),
        (
            {"prompt": "p", "messages": [user("p")], "chosen": "good", "rejected": "bad"},
            "the prompt occurs twice",
        ),
        (
            {"prompt": "p", "chosen": "good", "rejected": "bad", "fields": {"rejected": "x"}},
            "'rejected' occurs twice",
        ),
        (
            {
                "prompt": "p",
                "chosen": "good",
                "rejected": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}],
            },
            "'rejected' calls a tool",
        ),
        ({"prompt": "p", "completion": "good", "label": "yes"}, "'label' must be true or false"),
        ({"prompt": "p", "completion": "good", "label": 2}, "'label' must be true or false"),
        ({"prompt": "p", "kto_tag": True}, "ends without an answer"),
    ],
)
def test_a_row_without_a_judgement_is_refused(row, message):
    """The error gives the place and what is missing."""
    with pytest.raises(DataError) as caught:
        parse_row(row, "rows.jsonl:7")
    assert message in str(caught.value)
    assert "rows.jsonl:7" in str(caught.value)


def test_a_csv_file_has_labels_as_words_and_turns_as_json(tmp_path):
    """CSV cells have no types."""
    path = tmp_path / "rows.csv"
    path.write_text(
        'prompt,completion,label\np,good,TRUE\np,good,0\n"[{""role"": 1",x,1\n', "utf-8"
    )
    labels = [dict(pair.fields)["label"] for pair in read_rows(path).pairs]
    assert labels == [1, 0, 1]


def encoded(*pairs, seq_len=400, **settings):
    return encode(pairs, VoxTokenizer(), Labelling(objective="dpo", seq_len=seq_len, **settings))


def learned(documents):
    bounds = zip(documents.offsets[:-1], documents.offsets[1:], strict=True)
    return [
        VoxTokenizer().spell(documents.ids[a:b][documents.supervised[a:b]].tolist())
        for a, b in bounds
    ]


def test_both_answers_are_learned_with_their_end_markers():
    """Both documents follow each other; of a conversation only the last answers are supervised."""
    texts = learned(encoded(PAIR, EARLIER))
    alone = encode(
        [replace(PAIR, fields=())], VoxTokenizer(), Labelling(objective="assistant", seq_len=400)
    )
    assert texts[0] == texts[2] == learned(alone)[0]
    assert [text[:3] for text in texts] == ["goo", "bad", "goo", "bad"]
    assert texts[0].removeprefix("good") == texts[1].removeprefix("bad") != ""


def test_every_token_of_both_documents_has_its_role():
    """This holds if one of them was truncated or a pair was dropped."""
    cut = replace(PAIR, fields=(("rejected", "x" * 300),))
    lost = replace(PAIR, prompt="y" * 200)
    pairs = [PAIR, cut, lost, EARLIER]
    labelling = Labelling(objective="dpo", seq_len=400)
    documents = encode(pairs, VoxTokenizer(), labelling)
    found = role_counts(pairs, documents, VoxTokenizer(), labelling)
    assert found.why_unknown is None
    assert found.documents == len(documents) == 6
    assert found.too_long == [1, 2]
    whole = encode([cut], VoxTokenizer(), replace(labelling, seq_len=10_000))
    kept = documents.supervised[documents.offsets[2] : documents.offsets[4]].sum()
    assert found.left_of_too_long == kept < whole.supervised.sum()
    assert np.array_equal(found.trained, found.trained * (found.tokens > 0))


@pytest.mark.parametrize(
    ("objective", "pair", "named"),
    [
        ("assistant", PAIR, ("objective=dpo", "data.columns={prompt:prompt,response:chosen}")),
        ("causal", PAIR, ("objective=dpo",)),
        ("assistant", LABELLED, ("objective=kto", "response:completion}")),
        ("dpo", replace(PAIR, fields=()), ("no rejected answer", "objective=assistant")),
        ("dpo", LABELLED, ("objective=kto",)),
    ],
)
def test_an_objective_refuses_rows_that_it_does_not_read(objective, pair, named):
    """One message for all rows suggests the matching objective."""
    labelling = Labelling(objective=objective, seq_len=200)
    with pytest.raises(DataError) as caught:
        encode([replace(pair, place="rows.jsonl:3")] * 3, VoxTokenizer(), labelling)
    assert all(one in str(caught.value) for one in ("rows.jsonl:3", *named))
