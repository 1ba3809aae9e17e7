from __future__ import annotations

import pytest

from mens_exp.config.validate import ineffective_overrides
from mens_exp.corpus.data_contract import token_part
from mens_exp.corpus.source import cache_key, load_rows
from mens_exp.corpus.split import Side
from mens_exp.planning.estimate import make_plan
from mens_exp.rows.cache import encoded
from mens_exp.rows.encode import encode
from mens_exp.tokenizer.implementations import HfTokenizer

LIMIT = "data.contract.min_supervised_frac"


def warm(config, base, cache, *, certify):
    """Encode rows as a run does, and optionally write the certificate of the training side."""
    tokenizer = HfTokenizer.from_directory(base.directory)
    rows = load_rows(config.data, cache)
    for side in (Side.TRAIN, Side.VAL):
        key = cache_key(config, rows, side, tokenizer)
        pairs = getattr(rows, side.value)
        made = encode(pairs, tokenizer, key.labelling)
        _, counts = encoded(cache, key, lambda made=made: made)
        if certify and side is Side.TRAIN:
            token_part(pairs, made, tokenizer, cache=cache, key=key, counts=counts)


@pytest.fixture
def config(tiny_config, rows_file):
    """Configure a run on sixty rows."""

    def made(*overrides):
        return tiny_config("data=jsonl", f"data.path={rows_file}", *overrides)

    return made


def test_a_plan_tells_the_token_part_once_a_run_has_made_it(config, tiny_base, cache, tmp_path):
    """Encoded rows without a certificate are not enough."""
    (tmp_path / "models").symlink_to(cache / "models")  # the base is ready, as after a run
    asked = config()
    warm(asked, tiny_base, tmp_path, certify=False)
    found = make_plan(asked, tmp_path)["data"]
    assert found["exact"]  # the plan has read the encoded rows
    assert "contract" not in found
    warm(asked, tiny_base, tmp_path, certify=True)
    told = make_plan(asked, tmp_path)["data"]["contract"]
    assert told["tokens"]["documents"] == found["train_rows"] > 0


def test_a_plan_with_a_warm_cache_shows_roles_and_what_training_would_refuse(
    config, tiny_base, cache
):
    """A stricter limit in the command applies to the plan, too."""
    warm(config(), tiny_base, cache, certify=True)
    plan = make_plan(config(), cache)
    told = plan["data"]["contract"]
    assert told["tokens"]["trained_by_role"]["user"] == 0
    assert told["tokens"]["tokens_by_role"]["user"] > 0
    assert told["unknown"] == {}
    assert plan["problems"] == told["refusals"] == []
    (refusal,) = make_plan(config(f"{LIMIT}=0.99"), cache)["problems"]
    assert refusal.startswith(f"{LIMIT}: too few tokens are learned")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("task=attribute",), "data.contract.probe"),
        (("objective=last_k",), LIMIT),
        (("objective=last_k",), "data.contract.allow_untrained_end"),
    ],
)
def test_limits_that_nothing_is_held_against_are_refused(config, overrides, key):
    """The message names the combination in which the limit has no effect."""
    (problem,) = ineffective_overrides(config(*overrides), [key])
    assert problem.where == key
    assert "has no effect with" in problem.what


@pytest.mark.parametrize("overrides", [(), ("task=plan",), ("objective=causal",)])
def test_limits_that_count_are_accepted(config, overrides):
    """A plan accepts them too, since it plans the run."""
    assert ineffective_overrides(config(*overrides), [LIMIT, "data.contract.probe"]) == []
