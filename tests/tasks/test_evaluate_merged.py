"""The command task=evaluate, on what task=merge wrote."""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file, save_file

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Scorecard, read_item_events
from mens_exp.tasks.evaluate import subject_named

SUITE = ["suite=heldout_syntax", "suite.items=2", "suite.max_new_tokens=40"]
EXACT = ["backend=lora", "quant.compute_dtype=f32", "optim.lr=0.1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def trained(train_in, place):
    return train_in(place / "trained", *EXACT, *SUITE)


@pytest.fixture(scope="module")
def merged(trained, place):
    command = [
        "task=merge",
        "parity.tokens=64",
        "logger=none",
        f"path={trained.path}",
        f"hydra.run.dir={place}/merged",
    ]
    assert cli.main(command) == 0
    return RunDir(place / "merged")


def evaluated(path, own, *overrides):
    return cli.main(
        ["task=evaluate", "logger=none", f"path={path}", *SUITE, *overrides, f"hydra.run.dir={own}"]
    )


def test_merged_weights_answer_as_the_run_did_that_was_merged(trained, merged, tmp_path):
    """Without its base, on the rows that the run held out, the merge answers as the run did."""
    assert evaluated(merged.merged, tmp_path / "own") == 0
    own = RunDir(tmp_path / "own")
    assert list(Scorecard.read(own.scorecard).conditions) == ["tuned"]
    before = [one for one in read_item_events(trained.events) if one["condition"] == "tuned"]
    for told in ("item_id", "prompt", "completion"):
        shown = [one[told] for one in read_item_events(own.events)]
        assert shown == [one[told] for one in before]
    inputs = Manifest.read(own.manifest).inputs
    assert inputs["subject"] == str(merged.path)
    assert inputs["trained"] == str(trained.path)


def test_weights_that_the_merge_did_not_write_are_refused(merged, trained, place, tmp_path, capsys):
    """One changed number in the weights is enough to be refused."""
    other = place / "other"
    shutil.copytree(merged.path, other)
    (shard,) = (other / "merged").glob("*.safetensors")
    tensors = load_file(shard)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, shard, metadata={"format": "pt"})
    assert evaluated(other, tmp_path / "own") == 2
    assert "has changed since its run wrote it" in capsys.readouterr().err


def test_a_merge_without_a_model_or_without_its_run_is_refused(merged, tmp_path, capsys):
    """Both are refused before a run directory is created; vLLM, too, has no adapter to load."""
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(merged.manifest, bare / "manifest.json")
    assert evaluated(bare, tmp_path / "own") == 2
    assert "the merge did not leave a usable model" in capsys.readouterr().err
    lost = tmp_path / "lost"
    shutil.copytree(merged.path, lost)
    manifest = Manifest.read(lost / "manifest.json")
    manifest.inputs |= {"adapter": "/gone/adapter", "adapter_sha256": "ad" * 32}
    manifest.write(lost / "manifest.json")
    assert evaluated(lost, tmp_path / "own") == 2
    assert "the run that trained the merged adapter was not found" in capsys.readouterr().err
    code = evaluated(merged.path, tmp_path / "own", "eval.engine=vllm")
    assert code in (2, 3)  # 3 where vLLM is missing too
    assert "but this model is merged" in capsys.readouterr().err
    assert not (tmp_path / "own").exists()


def test_a_merge_elsewhere_still_finds_its_run_by_the_adapters_hash(merged, trained, place):
    """The recorded path is gone, but the run beside it has the adapter with the recorded hash."""
    moved = place / "moved"
    shutil.copytree(merged.path, moved)
    manifest = Manifest.read(moved / "manifest.json")
    manifest.inputs["adapter"] = "/gone/adapter"
    manifest.write(moved / "manifest.json")
    found = subject_named(str(moved))
    assert found.run is not None
    assert found.run.path == trained.path
    assert found.merged == moved / "merged"


def test_a_model_that_was_written_elsewhere_is_found_from_its_merge(
    merged, place, tmp_path, monkeypatch
):
    """A relative `out=` is resolved against the directory in which the merge was started."""
    apart = place / "apart"
    apart.mkdir()
    shutil.copytree(merged.merged, tmp_path / "mine")
    manifest = Manifest.read(merged.manifest)
    manifest.results["out"] = "mine"
    manifest.write(apart / "manifest.json")
    monkeypatch.chdir(tmp_path)
    found = subject_named(str(apart)).merged
    assert found is not None
    assert found.resolve() == (tmp_path / "mine").resolve()


def test_a_merged_arm_beside_one_with_its_adapter_is_confounded(study, compare):
    """Merged weights do not answer as base plus adapter do; two merged arms are comparable."""
    root = study(seeds=[1])
    scored = study("scored", seeds=[1], of=root)
    for number, confounded in ((0, ["another content of scored_model"]), (1, [])):
        run = RunDir(scored / f"{number}_scored")
        manifest = Manifest.read(run.manifest)
        manifest.inputs |= {"subject": "/gone/merge", "trained": str(root / f"{number}_runs")}
        manifest.write(run.manifest)
        record = compare(f"[{root},{scored}]")
        assert [one["confounded_by"] for one in record.contrasts] == [confounded]
        assert {one["scored_by"] for one in record.runs} == {
            str(scored / "0_scored"),
            str(scored / "1_scored"),
        }


def test_what_scored_a_base_alone_is_left_out_by_name(study, compare):
    """The evaluation of a base alone belongs to no training run."""
    root = study(seeds=[1])
    run = RunDir(root / "base")
    run.path.mkdir()
    manifest = Manifest.read(root / "0_runs" / "manifest.json")
    manifest.task, manifest.status = "evaluate", Status.SUCCEEDED
    manifest.inputs = {"subject": "base"}
    manifest.write(run.manifest)
    record = compare(root)
    assert record.left_out == {str(run.path): "it scored no training run"}
