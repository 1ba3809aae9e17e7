from __future__ import annotations

import pytest

from mens_exp.artifacts import metrics
from mens_exp.artifacts.metrics import (
    METRICS,
    declaration,
    declares,
    metric,
    own_metric,
    reduced,
    step_metric,
)
from mens_exp.config.objective import OBJECTIVES
from mens_exp.errors import MensError, RequestError


@pytest.fixture(autouse=True)
def _undeclared(monkeypatch):
    """Undo a test's declarations, which otherwise last as long as the process."""
    monkeypatch.setattr(metrics, "_OWN", {})


def test_a_metric_is_found_by_name_and_by_alias():
    """A name and its alias return the same entry."""
    assert metric("train/loss").unit == "nats/token"
    assert metric("loss") is metric("train/loss")


def test_an_unknown_metric_is_refused_with_the_nearest():
    """The message suggests the nearest name."""
    with pytest.raises(MensError, match=r"found trian/loss.*the nearest is train/loss"):
        metric("trian/loss")


def test_no_name_or_alias_is_used_twice():
    """Names and aliases are unique, and only names contain a slash."""
    aliases = [alias for entry in METRICS.values() for alias in entry.alias]
    assert len({*aliases, *METRICS}) == len(aliases) + len(METRICS)
    assert all("/" in name for name in METRICS)
    assert not any("/" in alias for alias in aliases)


def test_a_metric_of_ones_own_is_what_its_decorator_says_or_else_its_name_alone():
    """`declares` returns the class unchanged."""

    @declares("probe/a", unit="nats", direction="min", reduction="mean", note="of attention")
    class Probe:
        pass

    assert Probe.__name__ == "Probe"
    assert declaration("probe/a") == {
        "name": "probe/a",
        "unit": "nats",
        "direction": "min",
        "reduction": "mean",
        "note": "of attention",
    }
    used = own_metric("lr-AdamW")
    assert (used.unit, used.direction, used.reduction) == ("1", "none", "last")
    assert declaration("train/loss") is None
    with pytest.raises(MensError, match="unknown metric"):
        declaration("nobody/uses_it")


@pytest.mark.parametrize(
    "name", ["train/los", "trian/loss", "val/bits_per_bite", "perf/token_per_s", "mem/rss_byte"]
)
def test_a_misspelling_of_ours_is_answered_with_the_near_name(name):
    """The error ends once the user declares the name, which shows that it is intended."""
    with pytest.raises(RequestError, match=r"the nearest is (train|val|perf|mem)/.*@declares"):
        own_metric(name)
    declares(name)(object)
    assert own_metric(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        *("train/loss_ema", "eval/pass_at_5", "train/acc", "lr-SGD/pg1", "loss", "f1"),
        *("train_loss", "val_loss", "train_grad_norm"),  # names from Lightning's documentation
    ],
)
def test_a_name_that_is_merely_alike_is_ones_own(name):
    """Another number or an extra word makes a different name."""
    assert own_metric(name).name == name


def test_names_of_ours_are_taken():
    """Neither `self.log` nor `@declares` may use them; a step value may use a built-in's alias."""
    for take in (own_metric, declares):
        with pytest.raises(RequestError, match="already recorded by every run"):
            take("train/loss")
    assert step_metric("loss") is METRICS["train/loss"]
    assert step_metric("probe/b").note == "declared by its first use"
    with pytest.raises(RequestError, match="own/entropy"):
        step_metric("entropy")


@pytest.mark.parametrize(
    ("facts", "told"),
    [({"direction": "up"}, "min"), ({"reduction": "median"}, "the nearest is mean")],
)
def test_a_declaration_that_says_nothing_known_is_refused(facts, told):
    """The message lists or suggests the allowed values."""
    with pytest.raises(RequestError, match=told):
        declares("probe/c", **facts)


def test_a_series_becomes_one_number():
    """By hand; None is skipped, and a series of None alone reduces to None."""
    values = [3.0, None, 1.0, 2.0]
    found = {how: reduced(values, how) for how in ("last", "mean", "sum", "max", "min")}
    assert found == {"last": 2.0, "mean": 2.0, "sum": 6.0, "max": 3.0, "min": 1.0}
    assert reduced([None], "mean") is None


def test_objectives_mean_the_same_by_a_metric_of_one_name():
    """Declarations are shared by the process, so objectives must agree on a metric."""
    seen = {}
    for spec in OBJECTIVES.built_in.values():
        for one in spec.metrics:
            assert seen.setdefault(one.name, one) == one
