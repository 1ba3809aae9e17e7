"""inspect.replay repeats a run's first steps bit for bit, or names the first that differs."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from mens_exp.artifacts.certificate import Outcome
from mens_exp.artifacts.digest import record_checkpoint_digest, sha256_file
from mens_exp.artifacts.run_dir import RunDir


@pytest.fixture
def run(finished, tmp_path):
    """A finished run of four steps to change; the states of steps 2 and 4 are kept."""
    return RunDir(shutil.copytree(finished.path, tmp_path / "run"))


@pytest.fixture
def replay(inspect):
    def command(path, *overrides, code=0):
        found = inspect(path, "inspect.replay=true", *overrides, code=code).replay
        assert found is not None
        return found

    return command


def names(found):
    return [f"{one['step']} {one['name']}" for one in found["checks"]]


def edit_step(run, step, **changes):
    lines = [json.loads(line) for line in run.telemetry.read_text("utf-8").splitlines()]
    for line in lines:
        if line["event"] == "step" and line["payload"]["step"] == step:
            line["payload"] |= {name.replace("__", "/"): value for name, value in changes.items()}
    run.telemetry.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def test_an_untouched_run_replays_identically(run, replay):
    """Start, batches, losses, norms, states of steps 2 and 4 and the final adapter are equal."""
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    found = replay(run.path, "inspect.replay_steps=9")
    assert (found["steps"], found["identical_through"], found["first_difference"]) == (4, 4, None)
    assert found["conditions"] == []
    assert {one["outcome"] for one in found["checks"]} == {Outcome.EQUAL}
    compared = names(found)
    for name in (
        *("0 start of the adapter, 14 layers", "1 batches_sha256", "4 train/grad_norm"),
        *("2 step_00000002.ckpt: adapter 28 tensors", "4 step_00000004.ckpt: optimizer 84 tensors"),
        "4 adapter/adapter.safetensors: 28 tensors",
    ):
        assert name in compared
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_the_least_steps_of_a_run_do_not_lengthen_its_replay(finished_with, replay):
    """trainer.min_steps keeps callbacks from ending the run, and not the replay."""
    found = replay(finished_with("trainer.min_steps=3").path, "inspect.replay_steps=1")
    assert (found["steps"], found["identical_through"]) == (1, 1)
    assert {one["step"] for one in found["checks"]} == {0, 1}


def test_only_so_many_steps_are_taken_as_are_asked_for(run, replay, typed):
    """One step is replayed, under the schedule of the whole run."""
    found = replay(run.path, "inspect.replay_steps=1")
    assert (found["steps"], found["identical_through"]) == (1, 1)
    assert {one["step"] for one in found["checks"]} == {0, 1}
    said = typed(
        "task=inspect", f"path={run.path}", "inspect.replay=true", "inspect.replay_steps=1"
    )
    assert "identical through step 1" in said


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule=cosine", "lora.dropout=0.1", "trainer.val_check_interval=4"],
        ["lora.init=pissa", "lora.r=4"],
        ["lora.init=eva", "lora.r=4"],
        ["lora.init=lora_ga", "lora.r=4"],
        ["lora=adalora", "lora.target_r=4"],
        [
            "backend=lora",
            "lora.variant=dora",
            "callbacks=[default,early_stopping]",
            "trainer.val_check_interval=4",
        ],
        ["backend=proxy", "objective.k=4"],
        ["backend=full", "optim.lr=1e-5"],
        ["lora.variant=dora", "optim.loraplus_lr_ratio=4", "trainer.val_check_interval=4"],
        ["optim=schedule_free", "schedule=constant", "trainer.val_check_interval=4"],
    ],
    ids=" ".join,
)
def test_every_kind_of_run_replays(
    finished_with,
    replay,
    overrides,
):
    """With dropout, a start from the weights, another graph, and validations in between."""
    found = replay(finished_with(*overrides).path, "inspect.replay_steps=4")
    assert (found["identical_through"], found["first_difference"]) == (4, None)


def test_a_run_that_began_with_an_adapter_replays(
    finished,
    train_in,
    replay,
    tmp_path,
):
    """It starts from the adapter, whose hash is compared too."""
    second = train_in(tmp_path / "second", f"lora.init_from={finished.path}")
    found = replay(second.path, "inspect.replay_steps=2")
    assert found["identical_through"] == 2
    assert "0 inputs.init_from.adapter_sha256" in names(found)


def test_an_edited_loss_is_found_by_step_and_name(run, replay):
    """The edited loss is that of step 2; step 1 is reported as identical."""
    edit_step(run, 2, train__loss=1.5)
    found = replay(run.path, code=4)
    assert found["identical_through"] == 1
    assert found["first_difference"] is not None
    assert found["first_difference"].startswith("step 2: train/loss: recorded 1.5, found ")
    assert max(one["step"] or 0 for one in found["checks"]) == 2


def test_a_step_that_telemetry_no_longer_has_is_found(run, replay):
    """A step that was removed from the telemetry is not reported as identical."""
    lines = run.telemetry.read_text("utf-8").splitlines(keepends=True)
    kept = [one for one in lines if not ('"event":"step"' in one and '"step":2' in one)]
    assert len(kept) == len(lines) - 1
    run.telemetry.write_text("".join(kept), "utf-8")
    found = replay(run.path, code=4)
    assert found["first_difference"] == "step 2: step: recorded not in telemetry, found taken"


def test_another_batch_is_found_before_the_loss_it_gives(run, replay):
    """Differences are reported in the order in which they arise: the batch, then its loss."""
    edit_step(run, 1, batches_sha256="0" * 64, train__loss=1.5)
    found = replay(run.path, code=4)
    assert found["first_difference"] is not None
    assert found["first_difference"].startswith("step 1: batches_sha256")


def test_an_edited_seed_is_found_in_the_first_layer(run, replay):
    """No step is trained, and the configuration is reported as changed."""
    text = run.config.read_text("utf-8")
    assert text.startswith("seed: 42\n")
    run.config.write_text(text.replace("seed: 42\n", "seed: 43\n", 1), "utf-8")
    found = replay(run.path, code=4)
    assert found["identical_through"] == 0
    assert found["first_difference"] is not None
    assert found["first_difference"].startswith("step 0: start of l0.q: recorded ")
    assert found["conditions"] == ["config.yaml is not the one that the manifest is of"]


@pytest.mark.parametrize(
    ("part", "name"), [("adapter", "l0.q.lora_b"), ("optimizer", "l0.q.lora_b.exp_avg")]
)
def test_a_tensor_that_differs_in_a_kept_state_is_named(run, replay, part, name):
    """One element of one tensor of the adapter or of the optimizer is named."""
    path = run.checkpoint(2)
    state = torch.load(path, weights_only=True)
    if part == "adapter":
        state["adapter"][name][0, 0] += 1e-6
    else:
        number = list(state["adapter"]).index(name.removesuffix(".exp_avg"))
        state["optimizer_states"][0]["state"][number]["exp_avg"][0, 0] += 1e-6
    torch.save(state, path)
    record_checkpoint_digest(path, sha256_file(path))  # or else its digest alone would refuse it
    found = replay(run.path, code=4)
    assert found["identical_through"] == 1
    assert found["first_difference"] is not None
    assert found["first_difference"].startswith(f"step 2: step_00000002.ckpt: {part} {name}: ")


def test_other_libraries_are_labelled(run, replay):
    """Other library versions are labelled, whatever the outcome."""
    value = json.loads(run.manifest.read_text("utf-8"))
    value["provenance"]["packages"]["torch"] = "1.0"
    run.manifest.write_text(json.dumps(value), "utf-8")
    assert replay(run.path, "inspect.replay_steps=1")["conditions"] == ["packages"]


def test_a_run_without_digests_is_replayed_as_far_as_it_tells(train_in, replay, tmp_path):
    """Only losses and norms are compared, and what was not recorded is named."""
    run = train_in(tmp_path / "old", "~callbacks.digests")
    found = replay(run.path, "inspect.replay_steps=2")
    assert found["identical_through"] == 2
    absent = {one["name"] for one in found["checks"] if one["outcome"] == Outcome.NOT_HERE}
    assert absent == {"start of the adapter", "batches_sha256"}


def test_a_run_without_steps_is_refused(run, typed):
    """A run without steps has nothing to compare with."""
    run.telemetry.write_text("", "utf-8")
    assert "no step that can be" in typed(
        "task=inspect", f"path={run.path}", "inspect.replay=true", code=2
    )


def test_verify_and_replay_go_together(run, inspect):
    """Both are in one record, and both find the edited telemetry: exit code 4."""
    edit_step(run, 2, train__loss=1.5)
    found = inspect(run.path, "inspect.verify=true", "inspect.replay=true", code=4)
    assert found.replay is not None
    assert found.verification is not None
    odd = [one for one in found.verification["checks"] if one["outcome"] == Outcome.DIFFERS]
    assert [one["name"] for one in odd] == ["outputs.telemetry.jsonl"]
