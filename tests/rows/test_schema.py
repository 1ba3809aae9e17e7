from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.errors import DataError, Problems
from mens_exp.rows.parse import parse_row
from mens_exp.rows.schema import TrainingPair, to_json

FULL = {
    "prompt": "Add two numbers.",
    "response": "a + b",
    "rating": 4,
    "category": "maths",
    "language": "rust",
    "system": "Be brief.",
    "group": "sums.py",
}

some_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
any_text = st.text(st.characters(exclude_categories=["Cs"]))
pairs = st.builds(
    TrainingPair,
    prompt=some_text,
    response=some_text,
    rating=st.none() | st.integers(1, 5),
    category=st.none() | any_text,
    language=st.none() | any_text,
    system=st.none() | any_text,
    group=any_text,
    fields=st.sampled_from([(), (("a", 2), ("b", 0.1 + 0.2), ("c d", "é"))]),
)


def refusal(row):
    with pytest.raises(DataError) as caught:
        parse_row(row, "rows.jsonl:7")
    assert str(caught.value).startswith("rows.jsonl:7: ")
    return str(caught.value)


def test_row_with_every_field_is_read():
    """Each key fills the field of its name."""
    assert parse_row(FULL, "x:1") == TrainingPair(
        prompt="Add two numbers.",
        response="a + b",
        rating=4,
        category="maths",
        language="rust",
        system="Be brief.",
        group="sums.py",
    )


def test_row_with_only_prompt_and_response_is_read():
    """Missing fields are None, and the group is empty."""
    pair = parse_row({"prompt": "p", "response": "r"}, "x:1")
    assert (pair.rating, pair.category, pair.system, pair.group) == (None, None, None, "")


def test_aliases_are_read():
    """`instruction` and `output` mean prompt and response."""
    assert parse_row({"instruction": "p", "output": "r"}, "x:1") == TrainingPair(
        prompt="p", response="r"
    )


def test_name_and_alias_with_one_value_are_read():
    """Equal values are no contradiction."""
    row = {"prompt": "p", "instruction": "p", "response": "r"}
    assert parse_row(row, "x:1").prompt == "p"


def test_name_and_alias_that_differ_are_refused():
    """It is unclear which of the two is meant."""
    message = refusal({"prompt": "p", "response": "r", "output": "s"})
    assert "'response' and its alias 'output' differ" in message
    assert "'r' and 's'" in message


def test_null_optional_fields_count_as_left_out():
    """Exporters write null for a missing value."""
    row = {"prompt": "p", "response": "r", "rating": None, "system": None, "group": None}
    assert parse_row(row, "x:1") == TrainingPair(prompt="p", response="r")


def test_empty_system_prompt_is_kept():
    """An empty system prompt replaces the template's default."""
    assert parse_row({"prompt": "p", "response": "r", "system": ""}, "x:1").system == ""


@pytest.mark.parametrize("missing", ["prompt", "response"])
def test_missing_required_key_is_refused(missing):
    """The message has the key, its alias and the keys found."""
    message = refusal({key: value for key, value in FULL.items() if key != missing})
    alias = {"prompt": "instruction", "response": "output"}[missing]
    assert f"the row has no '{missing}'" in message
    assert f"alias '{alias}'" in message
    assert "'rating'" in message


@pytest.mark.parametrize("blank", ["", " \n\t"])
@pytest.mark.parametrize("key", ["prompt", "response"])
def test_blank_text_is_refused(key, blank):
    """White space alone cannot be learned."""
    assert f"'{key}' is empty" in refusal(FULL | {key: blank})


@pytest.mark.parametrize("value", [1, 0, 5.5, True, None, ["a"], {"a": 1}])
def test_prompt_that_is_no_string_is_refused(value):
    """Required text is never converted."""
    assert "'prompt' must be a string" in refusal(FULL | {"prompt": value})


@pytest.mark.parametrize("key", ["category", "language", "system", "group"])
def test_optional_text_of_wrong_type_is_refused(key):
    """The message uses JSON's name of the type."""
    message = refusal(FULL | {key: 3})
    assert f"'{key}' must be a string · found integer 3" in message


@pytest.mark.parametrize("rating", [1, 5])
def test_rating_at_the_ends_of_its_range_is_read(rating):
    """One and five are accepted."""
    assert parse_row(FULL | {"rating": rating}, "x:1").rating == rating


