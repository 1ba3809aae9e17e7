"""The command task=inspect, typed as a user would: what something is, and where it came from."""

from __future__ import annotations

import json
import shlex
import shutil

import numpy as np
import pytest

from mens_exp import load_run
from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.artifacts.certificate import ArtifactKind
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.host import run_lock
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir


def test_a_run_is_told_layer_by_layer(finished, inspect):
    """Base, keys and shapes are listed; the norm of a delta is that of the product itself."""
    found = inspect(finished.path)
    manifest, tensors = read_adapter(finished.adapter)
    ours = Manifest.read(finished.manifest)
    assert (found.kind, found.form, found.variant) == (ArtifactKind.RUN, "v3", "lora")
    assert found.base is not None
    assert found.base["name"] == "tiny_llama"
    assert found.base["weights_sha256"] == ours.inputs["base_weights_sha256"]
    assert (found.base["base_quant"], found.base["quantizer"]) == ("nf4", manifest.quantizer)
    assert found.parameters == sum(values.size for values in tensors.values())
    assert found.layers.keys() == set(manifest.layer_order)
    for name, layer in found.layers.items():
        A_RI, B_OR = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
        delta_OI = manifest.scale_of(name) * (B_OR.astype(np.float64) @ A_RI.astype(np.float64))
        values = np.linalg.svd(delta_OI, compute_uv=False)
        assert layer["base_key"] == manifest.base_key_map[name]
        assert layer["shape"] == list(delta_OI.shape)
        assert layer["frobenius"] == pytest.approx(np.linalg.norm(delta_OI), rel=1e-9)
        assert layer["spectral"] == pytest.approx(values[0], rel=1e-9)
    assert [one["role"] for one in found.lineage] == ["base", "run"]
    assert found.lineage[-1]["hashes"]["config_digest"] == ours.config_digest


def test_it_reads_and_is_on_record_like_every_task(finished, typed, tmp_path):
    """The terminal shows a table; the record is an output of the task's own run."""
    said = typed("task=inspect", f"path={finished.path}", "hydra.run.dir=own")
    assert "model.layers.0.self_attn.q_proj.weight" in said
    assert "eff. rank" in said
    own = Manifest.read(tmp_path / "here" / "own" / "manifest.json")
    record = tmp_path / "here" / "own" / "inspection.json"
    assert own.outputs["inspection.json"] == sha256_file(record)


@pytest.mark.parametrize("form", ["v2", "v3", "peft"])
def test_every_form_of_an_adapter_has_the_same_deltas(
    finished,
    typed,
    inspect,
    tmp_path,
    form,
):
    """Every form has the same deltas; an export shows its certificate, its run and its base."""
    trained = inspect(finished.path)
    beside = tmp_path / "runs"
    shutil.copytree(finished.path, beside / "run")
    out = beside / "exported"
    typed("task=export", f"path={beside / 'run'}", f"export.format={form}", f"out={out}")
    found = inspect(out)
    assert (found.kind, found.form) == (ArtifactKind.ADAPTER, form)
    assert found.certificate is not None
    assert found.certificate["passed"]
    assert found.layers.keys() == trained.layers.keys()
    for name, layer in trained.layers.items():
        assert found.layers[name]["frobenius"] == pytest.approx(layer["frobenius"], rel=1e-6)
        assert found.layers[name]["base_key"] == layer["base_key"]
    assert [one["role"] for one in found.lineage] == ["base", "run", "written"]
    assert found.lineage[1]["place"] == str(beside / "run")


def test_a_peft_directory_of_another_family_is_read_by_its_names(train_in, inspect, tmp_path):
    """GPT-2's modules are read by name, outside any run; the base's quantization is unknown."""
    run = train_in(tmp_path / "gpt2", "model=tiny_gpt2", "trainer.max_steps=1")
    expected = inspect(run.path)
    found = inspect(shutil.copytree(run.peft, tmp_path / "alone"))
    assert (found.kind, found.form) == (ArtifactKind.ADAPTER, "peft")
    assert found.layers.keys() == expected.layers.keys()
    assert found.layers["l0.qkv"]["shape"] == expected.layers["l0.qkv"]["shape"]
    assert "base.base_quant" in found.unknown


def test_a_run_of_every_weight_has_no_layers(train_in, inspect, tmp_path):
    """Neither the run nor its training state has layers, and both say why."""
    run = train_in(tmp_path / "full", "backend=full", "optim.lr=1e-5", "trainer.max_steps=1")
    for path in (run.path, run.checkpoint(1)):
        found = inspect(path)
        assert found.layers == {}
        assert "every weight" in found.unknown["layers"]


def test_a_written_adapter_whose_run_is_gone_says_so(finished, typed, inspect, tmp_path):
    """The hash of the adapter that it was made from is still shown."""
    run = shutil.copytree(finished.path, tmp_path / "run")
    typed("task=export", f"path={run}", "export.format=v3", f"out={tmp_path / 'gone' / 'out'}")
    shutil.rmtree(run)
    found = inspect(tmp_path / "gone" / "out")
    before = found.lineage[1]
    assert before["place"] is None
    assert before["missing"] is not None
    tensors = finished.adapter / "adapter.safetensors"
    assert before["hashes"] == {"adapter_sha256": sha256_file(tensors)}


