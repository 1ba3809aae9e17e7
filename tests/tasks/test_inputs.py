from __future__ import annotations

import pytest

from mens_exp.errors import Problems, RequestError
from mens_exp.tasks.inputs import refuse_changed

RECORDED = {
    "base_model": "tiny_llama",
    "base_weights_sha256": "aa",
    "data": {"rows_sha256": "bb", "train_rows": 3},
}


def test_equal_hashes_pass_whatever_the_names() -> None:
    """A renamed model directory with the same weights is the same model."""
    refuse_changed(RECORDED, {**RECORDED, "base_model": "moved"})


def test_a_new_run_has_nothing_to_compare() -> None:
    """Its record is empty, and a side without a hash proves nothing."""
    refuse_changed({}, RECORDED)
    refuse_changed(RECORDED, {})


def test_another_hash_is_refused_by_its_dotted_name() -> None:
    """Both hashes are in the message."""
    now = {**RECORDED, "data": {"rows_sha256": "cc", "train_rows": 3}}
    with pytest.raises(RequestError, match=r"inputs\.data\.rows_sha256.*found cc.*expected bb"):
        refuse_changed(RECORDED, now)


def test_all_changes_are_reported_together() -> None:
    """Two other hashes are two problems."""
    now = {"base_weights_sha256": "xx", "data": {"rows_sha256": "yy"}}
    with pytest.raises(Problems) as caught:
        refuse_changed(RECORDED, now)
    assert [problem.where for problem in caught.value.problems] == [
        "inputs.base_weights_sha256",
        "inputs.data.rows_sha256",
    ]
