from __future__ import annotations

import pytest

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.logger import WandbLogger
from mens_exp.training.wandb_rendering import (
    config_of,
    id_of,
    name_of,
    settings_of,
    summary_of,
    tags_of,
)

CONFIG = {"model": {"name": "SmolLM2-135M-Instruct"}}


def manifest_of(*overrides, experiment=None):
    return Manifest(
        run_id="r",
        task="train",
        experiment=experiment,
        started_utc="2026-11-20T05:58:01.123Z",
        overrides=list(overrides),
        choices={"model": "smollm2_135m", "backend": "qlora"},
        config_digest="ab" * 32,
        seed=42,
    )


def group_of(path, logger, manifest):
    return settings_of(logger, RunDir(path), manifest, CONFIG, "r")["run_group"]


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        (["backend=qlora", "quant.double_quant=false"], " double_quant=false"),
        (["lora=attention", "+lora.r=8"], " lora=attention r=8"),
        (["~callbacks.memory"], " ~callbacks.memory"),
        (["seed=42", "model=smollm2_135m", "logger.project=lab", "hydra.verbose=true"], ""),
    ],
)
def test_name_says_what_was_changed(overrides, changed):
    """Model, backend and seed are spelled once; settings of the log are left out."""
    name = name_of(manifest_of(*overrides), CONFIG)
    assert name == f"SmolLM2-135M-Instruct qlora{changed} seed42"


def test_name_without_a_configuration_uses_the_option(tmp_path):
    """The chosen option stands in for the model's own name."""
    assert name_of(manifest_of(), {}) == "smollm2_135m qlora seed42"


def test_long_name_keeps_its_seed():
    """128 characters are W&B's limit."""
    name = name_of(manifest_of(f"data.path={'x' * 200}"), CONFIG)
    assert len(name) == 128
    assert name.endswith("x seed42")


def test_tags_are_the_overrides_then_the_users_own():
    """An override is cut to 64 characters; a tag of the user's is not."""
    tags = tags_of(["lora.r=8", "a=" + "x" * 80, "logger.tags=[mine]"], ["mine", "lora.r=8"])
    assert tags == ("lora.r=8", "a=" + "x" * 62, "mine")


def test_group_is_the_loggers_before_the_experiments(tmp_path):
    """What the user names wins."""
    manifest = manifest_of(experiment="double_quant")
    assert group_of(tmp_path, WandbLogger(group="mine"), manifest) == "mine"
    assert group_of(tmp_path, WandbLogger(), manifest) == "double_quant"


def test_a_sweep_is_a_group_before_its_experiment_is(tmp_path):
    """Two sweeps of one experiment stay apart; an evaluation stands beside the run it read."""
    (tmp_path / "sweep.json").touch()
    manifest = manifest_of(experiment="double_quant")
    assert group_of(tmp_path / "0_abcd1234", WandbLogger(), manifest) == tmp_path.name
    read = manifest_of(experiment="double_quant")
    read.inputs["subject"] = str(tmp_path / "0_abcd1234")
    assert group_of(tmp_path / "elsewhere" / "run", WandbLogger(), read) == tmp_path.name


def test_the_same_sweep_launched_again_has_other_run_ids(tmp_path):
    """A job is named by its place and its composition, which both launches share."""
    alone = id_of(RunDir(tmp_path / "one" / "0_abcd1234"), manifest_of())
    assert alone == "r"
    for sweep in ("one", "two"):
        (tmp_path / sweep).mkdir()
        (tmp_path / sweep / "sweep.json").touch()
        assert id_of(RunDir(tmp_path / sweep / "0_abcd1234"), manifest_of()) == f"{sweep}_r"


def test_group_of_an_ad_hoc_sweep_is_its_directory(tmp_path):
    """Hydra's multirun.yaml or our sweep.json marks it; beside no such file there is no group."""
    assert group_of(tmp_path / "0_abcd1234", WandbLogger(), manifest_of()) is None
    (tmp_path / "multirun.yaml").touch()
    assert group_of(tmp_path / "0_abcd1234", WandbLogger(), manifest_of()) == tmp_path.name


def test_record_that_is_still_empty_renders_as_nothing(tmp_path):
    """A run that failed at once has neither configuration nor scorecard."""
    assert config_of(RunDir(tmp_path), []) == {}
    assert summary_of(RunDir(tmp_path), manifest_of()) == {"status": "started"}
