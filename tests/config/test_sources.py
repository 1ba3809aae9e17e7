"""Hydra's ways to add config sources and to sweep from a file, by its documentation's examples.

The layout is that of "Config Search Path" (additional_conf beside the application's own groups),
the flags are those of "Hydra's command line flags", and the grid is that of "Multi-run".
"""

from __future__ import annotations

import sys

import pytest
from omegaconf import OmegaConf

from mens_exp import MensError, cli, compose
from mens_exp.config import option_files
from mens_exp.config.overrides import check


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory with the package `additional_conf`, which adds one option."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    group = tmp_path / "additional_conf" / "lora"
    group.mkdir(parents=True)
    (tmp_path / "additional_conf" / "__init__.py").touch()
    (group / "imagenet.yaml").write_text("defaults: [all_linear, _self_]\nr: 5\n", "utf-8")
    yield tmp_path
    sys.modules.pop("additional_conf", None)


def shown(capsys, *arguments):
    assert cli.main(["--cfg", "job", *arguments]) == 0
    return OmegaConf.create(capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["hydra.searchpath=[pkg://additional_conf]"],
        ["hydra.searchpath=[file://additional_conf]"],
        ["--config-dir", "additional_conf"],
        ["-cd", "additional_conf"],
        ["--config-dir=additional_conf"],
    ],
    ids=" ".join,
)
def test_another_directory_adds_options(capsys, arguments):
    """Only for this command; the next one does not know the option."""
    assert shown(capsys, *arguments, "lora=imagenet").lora.r == 5
    assert cli.main(["--cfg", "job", "lora=imagenet"]) == 2
    assert "lora: unknown option" in capsys.readouterr().err
    assert option_files.primary_config() == "config"


def test_a_primary_config_of_ones_own_has_a_searchpath(here, capsys, monkeypatch):
    """As in Hydra's documentation, with oc.env; its defaults list includes mens_exp's config."""
    monkeypatch.setenv("PLACE", str(here))
    (here / "conf").mkdir()
    (here / "conf" / "mine.yaml").write_text(
        "defaults: [config, _self_]\nseed: 7\n"
        "hydra:\n  searchpath: ['file://${oc.env:PLACE}/additional_conf']\n",
        "utf-8",
    )
    found = shown(capsys, "--config-name", "mine", "lora=imagenet")
    assert (found.seed, found.lora.r, found.model.name) == (7, 5, "SmolLM2-135M-Instruct")


def test_the_python_api_reads_a_searchpath_too():
    """In Python, hydra.searchpath is an override like any other."""
    found = compose("hydra.searchpath=[pkg://additional_conf]", "lora=imagenet")
    assert found.config.lora.r == 5
    with pytest.raises(MensError, match="is not a config directory"):
        compose("hydra.searchpath=[pkg://no_such_package]")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config-dir", "nope"], "--config-dir: is not a config directory"),
        (["--config-name", "nope"], "--config-name: primary config not found"),
        (["hydra.searchpath=[s3://bucket]"], "hydra.searchpath: is not a config directory"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_source_that_is_not_there_is_told(capsys, arguments, said):
    """Hydra alone would warn, or report a missing option."""
    assert cli.main(["--cfg", "job", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def grid(here):
    """An experiment that sweeps two keys, in the form of Hydra's "Multi-run" page."""
    file = here / "conf" / "experiment" / "grid.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n"
        "      seed: 1,2\n      lora: qv,qkv,mlp\n",
        "utf-8",
    )


def swept(*texts):
    checked = check(texts, multirun=True)
    assert checked.problems == ()
    return [(cell.config.seed, cell.config.lora.name) for cell in checked.cells]


def test_a_sweep_may_stand_in_an_experiment(grid):
    """Every combination, the first key slowest; a value on the command line takes precedence."""
    assert swept("experiment=grid") == [
        (seed, lora) for seed in (1, 2) for lora in ("qv", "qkv", "mlp")
    ]
    assert swept("experiment=grid", "seed=9") == [(9, lora) for lora in ("qv", "qkv", "mlp")]
    assert swept("experiment=grid", "lora=qv,mlp", "seed=9") == [(9, "qv"), (9, "mlp")]


def test_an_unknown_key_of_a_sweeper_in_a_file_is_named(grid, here):
    """The message names the file and the nearest key."""
    file = here / "conf" / "experiment" / "grid.yaml"
    file.write_text(
        "# @package _global_\ndefaults:\n  - override /hydra/sweeper: optuna\n"
        "hydra:\n  sweeper:\n    direction: minimize\n",
        "utf-8",
    )
    told = r"grid.yaml: hydra.sweeper.direction: unknown key.*the nearest is directions"
    with pytest.raises(MensError, match=told):
        check(["experiment=grid"], multirun=True)


def test_a_single_run_ignores_the_sweep_of_its_experiment(grid):
    """As in Hydra, the sweeper is not used without -m."""
    checked = check(["experiment=grid"])
    assert [cell.config.seed for cell in checked.cells] == [42]


def test_a_mistake_in_a_swept_file_is_told_like_one_typed(grid, here):
    """The message names the key."""
    (here / "conf" / "experiment" / "grid.yaml").write_text(
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n      lora.rr: 1,2\n", "utf-8"
    )
    [problem] = check(["experiment=grid"], multirun=True).problems
    assert problem.where == "lora.rr"
