from __future__ import annotations

import pytest

from mens_exp.config.overrides import check

OPEN = [
    *(
        "task=promote",
        "ledger=l.jsonl",
        "promote.open_cycle=c",
        f"promote.suite_digest={'ab' * 32}",
    ),
    *("promote.seeds=[1,2]", "promote.arms=[a,b]", "promote.factor=backend"),
]
COMPARE = ["task=compare", "path=runs"]


def problems(group, *settings):
    usual = OPEN if group == "promote" else COMPARE
    told = [f"{group}.{one}" for one in settings]
    return [str(problem) for problem in check([*usual, *told]).problems]


@pytest.mark.parametrize("group", ["compare", "promote"])
@pytest.mark.parametrize(
    "setting", ["alpha=0.9", "alpha=0.999", "alpha=0.5", "alpha=0", "alpha=1e-12"]
)
def test_an_error_rate_that_no_test_has_is_a_setting_error(group, setting):
    """The message gives the range; alpha 0.9 used to end in a traceback."""
    (said,) = problems(group, setting)
    assert said.startswith(f"{group}.alpha: out of range")
    assert ">= 1e-09 and < 0.5" in said


@pytest.mark.parametrize("setting", ["power=0.01", "power=0.4999", "power=1"])
def test_a_power_under_one_half_is_a_setting_error(setting):
    """A study that will probably find nothing is not worth planning; power 1 needs every seed."""
    (said,) = problems("compare", setting)
    assert said.startswith("compare.power: out of range")


@pytest.mark.parametrize("group", ["compare", "promote"])
def test_the_always_valid_test_is_one_of_t(group):
    """A sign-flip test has no always-valid form; either setting alone is accepted."""
    (said,) = problems(group, "sequential=always_valid", "test=sign_flip")
    assert said.startswith(f"{group}.sequential: the always-valid test is a t-test")
    assert problems(group, "sequential=always_valid", "alpha=1e-9") == []
    assert problems(group, "test=sign_flip", "alpha=0.4999") == []
