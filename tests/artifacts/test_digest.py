from __future__ import annotations

import pytest

from mens_exp.artifacts.digest import canonical_json, digest, sha256_bytes, sha256_file
from mens_exp.errors import MensError

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1


def test_a_file_and_its_bytes_have_the_published_digest(tmp_path):
    """The SHA-256 of "abc" is taken from the standard."""
    (tmp_path / "f").write_bytes(b"abc")
    assert sha256_bytes(b"abc") == sha256_file(tmp_path / "f") == ABC


def test_canonical_json_is_sorted_and_has_no_spaces():
    """The bytes are exactly these, with characters beyond ASCII in UTF-8."""
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == b'{"a":"\xc3\xa9","b":[1,2.5]}'


def test_a_digest_does_not_depend_on_the_order_of_keys():
    """Two key orders of one object have the same digest."""
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a": 1}) == sha256_bytes(b'{"a":1}')


def test_a_digest_tells_values_apart():
    """A number and its text have different digests."""
    assert digest({"a": 1}) != digest({"a": "1"})


def test_a_digest_refuses_a_number_that_is_not_finite():
    """NaN has no JSON representation."""
    with pytest.raises(MensError, match="cannot be written as JSON"):
        digest({"a": float("nan")})
