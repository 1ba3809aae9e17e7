"""Composing from cached option choices gives the same result as Hydra."""

from __future__ import annotations

import re
from random import Random

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mens_exp.config import compose as composing
from mens_exp.config.compose import compose
from mens_exp.config.option_files import group_options
from mens_exp.config.schemas import SET_BY_OPTION, declarations


def plainly(overrides):
    """Compose with Hydra's own loader."""
    composing.prepare_hydra()
    GlobalHydra.instance().clear()
    where = str(composing.config_directory())
    with initialize_config_dir(where, version_base=composing.VERSION_BASE):
        return hydra_compose("config", list(overrides), return_hydra_config=True)


def nodes(node, path=""):
    """List every node from one down, in order: path, type, schema, flags, and a leaf's value."""
    described = (path, type(node), node._metadata.ref_type, node._metadata.flags)
    if not isinstance(node, DictConfig | ListConfig):
        return [(*described, node._value())]
    if isinstance(node, ListConfig) or not isinstance(node._content, dict):
        return [(*described, node._content)]
    inner = [
        line for name, child in node._content.items() for line in nodes(child, f"{path}.{name}")
    ]
    return [(*described, node._metadata.object_type), *inner]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=tiny_llama", "lora.r=4", "hydra.run.dir=/tmp/x"],
        ["lora.r=8", "lora={alpha: 3}", "lora.alpha=5"],
        ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=7", "seed=3"],
        ["hydra.job.env_copy=[HOME]", "lora.r=4"],
        ["experiment=double_quant", "hydra.verbose=true"],
        ["callbacks=[default,early_stopping]", "callbacks.early_stopping.patience=9"],
        ["policy=burn_rnd", "backend=burn"],
        ["~callbacks.progress", "lora.r=2"],
    ],
    ids=" ".join,
)
def test_it_is_the_whole_of_what_hydra_composes(overrides):
    """Types, order and flags are the same on the first composition and on a cached one."""
    expected = nodes(plainly(overrides))
    for others in ([], ["lora.r=16", "seed=8", "hydra.sweep.dir=/tmp/other"]):
        compose([[*overrides, *others]])
        [again] = compose([overrides])
        assert nodes(again.whole) == expected


@pytest.mark.parametrize(
    "overrides", [["lora.r=abc", "seed=1"], ["no_such_key=1"], ["lora=none_such"]], ids=" ".join
)
def test_it_refuses_as_hydra_does(overrides):
    """The message is Hydra's own, on every call."""
    with pytest.raises(ConfigCompositionException) as refused:
        plainly(overrides)
    for _ in range(2):
        with pytest.raises(type(refused.value), match=re.escape(str(refused.value))):
            compose([overrides])


def test_what_is_done_to_one_is_not_done_to_the_next():
    """Each result is a copy, including its `hydra` node."""
    for _ in range(2):
        [one] = compose([["seed=5"]])
        assert one.whole is not None
        assert (one.values.lora.r, one.whole.hydra.job.get("num")) == (16, None)
        one.values.lora.r = 99
        one.whole.lora.r = 98
        one.whole.hydra.job.num = 4


def test_a_changed_file_of_the_users_is_read_again(tmp_path, monkeypatch):
    """An edited file is read again, and a deleted one is no longer found."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "conf" / "lora" / "mine.yaml"
    own.parent.mkdir(parents=True)
    for rank in (3, 12):
        own.write_text(f"defaults: [all_linear, _self_]\nr: {rank}\n", encoding="utf-8")
        assert compose([["lora=mine"]])[0].values.lora.r == rank
    own.unlink()
    with pytest.raises(ConfigCompositionException, match="mine"):
        compose([["lora=mine"]])


def test_the_working_directory_is_that_of_now(tmp_path, monkeypatch):
    """`hydra.runtime.cwd` is the current directory, not the cached one."""
    compose([[]])
    monkeypatch.chdir(tmp_path)
    [one] = compose([[]])
    assert one.whole is not None
    assert OmegaConf.select(one.whole, "hydra.runtime.cwd") == str(tmp_path)


GROUPS = group_options()
OPTIONS = [f"{group}={option}" for group, options in GROUPS.items() for option in options]
RANDOM, FEW = 300, 12


def sets_of_options():
    """Spread all options over lists with one per group, since Hydra needs 0.25 s for each list."""
    longest = max(map(len, GROUPS.values()))
    return [
        [f"{group}={options[number]}" for group, options in GROUPS.items() if number < len(options)]
        for number in range(longest)
    ]


def drawn(seed):
    """Draw a list of overrides: options, settings of these options, and deletions."""
    random = Random(seed)
    chosen = random.sample(sorted(group_options()), random.randint(0, 4))
    texts = [f"{group}={random.choice(group_options()[group])}" for group in chosen]
    values = compose([texts])[0].values
    leaves = [path for path in sorted(declarations()) if OmegaConf.select(values, path) is not None]
    for path in random.sample(leaves, random.randint(0, 5)):
        value = OmegaConf.select(values, path)
        if isinstance(value, bool):
            texts.append(f"{path}={str(not value).lower()}")
        elif isinstance(value, int | float):
            texts.append(f"{path}={value + random.randint(1, 9)}")
        elif isinstance(value, str) and path not in SET_BY_OPTION:
            texts.append(f"{path}=x{random.randint(0, 9)}")
    texts += random.sample(["~callbacks.progress", "seed=3", "hydra.run.dir=/tmp/x", "~policy"], 2)
    return random.sample(texts, len(texts))


def answered(composed):
    """Return all nodes of a composition, or the type and text of its error."""
    try:
        return nodes(composed())
    # Hydra 1.3 asserts when a group is deleted and one of its settings is given.
    except (HydraException, OmegaConfBaseException, AssertionError) as error:
        return type(error), str(error)


def is_like_hydra(overrides, times=1):
    """Compare with Hydra: the same nodes, or an error of the same type and text.

    Returns:
    Whether Hydra composes the overrides.
    """
    expected = answered(lambda: plainly(overrides))
    for _ in range(times):  # read from disk, then from the cache
        assert answered(lambda: compose([overrides])[0].whole) == expected
    return isinstance(expected, list)


def test_every_option_is_in_a_set():
    """The next test therefore covers every option."""
    assert sorted(option for options in sets_of_options() for option in options) == sorted(OPTIONS)


@pytest.mark.parametrize("options", sets_of_options(), ids=lambda options: options[0])
def test_every_option_is_what_hydra_composes(options):
    """Types, flags and order are equal. If Hydra refuses a list, its options are tried alone."""
    if not is_like_hydra(options):
        alone = [is_like_hydra([option]) for option in options]
        assert any(alone)


@pytest.mark.parametrize("seed", range(FEW))
def test_random_overrides_are_what_hydra_composes(seed):
    """The same nodes or the same error; the rest of the 300 seeds runs in `make soak`."""
    is_like_hydra(drawn(seed))


@pytest.mark.soak
def test_every_option_alone_and_all_random_overrides_are_what_hydra_composes():
    """The first composition and a cached one both equal that of Hydra."""
    for option in OPTIONS:
        is_like_hydra([option], times=2)
    for seed in range(RANDOM):
        is_like_hydra(drawn(seed), times=2)
