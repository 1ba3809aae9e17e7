"""A configuration that starts from a remembered choice of options is the one Hydra composes."""

from __future__ import annotations

import re

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, ListConfig, OmegaConf

from mens_exp.config import compose as composing
from mens_exp.config.compose import compose


def plainly(overrides):
    """Compose with Hydra's own loader."""
    composing.prepare_hydra()
    GlobalHydra.instance().clear()
    where = str(composing.config_directory())
    with initialize_config_dir(where, version_base=composing.VERSION_BASE):
        return hydra_compose("config", list(overrides), return_hydra_config=True)


def nodes(node, path=""):
    """List every node below one in order: path, type, schema and flags, and a leaf's value."""
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
    """Types, order and flags too, read the first time and remembered."""
    expected = nodes(plainly(overrides))
    for others in ([], ["lora.r=16", "seed=8", "hydra.sweep.dir=/tmp/other"]):
        compose([[*overrides, *others]])
        [again] = compose([overrides])
        assert nodes(again.whole) == expected


@pytest.mark.parametrize(
    "overrides", [["lora.r=abc", "seed=1"], ["no_such_key=1"], ["lora=none_such"]], ids=" ".join
)
def test_it_refuses_as_hydra_does(overrides):
    """In the same words, each time."""
    with pytest.raises(ConfigCompositionException) as refused:
        plainly(overrides)
    for _ in range(2):
        with pytest.raises(type(refused.value), match=re.escape(str(refused.value))):
            compose([overrides])


def test_what_is_done_to_one_is_not_done_to_the_next():
    """Each is a copy, Hydra's node too."""
    for _ in range(2):
        [one] = compose([["seed=5"]])
        assert one.whole is not None
        assert (one.values.lora.r, one.whole.hydra.job.get("num")) == (16, None)
        one.values.lora.r = 99
        one.whole.lora.r = 98
        one.whole.hydra.job.num = 4


def test_a_changed_file_of_the_users_is_read_again(tmp_path, monkeypatch):
    """So is one that comes or goes, and another working directory has others."""
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
    """Hydra's node says where it was composed."""
    compose([[]])
    monkeypatch.chdir(tmp_path)
    [one] = compose([[]])
    assert one.whole is not None
    assert OmegaConf.select(one.whole, "hydra.runtime.cwd") == str(tmp_path)
