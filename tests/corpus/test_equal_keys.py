from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from mens_exp.corpus.steps.dedupe import equal_keys


def groups(found):
    by_start = defaultdict(list)
    for part, one in enumerate(found):
        for row, start in zip(one.rows.tolist(), one.starts.tolist(), strict=True):
            by_start[part, start].append(row)
    return {tuple(rows) for rows in by_start.values()}


@pytest.mark.parametrize("most", [1_000_000, 300, 17])
@pytest.mark.parametrize("words", [1, 2])
def test_rows_meet_by_all_of_their_key(tmp_path, words, most):
    """The oracle is a dictionary, for any number of separately sorted parts."""
    rng = np.random.default_rng(words)
    values = rng.integers(0, 2**64, (400, words), dtype=np.uint64)
    keys = values[rng.integers(0, 400, 1000)]
    if words == 2:
        keys[::3, 1] += np.uint64(1)  # equal first words alone do not match
    keys.astype("<u8").tofile(tmp_path / "keys")
    expected = defaultdict(list)
    for row, key in enumerate(keys.tolist()):
        expected[tuple(key)].append(row)
    found = list(equal_keys(tmp_path / "keys", words, tmp_path, most))
    assert groups(found) == {tuple(rows) for rows in expected.values() if len(rows) > 1}
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_rows_of_a_group_are_in_order_from_its_start(tmp_path):
    """Rows 1, 2 and 4 share a key, and so do 0 and 3; row 5 is alone."""
    np.array([9, 5, 5, 9, 5, 7], "<u8").tofile(tmp_path / "keys")
    (only,) = equal_keys(tmp_path / "keys", 1, tmp_path)
    assert only.rows.tolist() == [1, 2, 4, 0, 3]
    assert only.starts.tolist() == [0, 0, 0, 3, 3]


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_rows_do_not_meet(tmp_path, count):
    """An empty file is not an error."""
    np.zeros(count, "<u8").tofile(tmp_path / "keys")
    (only,) = equal_keys(tmp_path / "keys", 1, tmp_path)
    assert not len(only.rows)