def test_a_damaged_record_beside_it_hides_no_run(finished, inspect, tmp_path):
    """The search for the adapter's run skips a manifest that is not JSON."""
    shutil.copytree(finished.path, tmp_path / "runs" / "run")
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "manifest.json").write_text("{", "utf-8")
    copied = shutil.copytree(finished.adapter, tmp_path / "runs" / "copied")
    last = inspect(copied).lineage[-1]
    assert (last["role"], last["name"], last["missing"]) == ("adapter", "of run run", None)


def test_a_checkpoint_tells_step_optimizer_and_whether_it_goes_on(finished, inspect):
    """The last state has the run's adapter; it is not resumable, as the run has ended."""
    found = inspect(finished.checkpoint(4))
    trained = inspect(finished.path)
    assert (found.kind, found.checkpoint is not None) == (ArtifactKind.CHECKPOINT, True)
    assert found.checkpoint is not None
    assert found.checkpoint["step"] == 4
    # AdamW keeps a step, a mean and a mean square for A and B of each layer.
    assert found.checkpoint["optimizer_tensors"] == 3 * 2 * len(trained.layers)
    assert "has ended" in found.checkpoint["why"]
    for name, layer in trained.layers.items():
        assert found.layers[name]["scale"] == layer["scale"]
        assert found.layers[name]["base_key"] == layer["base_key"]
        assert found.layers[name]["frobenius"] == pytest.approx(layer["frobenius"], rel=1e-9)


def test_a_checkpoint_without_its_optimizer_goes_nowhere(finished, inspect, tmp_path):
    """It cannot be resumed, and outside a run it has no scale either."""
    import torch

    state = torch.load(finished.checkpoint(4), weights_only=True)
    state["optimizer_states"] = []
    torch.save(state, tmp_path / "step_00000004.ckpt")
    found = inspect(tmp_path / "step_00000004.ckpt")
    assert found.checkpoint is not None
    assert not found.checkpoint["resumable"]
    assert found.checkpoint["why"] == "it lacks optimizer_states"
    assert all(layer["scale"] is None for layer in found.layers.values())
    assert "layers.scale" in found.unknown


def test_a_stopped_runs_last_state_is_resumable(broken, inspect, tmp_path):
    """The run was cancelled in its fourth step; its state is of the second."""
    run = broken(tmp_path / "stopped", 7)
    found = inspect(run.last_checkpoint())
    assert found.checkpoint is not None
    assert (found.checkpoint["step"], found.checkpoint["resumable"]) == (2, True)
    assert inspect(run.path).unknown.keys() == {"layers"}


