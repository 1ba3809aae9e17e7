"""Arms of a comparison share their random numbers, and their records prove it."""

from __future__ import annotations

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.telemetry import read_events


def chain(run):
    """Return the chained digest of the micro-batches after each step."""
    events = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "step"]
    steps = [payload["batches_sha256"] for payload in events]
    assert steps[-1] == Manifest.read(run.manifest).results["batches_sha256"]
    return steps


def facts(run):
    return Manifest.read(run.manifest).facts


def layers(run):
    return facts(run)["lora_init_layers_sha256"]


def test_arms_that_differ_only_in_logger_share_everything_at_every_step(finished_with, finished):
    """All four steps have the same chained digest, and the initial adapter is the same."""
    other = finished_with("logger=csv")
    assert len(chain(finished)) == len(set(chain(finished))) == 4
    assert chain(other) == chain(finished)
    assert facts(other)["lora_init_sha256"] == facts(finished)["lora_init_sha256"]


@pytest.mark.parametrize(
    "arm",
    [
        ["quant.double_quant=false"],
        ["quant=fp4"],
        ["backend=lora"],
        ["backend=burn", "tokenizer=hf", "lora=all_linear"],
    ],
    ids=" ".join,
)
def test_arms_share_batches_and_first_matrices_whatever_the_base(finished_with, finished, arm):
    """Quantizer and backend do not affect the random draws."""
    run = finished_with(*arm)
    assert chain(run) == chain(finished)
    assert facts(run)["lora_init_sha256"] == facts(finished)["lora_init_sha256"]


def test_arms_with_some_layers_in_common_share_those(finished_with, finished):
    """The initial adapter as a whole differs, but the common layers are equal."""
    every = layers(finished)
    for arm in (["lora=attention"], ["backend=burn", "tokenizer=hf"]):
        run = finished_with(*arm)
        ours = layers(run)
        assert facts(run)["lora_init_sha256"] != facts(finished)["lora_init_sha256"]
        assert ours.keys() < every.keys()
        assert ours == {name: every[name] for name in ours}


def test_the_proxy_starts_from_the_full_graphs_matrices(finished_with, finished):
    """Its middle projections are the attention's output projections under other names."""
    ours, every = layers(finished_with("backend=proxy")), layers(finished)
    assert [ours["mid0"], ours["mid1"]] == [every["l0.o"], every["l1.o"]]


def test_another_seed_changes_batches_and_matrices(finished_with, finished):
    """No step and no layer is shared."""
    run = finished_with("seed=7")
    assert not set(chain(run)) & set(chain(finished))
    assert not set(layers(run).values()) & set(layers(finished).values())


def test_other_data_changes_the_batches_alone(train_in, finished, rows_file, tmp_path):
    """One changed digit changes the batches, but not the initial adapter."""
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(rows_file.read_bytes().replace(b"Add 1", b"Add 2"))
    run = train_in(tmp_path / "run", f"data.path={rows}")
    assert chain(run) != chain(finished)
    assert layers(run) == layers(finished)


def test_a_resumed_run_has_the_digests_of_an_undisturbed_one(
    finished, train_in, tmp_path, monkeypatch
):
    """Cancelled in the third step and resumed: every chained digest is the same."""
    from mens_exp.tasks.run import Cancelled
    from mens_exp.training.module import TrainingModule

    original = TrainingModule.training_step

    def step(self, batch, index):
        if batch.index == 5:
            raise Cancelled("SIGINT")
        return original(self, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingModule, "training_step", step)
        run = train_in(tmp_path / "run", code=130)
    assert cli.main([f"resume={run.path}"]) == 0
    assert Manifest.read(run.manifest).attempts[-1]["resumed_from_step"] == 2
    assert chain(run) == chain(finished)
    assert layers(run) == layers(finished)
