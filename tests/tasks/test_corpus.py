from __future__ import annotations

import subprocess

from mens_exp import cli
from mens_exp.artifacts.corpus_record import CorpusRecord
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.data import JsonlData
from mens_exp.config.validate import overrides_not_read
from mens_exp.corpus.source import load_rows

SOURCE = '''
def add{number}(a, b):
    """Add {number} times."""
    total = a + b
    return total * {number}
'''


def project(path):
    """Make a git checkout of twelve files, and return it."""
    path.mkdir()
    for number in range(12):
        (path / f"m{number}.py").write_text(SOURCE.format(number=number), "utf-8")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        git(path, *identity, *arguments)
    return path


def git(path, *arguments):
    command = ["git", "-C", str(path), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def make(tmp_path, number, *more):
    return cli.main(
        [
            "task=corpus",
            "corpus.steps=[extract,validate,split]",
            f"corpus.input={tmp_path / 'project'}",
            f"corpus.output={tmp_path / 'out'}",
            f"hydra.run.dir={tmp_path / f'run-{number}'}",
            *more,
        ]
    )


def test_a_corpus_is_made_recorded_and_not_made_twice(tmp_path, capsys):
    """The rows are those of a commit, split by file; a second run finds nothing to do."""
    path = project(tmp_path / "project")
    assert make(tmp_path, 1, "corpus.extract.commit=HEAD") == 0
    first = capsys.readouterr().out
    assert f"data.path={tmp_path}/out/03-split/train.jsonl" in first.replace("\n", "")
    head = git(path, "rev-parse", "HEAD")
    run = RunDir(tmp_path / "run-1")
    manifest = Manifest.read(run.manifest)
    assert manifest.status is Status.SUCCEEDED
    assert list(manifest.inputs["corpus"]) == ["project"]
    assert sum(manifest.results["rows"].values()) == 12
    assert [step["why"] for step in manifest.facts["steps"]] == ["new"] * 3
    assert head in run.config.read_text("utf-8")  # the commit that the name resolved to
    index = (tmp_path / "out/corpus.json").read_bytes()
    assert make(tmp_path, 2, "corpus.extract.commit=HEAD") == 0
    assert capsys.readouterr().out.count("already done") == 3
    assert (tmp_path / "out/corpus.json").read_bytes() == index
    assert CorpusRecord.read(tmp_path / "out/corpus.json").inputs == manifest.inputs["corpus"]
    # data=jsonl accepts the rows, and no row is on both sides.
    train, val = (tmp_path / f"out/03-split/{side}.jsonl" for side in ("train", "val"))
    rows = load_rows(JsonlData(path=str(train), val_path=str(val)), tmp_path)
    assert len(rows.train) + len(rows.heldout) == len(train.read_bytes().splitlines())
    assert len(rows.val) == len(val.read_bytes().splitlines()) > 0


def test_a_failing_step_keeps_the_ones_before_it(tmp_path, capsys):
    """Exit code 2 names the failed step; a later run reuses the steps before it."""
    project(tmp_path / "project")
    mixed = ["corpus.steps=[extract,mix]", "corpus.mix.by=project", "corpus.mix.weights={other:1}"]
    assert make(tmp_path, 1, *mixed) == 2
    assert (
        "corpus.mix.weights.other: a weight does not belong to any source"
        in capsys.readouterr().err
    )
    assert Manifest.read(RunDir(tmp_path / "run-1").manifest).status is Status.FAILED
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["01-extract"]
    assert make(tmp_path, 2) == 0
    assert "already done" in capsys.readouterr().out


def test_a_cancelled_corpus_goes_on_with_the_same_command(tmp_path, capsys, monkeypatch):
    """The same command continues, as there is no training state to resume."""

    def interrupted(*_):
        raise KeyboardInterrupt

    project(tmp_path / "project")
    monkeypatch.setattr("mens_exp.corpus.steps.pipeline.run_steps", interrupted)
    assert make(tmp_path, 1) == 130
    assert "Go on with: the same command" in capsys.readouterr().err


def test_what_cannot_be_made_is_refused_before_a_run_is_opened(tmp_path, capsys):
    """Refused: an input that does not exist, and a directory that someone else uses."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.md").write_text("mine", "utf-8")
    assert make(tmp_path, 1) == 2
    err = capsys.readouterr().err
    assert "no such directory or file" in err
    assert "contains something else" in err
    assert not (tmp_path / "run-1").exists()


def test_what_a_killed_process_left_is_not_in_the_way(tmp_path, capsys):
    """The next command removes stale locks and temporary files of a killed process."""
    project(tmp_path / "project")
    out = tmp_path / "out"
    out.mkdir()
    (out / ".lock").write_text('{"pid": 1', "ascii")
    (out / "..lock.taking").write_bytes(b"")
    assert make(tmp_path, 1) == 0
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    (out / "taking").write_bytes(b"")
    assert make(tmp_path, 2) == 2
    assert "found     " + str(out) + ": taking" in capsys.readouterr().err


def test_settings_of_a_run_have_no_effect():
    """Settings of training are refused, as a corpus uses no model; its own are accepted."""
    (problem,) = overrides_not_read("corpus", ["lora.r", "corpus.split.by"])
    assert "lora.r: has no effect with task=corpus" in str(problem)
