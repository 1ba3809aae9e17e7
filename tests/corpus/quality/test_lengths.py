from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.corpus.token_counts import Lengths


def of(values):
    made = Lengths()
    made.add(Counter(values))
    return made


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=300))
def test_figures_are_those_of_the_numbers(values):
    """Count, mean and extremes are exact; quantiles match numpy's to half a fine bin."""
    record = of(values).record()
    assert record is not None
    assert record["count"] == len(values) == sum(record["counts"])
    assert record["mean"] == pytest.approx(sum(values) / len(values))
    assert (record["smallest"], record["largest"]) == (min(values), max(values))
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        exact = float(np.quantile(values, share, method="inverted_cdf"))
        assert dict(record)[name] == pytest.approx(exact, rel=0.0225)


def test_bins_hold_what_lies_between_their_edges():
    """Two bins per octave and one for zero: [0, 1), [1, 1.41), [1.41, 2) and so on."""
    record = of([0, 0, 1, 2, 3, 3, 4]).record()
    assert record is not None
    assert record["edges"] == pytest.approx([0, 1, 2**0.5, 2, 2**1.5, 4, 2**2.5])
    assert record["counts"] == [2, 1, 0, 1, 2, 1]


def test_distributions_add_up():
    """Distributions can be merged in any parts, empty ones included."""
    whole, joined = of([1, 5, 5, 900]), of([5, 900])
    joined.join(of([]))
    joined.join(of([1, 5]))
    assert joined.record() == whole.record()


def test_nothing_has_no_distribution():
    """An empty distribution has no figures, not zeros."""
    assert Lengths().record() is None
