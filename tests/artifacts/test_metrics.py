from __future__ import annotations

import pytest

from mens_exp.artifacts.metrics import METRICS, metric
from mens_exp.errors import MensError


def test_a_metric_is_found_by_name_and_by_alias():
    """Both lead to one entry."""
    assert metric("train/loss").unit == "nats/token"
    assert metric("loss") is metric("train/loss")


def test_an_unknown_metric_is_refused_with_the_nearest():
    """A misspelling names what was meant."""
    with pytest.raises(MensError, match=r"found trian/loss.*the nearest is train/loss"):
        metric("trian/loss")


def test_no_name_or_alias_is_used_twice():
    """Every one leads to a single entry, and only names have a slash."""
    aliases = [alias for entry in METRICS.values() for alias in entry.alias]
    assert len({*aliases, *METRICS}) == len(aliases) + len(METRICS)
    assert all("/" in name for name in METRICS)
    assert not any("/" in alias for alias in aliases)
