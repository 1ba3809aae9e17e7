from __future__ import annotations

import json
import shutil
import tarfile

import pytest

from mens_exp import cli
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.errors import MensError
from mens_exp.export.bundle import pack, packing_problems, path_problems, secret_problems, verify


def unpack(archive, place):
    with tarfile.open(archive) as tar:
        tar.extractall(place, filter="data")
    (folder,) = place.iterdir()
    return RunDir(folder)


def problems(run, *, allow=False):
    found = packing_problems(run, checkpoints=False, allow_absolute_paths=allow)
    return [str(problem) for problem in found]


@pytest.fixture
def copied(portable, tmp_path):
    return RunDir(shutil.copytree(portable.path, tmp_path / "run"))


def test_the_command_writes_one_archive_and_records_its_hash(portable, tmp_path, monkeypatch):
    """The archive is in the run directory of the export, and the manifest has its digest."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["task=export", f"path={portable.path}", "hydra.run.dir=out"]) == 0
    record = Manifest.read(tmp_path / "out" / "manifest.json")
    assert record.results["bundle"] == "run.tar.gz"
    assert record.results["bundle_sha256"] == sha256_file(tmp_path / "out" / "run.tar.gz")


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("a_run", "already exists and is not an earlier bundle"),
        ("notes.txt", "already exists and is not an earlier bundle"),
        ("cut.tar.gz", "already exists and is not an earlier bundle"),
        ("notes.txt/b.tar.gz", "is inside a file"),
    ],
)
def test_an_archive_replaces_nothing_but_a_bundle(
    portable, tmp_path, monkeypatch, capsys, out, said
):
    """Files of the user's, and directories, are refused before anything is packed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_run").mkdir()
    (tmp_path / "notes.txt").write_text("mine", "utf-8")
    command = ["task=export", f"path={portable.path}", "logger=none"]
    for _ in range(2):  # the second one replaces the first
        assert cli.main([*command, "out=b.tar.gz"]) == 0
    (tmp_path / "cut.tar.gz").write_bytes((tmp_path / "b.tar.gz").read_bytes()[:40])
    capsys.readouterr()
    assert cli.main([*command, f"out={out}"]) == 2
    assert f"out: {said}" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text("utf-8") == "mine"


def test_two_packings_are_the_same_bytes(portable, tmp_path):
    """Entries have no time and no owner, and a fixed order."""
    for name in ("a", "b"):
        pack(portable, tmp_path / f"{name}.tar.gz", checkpoints=False)
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        entries = tar.getmembers()
    assert {(e.mtime, e.uid, e.gid, e.uname, e.mode) for e in entries} == {(0, 0, 0, "", 0o644)}
    assert all(e.name.startswith("run/") and ".." not in e.name for e in entries)


def test_unpacked_it_is_the_same_run(portable, tmp_path):
    """Every file has its listed digest; checkpoints are packed only on request."""
    hashes = pack(portable, tmp_path / "b.tar.gz", checkpoints=False)
    run = unpack(tmp_path / "b.tar.gz", tmp_path / "there")
    verify(run)
    listing = json.loads(run.bundle.read_text("utf-8"))
    assert listing["files"] == hashes
    assert {name: sha256_file(run.path / name) for name in hashes} == hashes
    assert Manifest.read(run.manifest) == Manifest.read(portable.manifest)
    assert {
        "manifest.json",
        "config.yaml",
        "telemetry.jsonl",
        "report.html",
        "MODEL_CARD.md",
        "adapter/adapter.safetensors",
        "adapter/peft/adapter_config.json",
    } <= hashes.keys()
    assert not run.checkpoints.exists()
    with_states = pack(portable, tmp_path / "c.tar.gz", checkpoints=True)
    states = {"checkpoints/step_00000001.ckpt", "checkpoints/sha256.json"}
    assert with_states.keys() - hashes.keys() == states


def test_a_colleague_scores_the_unpacked_run(portable, tmp_path, monkeypatch):
    """`evaluate` works in another directory, with the same weights and rows."""
    pack(portable, tmp_path / "b.tar.gz", checkpoints=False)
    run = unpack(tmp_path / "b.tar.gz", tmp_path / "there")
    monkeypatch.chdir(run.path.parent)
    scored = ["suite.items=2", "suite.max_new_tokens=100", "hydra.run.dir=scored"]
    assert cli.main(["task=evaluate", "logger=none", "path=run", "trainer=cpu", *scored]) == 0
    assert (run.path.parent / "scored" / "scorecard.json").is_file()


