"""Row weights that are read from a field."""

from __future__ import annotations

import pytest

from mens_exp.corpus.source import labelling_of
from mens_exp.errors import DataError
from mens_exp.rows.documents import Labelling
from mens_exp.rows.encode import encode
from mens_exp.rows.parse import parse_row
from mens_exp.tokenizer.implementations import VoxTokenizer


def row(weight, **keys):
    keys = keys or {"prompt": "say hi", "response": "hi there"}
    fields = {} if weight is None else {"fields": {"quality": weight}}
    return parse_row({**keys, **fields}, "rows.jsonl:3")


def encoded(*pairs, objective="assistant", options=(("weight_field", "quality"),), **settings):
    settings = {"seq_len": 200, **settings}
    labelling = Labelling(objective=objective, options=options, **settings)
    return encode(pairs, VoxTokenizer(), labelling)


@pytest.mark.parametrize("objective", ["assistant", "causal", "last_k"])
def test_every_token_of_a_row_has_its_weight(objective):
    """Ids and labels equal those of rows without weights."""
    pairs = [row(0.5), row(2), row(1, messages=CONVERSATION)]
    documents = encoded(*pairs, objective=objective)
    plain = encoded(row(None), row(None), row(None, messages=CONVERSATION), options=())
    if objective == "assistant":
        assert documents.ids.tolist() == plain.ids.tolist()
        assert documents.supervised.tolist() == plain.supervised.tolist()
    bounds = zip(documents.offsets[:-1], documents.offsets[1:], strict=True)
    assert [set(documents.extra["weight"][a:b].tolist()) for a, b in bounds] == [{0.5}, {2}, {1}]
    assert not plain.extra


CONVERSATION = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def test_the_parts_of_a_long_text_have_its_weight():
    """A plain text beyond the limit becomes several documents."""
    documents = encoded(row(0.25, text="x" * 50), objective="causal", seq_len=16)
    assert len(documents) > 3
    assert set(documents.extra["weight"].tolist()) == {0.25}


@pytest.mark.parametrize("weight", [0, 0.0, 1e-60])
def test_a_row_of_weight_zero_is_left_out_and_counted(weight):
    """This includes a weight that is 0 in float32."""
    documents = encoded(row(weight), row(1))
    assert (len(documents), documents.dropped) == (1, 1)


def test_a_table_of_texts_has_weights_as_texts():
    """CSV values are strings."""
    assert set(encoded(row("0.5")).extra["weight"].tolist()) == {0.5}


@pytest.mark.parametrize("weight", [-1, "high", "nan", "inf", 1e39])
def test_a_weight_that_is_none_is_refused(weight):
    """The error gives the place of the row and the value."""
    with pytest.raises(DataError, match="'quality' of its fields, is not a number") as caught:
        encoded(row(1), row(weight))
    assert "rows.jsonl:3" in caught.value.where
    assert caught.value.found == repr(weight)


def test_a_field_too_large_for_a_float_is_refused():
    """It is refused when the row is read, like an infinite value."""
    with pytest.raises(DataError, match="'quality' of 'fields' is not finite"):
        row(10**400)


def test_a_row_without_the_weight_is_refused():
    """A missing weight is not taken as 1."""
    with pytest.raises(DataError, match="found no fields · expected quality"):
        encoded(row(1), row(None))


def test_a_weight_that_nothing_reads_is_refused():
    """The error names the setting that would read it."""
    with pytest.raises(DataError, match=r"objective\.weight_field weighs rows by one"):
        encoded(row(1), options=())


def test_the_setting_is_part_of_the_labelling_where_it_is_set(tiny_config):
    """Encodings without a weight field keep their cache keys."""
    assert labelling_of(tiny_config()).record().get("options") is None
    found = labelling_of(tiny_config("objective.weight_field=quality", "objective=causal"))
    assert dict(found.options) == {"weight_field": "quality"}
    assert found.rows.extra == ("weight",)