def test_a_truncated_checkpoint_is_refused(finished, typed, tmp_path):
    """Half a file is not a training state."""
    whole = finished.checkpoint(4).read_bytes()
    (tmp_path / "step_00000004.ckpt").write_bytes(whole[: len(whole) // 2])
    said = typed("task=inspect", f"path={tmp_path / 'step_00000004.ckpt'}", code=2)
    assert "not a readable training state" in said


@pytest.mark.parametrize("mode", ["full", "subset"])
def test_what_a_merge_wrote_leads_back_to_its_run(
    finished,
    typed,
    inspect,
    tmp_path,
    mode,
):
    """A directory and a file of tensors, given by itself or through the run that wrote it."""
    beside = tmp_path / "runs"
    shutil.copytree(finished.path, beside / "run")
    out = beside / ("merged" if mode == "full" else "merged.safetensors")
    own = f"hydra.run.dir={beside / 'merging'}"
    budget = "parity.accept=true"
    typed(
        *(
            "task=merge",
            "logger=none",
            f"path={beside / 'run'}",
            f"merge.mode={mode}",
            f"out={out}",
        ),
        *(own, budget, "parity.tokens=64"),
    )
    found = inspect(out)
    assert found.kind is (ArtifactKind.MODEL if mode == "full" else ArtifactKind.TENSORS)
    assert found.certificate is not None
    assert "written" in found.certificate["comparisons"]
    assert [one["role"] for one in found.lineage] == ["base", "run", "written"]
    assert found.base is not None
    assert found.base["name"] == "tiny_llama"
    assert inspect(beside / "merging").kind is found.kind


def test_a_run_that_began_with_an_adapter_names_all_its_ancestors(
    finished,
    train_in,
    inspect,
    tmp_path,
):
    """Base, first run, its adapter, second run; a deleted first run is said to be missing."""
    first = shutil.copytree(finished.path, tmp_path / "runs" / "first")
    second = train_in(tmp_path / "runs" / "second", f"lora.init_from={first}")
    line = inspect(second.path).lineage
    assert [one["role"] for one in line] == ["base", "run", "starting adapter", "run"]
    assert line[1]["place"] == str(first)
    shutil.rmtree(first)
    line = inspect(second.path).lineage
    assert [one["role"] for one in line] == ["base", "starting adapter", "run"]
    assert line[1]["place"] is None
    assert line[1]["missing"] is not None


def test_a_dora_tells_how_far_its_lengths_moved(train_in, inspect, tmp_path):
    """Magnitudes scaled by 1.25 show as a change of 0.25 from the rows of the 4-bit base."""
    from safetensors.numpy import load_file, save_file

    run = train_in(tmp_path / "dora", "lora.variant=dora", "optim.lr=1e-9")
    still = inspect(run.path)
    changes = [layer["magnitude_change"] for layer in still.layers.values()]
    assert max(changes) < 1e-4
    path = run.adapter / "adapter.safetensors"
    tensors = load_file(path)
    tensors["l0.q.lora_magnitude"] *= 1.25
    save_file(tensors, path)
    manifest = Manifest.read(run.manifest)
    manifest.outputs["adapter/adapter.safetensors"] = sha256_file(path)
    manifest.write(run.manifest)
    moved = inspect(run.path).layers["l0.q"]["magnitude_change"]
    assert moved == pytest.approx(0.25, abs=1e-3)


def test_nothing_that_can_be_inspected_is_refused(typed, tmp_path):
    """A missing path, an empty directory and a file of another kind are refused."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no", "utf-8")
    for name, message in {
        "absent": "no such file or directory",
        "empty": "a directory without a record",
        "notes.txt": "a file that is not a checkpoint",
    }.items():
        said = typed("task=inspect", f"path={tmp_path / name}", code=2)
        assert message in said
        assert "next write path=latest" in " ".join(said.split())


def test_a_file_of_rows_is_told_how_to_see_it(typed, tmp_path):
    """The command in the message, when run, shows the file's rows."""
    rows = tmp_path / "my rows.jsonl"
    pairs = ({"prompt": f"Say {n}.", "response": f"{n}"} for n in range(40))
    rows.write_text("".join(json.dumps(one) + "\n" for one in pairs), "utf-8")
    said = " ".join(typed("task=inspect", f"path={rows}", code=2).split())
    command = said.partition("see rows with python -m mens_exp ")[2]
    shown = typed(*shlex.split(command), "model=tiny_llama", code=0)
    assert "40 pair rows" in shown


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=inspect"], "nothing to inspect"),
        (["task=inspect", "path=base"], "works only with"),
        (
            ["task=inspect", "path=latest", "inspect.replay_steps=2"],
            "no effect with inspect.replay=false",
        ),
        (["task=inspect", "path=latest", "trainer.accelerator=cpu"], "with inspect.verify=false"),
        (["task=merge", "path=latest", "inspect.verify=true"], "no effect with task=merge"),
        (["task=evaluate", "path=latest", "inspect.replay=true"], "no effect with task=evaluate"),
        (
            ["task=inspect", "path=latest", "inspect.replay=true", "inspect.replay_steps=0"],
            "out of range",
        ),
    ],
    ids=str,
)
def test_a_command_that_asks_for_nothing_is_refused(typed, overrides, message):
    """Exit code 2, before a run directory is created."""
    assert message in typed(*overrides, code=2)


def test_only_a_run_can_be_replayed(finished, typed):
    """An adapter has no steps that could be replayed."""
    said = typed("task=inspect", f"path={finished.adapter}", "inspect.replay=true", code=2)
    assert "no run whose steps" in said


def test_values_that_are_not_finite_are_refused(finished, typed, tmp_path):
    """A NaN in one matrix is refused, and its layer named."""
    from safetensors.numpy import load_file, save_file

    place = shutil.copytree(finished.adapter, tmp_path / "adapter")
    tensors = load_file(place / "adapter.safetensors")
    tensors["l1.up.lora_b"][0, 0] = np.nan
    save_file(tensors, place / "adapter.safetensors")
    said = typed("task=inspect", f"path={place}", code=2)
    assert "l1.up" in said
    assert "not finite" in said


def test_the_json_and_the_table_are_of_one_record(finished, inspect, tmp_path):
    """The file has the format's name and version, and its keys are sorted."""
    inspect(finished.path)
    text = json.loads((tmp_path / "here" / "inspection_0" / "inspection.json").read_text("utf-8"))
    assert (text["format"], text["version"]) == ("mens_exp_inspection", 3)
    assert list(text) == sorted(text)


def test_a_run_whose_process_was_killed_is_interrupted(finished, typed, tmp_path):
    """The manifest of a killed process says started, as that of a run at work does."""
    run = RunDir(shutil.copytree(finished.path, tmp_path / "killed"))
    manifest = Manifest.read(run.manifest)
    manifest.status = Status.STARTED
    manifest.write(run.manifest)
    with run_lock(run.lock):
        assert "a training run, started" in typed("task=inspect", f"path={run.path}")
        assert not load_run(run.path).is_interrupted
        taken = json.loads(run.lock.read_text("utf-8"))
    run.lock.write_text(json.dumps(taken | {"started": 1.0}), "utf-8")
    said = " ".join(typed("task=inspect", f"path={run.path}").split())
    assert "a training run, interrupted: its process was killed" in said
    assert "continue it with resume=" in said
    assert load_run(run.path).is_interrupted
    assert "interrupted" in load_run(run.path)._repr_html_()