@pytest.mark.parametrize("rating", [0, 6, -1, 4.0, "4", True, float("nan"), [4]])
def test_rating_that_is_none_is_refused(rating):
    """Only integers from 1 to 5 are accepted."""
    message = refusal(FULL | {"rating": rating})
    assert "'rating'" in message
    assert "an integer from 1 to 5" in message


def test_misspelt_key_is_refused_with_the_nearest():
    """There is one message, and the intended key is not also reported as missing."""
    message = refusal({"promt": "p", "response": "r"})
    assert "unknown key 'promt' · found 'p'" in message
    assert "the nearest is 'prompt'" in message
    assert "'difficulty', 'fields' and 'provenance'" in message


def test_key_in_capitals_is_refused_with_the_nearest():
    """Case counts as a spelling mistake."""
    assert "the nearest is 'response'" in refusal({"prompt": "p", "Response": "r"})


@pytest.mark.parametrize("row", [["a", "b"], "text", 3, None, True])
def test_row_that_is_no_object_is_refused(row):
    """Only a JSON object is a row."""
    assert "a row must be a JSON object" in refusal(row)


def test_half_a_surrogate_pair_is_refused():
    """JSON can contain a lone surrogate, which UTF-8 cannot encode."""
    message = refusal(FULL | {"response": "ab\ud800"})
    assert "half a surrogate pair at character 2" in message
    message.encode("utf-8")


def test_every_problem_of_a_row_is_told():
    """Three mistakes give three messages."""
    with pytest.raises(Problems) as caught:
        parse_row({"prompt": "", "rating": 9, "lang": "py", "response": "r"}, "rows.jsonl:7")
    told = [problem.what for problem in caught.value.problems]
    assert told == ["unknown key 'lang'", "'prompt' is empty", "'rating' is out of range"]


def test_long_value_is_shortened_in_the_message():
    """Long values do not make the message unreadable."""
    assert len(refusal(FULL | {"extra": "x" * 10_000})) < 500


def test_id_is_the_hash_of_what_is_trained_on():
    """The id is sixteen digits of the SHA-256 of canonical JSON of system, prompt, response."""
    canonical = b'{"prompt":"p","response":"r","system":null}'
    expected = hashlib.sha256(canonical).hexdigest()[:16]
    assert TrainingPair(prompt="p", response="r").id == expected


def test_id_does_not_depend_on_labels():
    """Changing labels keeps the id."""
    bare = TrainingPair(prompt="p", response="r")
    labelled = TrainingPair(
        prompt="p", response="r", rating=3, category="c", language="l", group="g"
    )
    assert labelled.id == bare.id


def test_id_depends_on_the_system_prompt():
    """Another system prompt changes the training text."""
    bare = TrainingPair(prompt="p", response="r")
    assert TrainingPair(prompt="p", response="r", system="").id != bare.id


def test_id_depends_on_further_fields():
    """Objectives may train on further fields."""
    bare = TrainingPair(prompt="p", response="r")
    (worse, better) = (replace(bare, fields=(("worse", text),)) for text in "ab")
    assert len({bare.id, worse.id, better.id}) == 3


def test_further_fields_are_texts_and_numbers():
    """They are kept by name; null means that the row lacks the field, as in tables."""
    row = {"prompt": "p", "response": "r", "fields": {"worse": "w", "weight": 0.5, "no": None}}
    assert parse_row(row, "x:1").fields == (("weight", 0.5), ("worse", "w"))
    assert parse_row(row | {"fields": None}, "x:1").fields == ()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("w", "'fields' must be an object · found string 'w'"),
        ({"worse": ["w"]}, "'worse' of 'fields' must be a string"),
        ({"weight": True}, "'weight' of 'fields' must be a string"),
        ({"weight": float("nan")}, "'weight' of 'fields' is not finite"),
        ({"worse": "\ud800"}, "'worse' of 'fields' holds half a surrogate pair"),
    ],
)
def test_other_fields_are_refused(value, said):
    """A field must have the same meaning in every file format."""
    assert said in refusal({"prompt": "p", "response": "r", "fields": value})


def test_json_leaves_out_what_is_at_its_default():
    """A row with two fields is written with two keys."""
    assert to_json(TrainingPair(prompt="p", response="r")) == {"prompt": "p", "response": "r"}


@given(pairs)
def test_json_is_read_back_as_the_same_pair(pair):
    """Rows round-trip through JSON."""
    assert parse_row(to_json(pair), "x:1") == pair
