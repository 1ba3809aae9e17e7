"""A run's files that are no longer what it wrote: every command that reads them refuses them."""

from __future__ import annotations

import json
import shutil

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir

V3, PEFT = "adapter/adapter.safetensors", "adapter/peft/adapter_model.safetensors"


def flip(path):
    """Flip the sign of the last value: the file loads as before."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x80
    path.write_bytes(bytes(content))


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of a finished run, to be spoiled."""
    return RunDir(shutil.copytree(finished.path, tmp_path / "copied"))


def refused(capsys, tmp_path, *command, code=2):
    """Type a command; return what it said on standard error."""
    assert cli.main([*command, f"hydra.run.dir={tmp_path / 'own'}"]) == code
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "command",
    [
        ("task=merge", "logger=none", "path={run}"),
        ("task=export", "path={run}", "format=peft"),
        ("task=export", "path={run}", "format=bundle"),
        ("task=evaluate", "path={run}", "suite=heldout_syntax", "suite.items=1", "logger=none"),
        ("task=chat", "path={run}", "prompt=hello"),
        ("model=tiny_llama", "trainer=cpu", "logger=none", "suite=none", "lora.init_from={run}"),
    ],
    ids=["merge", "peft", "bundle", "evaluate", "chat", "continue"],
)
def test_a_flipped_adapter_is_refused(copied, capsys, tmp_path, command):
    """One sign of one matrix is another; its hash contradicts the manifest."""
    flip(copied.path / V3)
    said = refused(capsys, tmp_path, *(text.format(run=copied.path) for text in command))
    assert f"{V3}: " in said
    assert "is not what" in said


def test_a_flipped_peft_directory_of_a_run_is_not_continued_from(copied, capsys, tmp_path):
    """It is read on its own, and belongs to a run all the same."""
    flip(copied.path / PEFT)
    command = ["model=tiny_llama", "trainer=cpu", "logger=none", "suite=none"]
    said = refused(capsys, tmp_path, *command, f"lora.init_from={copied.peft}")
    assert f"{PEFT}: is not what its run wrote" in said


def test_a_peft_directory_of_nobody_is_continued_from_and_its_hash_recorded(
    copied, tmp_path, train_in, rows_file
):
    """There is no manifest to contradict: what was read is what is recorded."""
    theirs = shutil.copytree(copied.peft, tmp_path / "theirs")
    flip(theirs / "adapter_model.safetensors")
    run = train_in(tmp_path / "run", f"lora.init_from={theirs}")
    recorded = Manifest.read(run.manifest).inputs["init_from"]
    original = json.loads(copied.manifest.read_text("utf-8"))["outputs"][PEFT]
    assert recorded["adapter_sha256"] != original
    assert recorded["path"] == str(theirs)


@pytest.mark.parametrize("name", ["adapter/adapter_manifest.json", "config.yaml"])
def test_an_edited_record_of_the_adapter_is_refused(copied, capsys, tmp_path, name):
    """Another alpha or another base would be merged."""
    file = copied.path / name
    file.write_text(file.read_text("utf-8") + "\n", "utf-8")
    said = refused(capsys, tmp_path, "task=merge", "logger=none", f"path={copied.path}")
    assert f"{name}: is not what its run wrote" in said


def test_a_run_at_work_may_change_its_files(copied, capsys, tmp_path):
    """Its manifest states hashes of an earlier attempt; a merge then refuses for that alone."""
    manifest = Manifest.read(copied.manifest)
    manifest.status = Status.STARTED
    manifest.write(copied.manifest)
    flip(copied.path / V3)
    assert cli.main(["task=inspect", f"path={copied.adapter}"]) == 0


def test_merged_weights_that_were_flipped_are_not_served(finished, tmp_path, capsys):
    """Before a server starts; the manifest of the merge beside them says otherwise."""
    run = tmp_path / "merge"
    assert (
        cli.main(["task=merge", "logger=none", f"path={finished.path}", f"hydra.run.dir={run}"])
        == 0
    )
    flip(run / "merged" / "model.safetensors")
    said = refused(capsys, tmp_path, "task=serve", f"path={run / 'merged'}")
    assert "merged/model.safetensors: is not what its run wrote" in said