@pytest.mark.parametrize("task", ["evaluate", "chat"])
def test_an_altered_bundle_is_refused(
    portable,
    tmp_path,
    monkeypatch,
    capsys,
    task,
):
    """Exit code 2, before anything in the bundle is loaded."""
    pack(portable, tmp_path / "b.tar.gz", checkpoints=False)
    run = unpack(tmp_path / "b.tar.gz", tmp_path / "there")
    weights = run.adapter / "adapter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    monkeypatch.chdir(run.path.parent)
    assert cli.main([f"task={task}", "path=run"]) == 2
    said = capsys.readouterr().err
    assert "adapter.safetensors: has changed since it was packed" in said
    assert [path.name for path in run.path.parent.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda listing: {**listing, "version": 2}, "is of another version"),
        (lambda listing: {**listing, "format": "x"}, "is not a list of a bundle"),
        (lambda listing: {**listing, "files": {"../a": "0"}}, "points outside the bundle"),
        (lambda listing: {**listing, "files": {"gone.json": "0"}}, "no such file"),
        (lambda listing: {**listing, "files": ["gone.json"]}, "files: .*an object"),
        (lambda listing: {**listing, "files": {"gone.json": 0}}, "files.gone.json: .*a string"),
        (lambda listing: {"format": listing["format"], "version": 1}, "files: .*an object"),
        (lambda _: ["mens_exp_bundle"], "is not a list of a bundle"),
    ],
)
def test_a_list_that_is_wrong_is_refused(portable, tmp_path, change, said):
    """The list's format, version and paths are checked before the files."""
    pack(portable, tmp_path / "b.tar.gz", checkpoints=False)
    run = unpack(tmp_path / "b.tar.gz", tmp_path / "there")
    listing = json.loads(run.bundle.read_text("utf-8"))
    run.bundle.write_text(json.dumps(change(listing)), encoding="utf-8")
    with pytest.raises(MensError, match=said):
        verify(run)


def added_file(run):
    (run.path / "events.jsonl").write_text("")


def added_link(run):
    (run.path / "events.jsonl").symlink_to(run.path.parent / "nowhere")


def linked_file(run):
    """Replace a file by a link to the same bytes outside the bundle."""
    outside = run.path.parent / "outside.json"
    run.plan.rename(outside)
    run.plan.symlink_to(outside)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (added_file, r"events\.jsonl: was not packed"),
        (added_link, r"events\.jsonl: was not packed"),
        (
            linked_file,
            r"plan\.json: has changed since it was packed.*a link that points outside the bundle",
        ),
    ],
)
def test_what_the_list_does_not_have_is_refused(portable, tmp_path, change, said):
    """The sync record, written after packing, is not part of the bundle."""
    pack(portable, tmp_path / "b.tar.gz", checkpoints=False)
    run = unpack(tmp_path / "b.tar.gz", tmp_path / "there")
    run.sync.write_text("{}")
    verify(run)
    change(run)
    with pytest.raises(MensError, match=said):
        verify(run)


def test_a_run_that_was_changed_is_not_packed(copied):
    """The adapter no longer has the digest in the manifest."""
    assert problems(copied) == []
    weights = copied.adapter / "adapter.safetensors"
    weights.write_bytes(weights.read_bytes() + b"x")
    (said,) = problems(copied)
    assert "has changed since the run ended" in said


def test_absolute_paths_are_refused_unless_asked_for(finished):
    """Each is reported with its key; allow_absolute_paths packs the run anyway."""
    said = problems(finished)
    assert any("config.yaml: data.path" in one for one in said)
    assert all("absolute path of this machine" in one for one in said)
    assert problems(finished, allow=True) == []


def test_what_is_an_absolute_path_and_what_is_not(tmp_path):
    """POSIX roots, Windows drives and ~; not a relative path, a URL, a unit or a phrase."""
    texts = {
        "a": "/home/me/rows.jsonl",
        "b": "data.path=/srv/x/rows.jsonl",
        "c": "C:\\Users\\me\\rows.jsonl",
        "d": "~/rows/a.jsonl",
        "e": "rows/a.jsonl",
        "f": "https://host/a/b",
        "g": "tokens/s",
        "h": "/",
        "i": "and/or",
        "j": "a text that names /usr/lib inside a sentence.",
    }
    file = tmp_path / "x.json"
    file.write_text(json.dumps(texts), encoding="utf-8")
    found = {str(p.where).rpartition(" ")[2] for p in path_problems([("x.json", file)])}
    assert found == {"a", "b", "c", "d"}


def test_a_credential_keeps_a_run_here_and_is_not_repeated(copied):
    """The message names the file, but does not repeat the credential."""
    secret = "hf_" + "a1B2" * 9
    copied.model_card.write_text(f"see {secret}", encoding="utf-8")
    (said,) = problems(copied)
    assert "contains what looks like a credential" in said
    assert secret not in said
    assert list(secret_problems([("config.yaml", copied.config)])) == []
