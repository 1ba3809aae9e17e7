from __future__ import annotations

from typing import Any

import pytest

from mens_exp.artifacts.record import check_type, parse_json
from mens_exp.errors import DataError, expected_name, nearest


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1, int),
        (1, float),
        (1.5, float),
        (True, bool),
        (None, str | None),
        ("a", str | None),
        ([1, 2], list[int]),
        ({"a": [None, 1, 1.5, "x", True, {}]}, dict[str, Any]),
    ],
)
def test_a_value_of_the_declared_type_has_no_problem(value, hint):
    """An integer is accepted where a number is expected."""
    assert check_type(value, hint, "f") == []


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (True, int),
        (True, float),
        (1.0, int),
        (1, bool),
        (None, str),
        (float("nan"), float),
        ({1: 2}, dict[str, int]),
        ([1, "a"], list[int]),
        ("ab", list[str]),
        ({"a": {1, 2}}, dict[str, Any]),
    ],
)
def test_a_value_of_another_type_has_one_problem(value, hint):
    """True is not a number, although Python's bool is an int."""
    assert len(check_type(value, hint, "f")) == 1


def test_json_nested_without_end_is_refused():
    """A hostile file raises `DataError` instead of a crash."""
    with pytest.raises(DataError, match="not JSON"):
        parse_json(b"[" * 200_000, "f")


def test_the_nearest_name_is_the_one_most_alike():
    """None if no name is similar."""
    assert nearest("alhpa", ["alpha", "rank"]) == "alpha"
    assert nearest("zzz", ["alpha", "rank"]) is None


def test_all_names_are_offered_when_none_is_alike():
    """In alphabetical order."""
    assert expected_name("zzz", ["rank", "alpha"]) == "one of alpha, rank"
    assert expected_name("zzz", []) == "no name at all here"


def test_repeated_keys_are_found_in_time():
    """200,000 keys; comparing each with all the others would take hours."""
    text = b"{" + b"".join(b'"%d":1,' % n for n in range(200_000)) + b'"199999":2}'
    with pytest.raises(DataError, match="'199999' twice"):
        parse_json(text, "x.json")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5_000])
def test_json_beyond_the_limits_of_python_is_refused(text):
    """Too deep nesting, or a number of too many digits."""
    with pytest.raises(DataError, match=r"^x\.json: not JSON"):
        parse_json(text.encode(), "x.json")
