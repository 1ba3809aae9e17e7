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
    """Declare for one test: a process keeps what it declares."""
    monkeypatch.setattr(metrics, "_OWN", {})


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


def test_a_metric_of_ones_own_is_what_its_decorator_says_or_else_its_name_alone():
    """The decorated class stays as it is."""

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
    """Until it is declared, which says that it is meant."""
    with pytest.raises(RequestError, match=r"the nearest is (train|val|perf|mem)/.*@declares"):
        own_metric(name)
    declares(name)(object)
    assert own_metric(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        *("train/loss_ema", "eval/pass_at_5", "train/acc", "lr-SGD/pg1", "loss", "f1"),
        *("train_loss", "val_loss", "train_grad_norm"),  # as Lightning's documentation names them
    ],
)
def test_a_name_that_is_merely_alike_is_ones_own(name):
    """Numbers tell names apart, and so does a word more."""
    assert own_metric(name).name == name


def test_names_of_ours_are_taken():
    """In `self.log` and in a declaration; what a step records may still be ours by its alias."""
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
    """With what there is."""
    with pytest.raises(RequestError, match=told):
        declares("probe/c", **facts)


def test_a_series_becomes_one_number():
    """By hand; what is unknown is left out, and nothing at all is unknown."""
    values = [3.0, None, 1.0, 2.0]
    found = {how: reduced(values, how) for how in ("last", "mean", "sum", "max", "min")}
    assert found == {"last": 2.0, "mean": 2.0, "sum": 6.0, "max": 3.0, "min": 1.0}
    assert reduced([None], "mean") is None


def test_objectives_mean_the_same_by_a_metric_of_one_name():
    """One process may train by several of them, and each declares its metrics for all."""
    seen = {}
    for spec in OBJECTIVES.built_in.values():
        for one in spec.metrics:
            assert seen.setdefault(one.name, one) == one
