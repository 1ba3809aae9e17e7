from __future__ import annotations

import pytest
from wandb.sdk.lib.config_util import save_config_file_from_dict

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.logger import WandbLogger
from mens_exp.training.wandb_names import AgentRun, agent_inputs, id_of, recorded_agent
from mens_exp.training.wandb_rendering import config_entries, settings_of

DRAWN = {"optim.lr": 0.000123, "backend": "lora"}


def told(path=None):
    """Set the environment variables that `wandb agent` gives its process."""
    ids = {"WANDB_RUN_ID": "abc123", "WANDB_SWEEP_ID": "swp456"}
    where = {"WANDB_ENTITY": "lab", "WANDB_PROJECT": "mine"}
    return ids | where | ({} if path is None else {"WANDB_SWEEP_PARAM_PATH": str(path)})


def manifest_of(inputs):
    return Manifest(
        run_id="ours",
        task="train",
        started_utc="2026-11-20T05:58:01.123Z",
        config_digest="ab" * 32,
        seed=42,
        inputs=inputs,
    )


def sweep_at(path, manifest, **logger):
    settings = settings_of(WandbLogger(**logger), RunDir(path), manifest, {}, "r")
    return settings.get("sweep_id")


def test_what_an_agent_told_is_read_back_from_the_manifest(tmp_path):
    """The file of values is written by wandb's own code."""
    file = tmp_path / "config-abc123.yaml"
    save_config_file_from_dict(str(file), {key: {"value": one} for key, one in DRAWN.items()})
    manifest = manifest_of(agent_inputs(told(file)))
    assert recorded_agent(manifest) == AgentRun("abc123", "swp456", "lab", "mine", DRAWN)
    assert id_of(RunDir(tmp_path), manifest) == "abc123"
    assert config_entries(RunDir(tmp_path), manifest) == DRAWN


@pytest.mark.parametrize("missing", ["WANDB_RUN_ID", "WANDB_SWEEP_ID"])
def test_without_both_ids_there_is_no_agent(missing):
    """Only a run id, or only a sweep id, does not make an agent."""
    assert agent_inputs({key: one for key, one in told().items() if key != missing}) == {}
    assert recorded_agent(manifest_of({})) is None


@pytest.mark.parametrize("text", [None, "a: [", "- 1", "wandb_version: 1\n\nseed: 3"])
def test_a_file_of_values_that_cannot_be_read_hides_no_run(tmp_path, text):
    """The command line has the values too."""
    file = tmp_path / "values.yaml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    agent = recorded_agent(manifest_of(agent_inputs(told(file))))
    assert agent is not None
    assert (agent.run_id, agent.parameters) == ("abc123", {})


def test_a_job_of_a_sweep_that_an_agent_launched_is_not_the_agents_run(tmp_path):
    """All jobs of the sweep would be the same W&B run."""
    (tmp_path / "sweep.json").touch()
    manifest = manifest_of(agent_inputs(told()))
    job = tmp_path / "0_abcd1234"
    assert id_of(RunDir(job), manifest) == f"{tmp_path.name}_ours"
    assert sweep_at(job, manifest, project="mine") is None


def test_a_run_that_is_sent_elsewhere_is_of_no_sweep(tmp_path):
    """A sweep belongs to one project; without an entity, to the default account."""
    manifest = manifest_of(agent_inputs(told()))
    assert sweep_at(tmp_path, manifest, project="mine") == "swp456"
    assert sweep_at(tmp_path, manifest, project="mine", entity="lab") == "swp456"
    assert sweep_at(tmp_path, manifest, project="other") is None
    assert sweep_at(tmp_path, manifest, project="mine", entity="others") is None
