"""A sweep through the command line makes one run for each combination."""

from __future__ import annotations

import json
import shutil

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config import compose, option_files, user_config
from mens_exp.config.compose import config_digest, from_yaml


def runs_under(directory):
    found = [RunDir(path.parent) for path in directory.glob("*/manifest.json")]
    return sorted(found, key=lambda run: int(run.path.name.split("_")[0]))


def sweep(tiny_run, directory, *overrides):
    keys = {text.partition("=")[0] for text in overrides}
    kept = [text for text in tiny_run if text.partition("=")[0] not in keys]
    return cli.main(["-m", *kept, *overrides, f"hydra.sweep.dir={directory}"])


@pytest.fixture(scope="module")
def four(tiny_run, tmp_path_factory):
    """Two seeds with and without double quantization, two steps each."""
    directory = tmp_path_factory.mktemp("sweep") / "four"
    factors = ["seed=1,2", "quant.double_quant=true,false", "trainer.max_steps=2"]
    assert sweep(tiny_run, directory, *factors) == 0
    return runs_under(directory)


def test_each_combination_is_a_run_of_its_own(four):
    """Four directories, each with the manifest of its cell, and all succeeded."""
    manifests = [Manifest.read(run.manifest) for run in four]
    assert [(m.seed, m.facts["double_quant"]) for m in manifests] == [
        (1, True),
        (1, False),
        (2, True),
        (2, False),
    ]
    assert {m.status for m in manifests} == {Status.SUCCEEDED}
    assert [f"seed={m.seed}" in m.overrides for m in manifests] == [True] * 4


def test_each_run_has_its_own_frozen_configuration(four):
    """The directory is named after the configuration's digest."""
    digests = [config_digest(from_yaml(run.config)) for run in four]
    assert len(set(digests)) == 4
    assert digests == [Manifest.read(run.manifest).config_digest for run in four]
    assert [run.path.name for run in four] == [f"{n}_{d[:8]}" for n, d in enumerate(digests)]


def test_arms_of_one_seed_see_the_same_data(four):
    """Rows, tokens and their order are the same; the factor changes the adapter."""
    first, second, third, _ = (Manifest.read(run.manifest) for run in four)
    assert first.inputs == second.inputs == third.inputs
    tokens = "tokens_in_first_batch"
    assert first.facts[tokens] == second.facts[tokens]
    adapters = {(run.adapter / "adapter.safetensors").read_bytes() for run in four}
    assert len(adapters) == 4


def test_the_sweep_leaves_a_page_that_leads_to_each_run(four):
    """The launcher renders it after the last job."""
    text = (four[0].path.parent / "sweep.html").read_text(encoding="utf-8")
    assert all(f'href="./{run.path.name}/report.html"' in text for run in four)
    assert "4 succeeded" in text


def test_a_failing_cell_stops_no_other_and_the_exit_code_tells(tiny_run, tmp_path, capsys):
    """The first cell has no supervised token, and the second one trains."""
    factors = ["data.seq_len=16,192", "trainer.max_steps=1"]
    assert sweep(tiny_run, tmp_path / "sweep", *factors) == 2
    statuses = [Manifest.read(run.manifest).status for run in runs_under(tmp_path / "sweep")]
    assert statuses == [Status.FAILED, Status.SUCCEEDED]
    assert "no row has a supervised token left" in capsys.readouterr().err


def test_one_bad_cell_known_beforehand_stops_all(tiny_run, tmp_path, capsys):
    """It is refused before the first job, and no directory is created."""
    assert sweep(tiny_run, tmp_path / "sweep", "lora.r=8,0") == 2
    assert "lora.r: out of range" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_ctrl_c_ends_the_whole_sweep(tiny_run, tmp_path, monkeypatch):
    """With hydra/launcher=basic: the current cell is cancelled, and the next one does not start."""
    from mens_exp.tasks.run import Cancelled
    from mens_exp.training.module import TrainingModule

    def interrupted(*_):
        raise Cancelled

    monkeypatch.setattr(TrainingModule, "on_train_batch_start", interrupted)
    assert sweep(tiny_run, tmp_path / "sweep", "seed=1,2", "hydra/launcher=basic") == 130
    (run,) = runs_under(tmp_path / "sweep")
    assert Manifest.read(run.manifest).status is Status.CANCELLED


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A copy of the config groups that a test may edit."""
    copy = tmp_path / "conf"
    shutil.copytree(compose.config_directory(), copy)
    for module in (compose, option_files, user_config):
        monkeypatch.setattr(module, "config_directory", lambda: copy)
    option_files.our_options.cache_clear()
    yield copy
    option_files.our_options.cache_clear()


@pytest.mark.parametrize("edit", ["  r: 4", "  - not: [yaml"], ids=["other value", "broken"])
def test_editing_the_groups_during_a_sweep_changes_nothing(
    tiny_run,
    groups,
    tmp_path,
    monkeypatch,
    edit,
):
    """With hydra/launcher=basic, each cell is composed in its turn, from a copy made at launch."""
    from mens_exp.tasks import plan

    original = plan.plan

    def edited(config, run):
        original(config, run)
        (groups / "lora" / "all_linear.yaml").write_text(edit, encoding="utf-8")

    monkeypatch.setattr(plan, "plan", edited)
    basic = "hydra/launcher=basic"
    assert sweep(tiny_run, tmp_path / "sweep", "task=plan", "seed=1,2", basic) == 0
    runs = runs_under(tmp_path / "sweep")
    assert len(runs) == 2
    for number, run in enumerate(runs):
        values = from_yaml(run.config)
        assert values.lora.r == 16
        assert run.path.name == f"{number}_{config_digest(values)[:8]}"
        assert "r 16" in json.loads(run.plan.read_text(encoding="utf-8"))["lora"]
