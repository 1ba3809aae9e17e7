from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys

import psutil
import pytest

from mens_exp import cli
from mens_exp.artifacts.digest import sha256_bytes
from mens_exp.artifacts.host import run_lock
from mens_exp.artifacts.manifest import Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import Job, JobState, SweepDir, SweepRecord
from mens_exp.config.compose import compose, config_digest, from_yaml, to_yaml
from mens_exp.config.sweep import SlurmLauncher, launcher_values
from mens_exp.sweeps import resume
from mens_exp.sweeps.slurm_commands import Seen


@pytest.fixture
def begun(monkeypatch):
    """Replace the launcher, and record the sweep that it would run."""
    taken = []

    def finish(launcher):
        taken.append(launcher.record)
        return 0

    monkeypatch.setattr(resume, "finish", finish)
    return taken


def attempt(**more):
    made = {"pid": 2**22 + 1, "process_started": 1.0, "started_utc": "2026-11-20T05:58:01.123Z"}
    return {**made, "ended_utc": None, "exit_code": None, "peak_rss_bytes": None, **more}


def stored(record, path):
    for job in record.jobs:
        run = RunDir(path / job["directory"])
        run.path.mkdir(parents=True, exist_ok=True)
        for frozen in (run.config, run.job):
            frozen.touch()
    record.write(SweepDir(path).record)
    return path


def states(begun):
    return [str(job["state"]) for job in begun[0].jobs]


def refused(capsys, *arguments):
    assert cli.main(list(arguments)) == 2
    return " ".join(capsys.readouterr().err.split())


def test_every_job_stands_as_its_directory_says(make_sweep, write_manifest, tmp_path, begun):
    """Done, dead, failed, cancelled or never started, whatever the launcher had recorded."""
    running = {"state": JobState.RUNNING, "attempts": [attempt()]}
    record = make_sweep(running, running, {"state": JobState.FAILED, "reason": "r"}, {}, {})
    ends = [Status.SUCCEEDED, Status.STARTED, Status.FAILED, Status.CANCELLED]
    for job, status in zip(record.jobs, ends, strict=False):
        run = RunDir(tmp_path / job["directory"])
        write_manifest(run, status, results={"tuned_val_loss": 1.25})
        run.report.touch()
    assert cli.main([f"sweep.resume={stored(record, tmp_path)}"]) == 0
    assert states(begun) == ["succeeded", "waiting", "waiting", "waiting", "waiting"]
    assert begun[0].jobs[0]["results"] == {"tuned_val_loss": 1.25}
    assert begun[0].jobs[1]["attempts"][0]["ended_utc"] is not None


def test_a_done_job_is_verified(make_sweep, write_manifest, tmp_path, begun):
    """A job with changed files becomes failed, and the others still run."""
    record = make_sweep({"state": JobState.SUCCEEDED}, {"state": JobState.SUCCEEDED}, {})
    for job, content in zip(record.jobs, (b"{}", b"[]"), strict=False):
        run = RunDir(tmp_path / job["directory"])
        outputs = {"plan.json": sha256_bytes(b"{}")}
        write_manifest(run, Status.SUCCEEDED, outputs=outputs)
        run.plan.write_bytes(content)
        run.report.touch()
    assert cli.main([f"sweep.resume={stored(record, tmp_path)}"]) == 0
    assert states(begun) == ["succeeded", "failed", "waiting"]
    assert "plan.json has changed; move" in str(begun[0].jobs[1]["reason"])


def test_a_damaged_record_is_no_reason_to_begin_anew(make_sweep, tmp_path, begun):
    """The files may be all that is left of a long run."""
    record = make_sweep({})
    run = RunDir(tmp_path / record.jobs[0]["directory"])
    run.path.mkdir()
    run.manifest.write_text("{")
    assert cli.main([f"sweep.resume={stored(record, tmp_path)}"]) == 0
    assert states(begun) == ["failed"]
    assert "cannot be read" in str(begun[0].jobs[0]["reason"])


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("config.yaml", "config.yaml"),
        ("job.json", "job.json"),
        ("", "config.yaml and job.json"),
    ],
    ids=["config.yaml", "job.json", "all"],
)
def test_a_job_without_its_frozen_configuration_is_failed(make_sweep, tmp_path, begun, gone, said):
    """The directory may have been deleted by hand; the other jobs run."""
    record = make_sweep({"state": JobState.SUCCEEDED}, {})
    place = stored(record, tmp_path)
    path = tmp_path / record.jobs[0]["directory"]
    if gone:
        (path / gone).unlink()
    else:
        shutil.rmtree(path)
    assert cli.main([f"sweep.resume={place}"]) == 0
    assert states(begun) == ["failed", "waiting"]
    reason = str(begun[0].jobs[0]["reason"])
    assert reason.startswith(f"{said} of {path} are gone")
    assert "a new sweep may run this cell" in reason


def test_a_sweep_that_cannot_be_written_to_is_refused(make_sweep, tmp_path, capsys):
    """A directory is in place of the lock file, as if the disk were read-only."""
    place = stored(make_sweep({}), tmp_path)
    SweepDir(place).lock.mkdir()
    assert cli.main([f"sweep.resume={place}"]) == 3
    said = capsys.readouterr().err
    assert "the directory of the sweep cannot be written to" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "known by its lock"])
def test_a_process_at_work_is_waited_for(make_sweep, tmp_path, begun, noted):
    """A launcher may have died before it recorded the process that it started."""
    me = psutil.Process()
    ours = attempt(pid=me.pid, process_started=me.create_time())
    noted_job = {"state": JobState.RUNNING, "attempts": [ours]}
    record = make_sweep(noted_job if noted else {})
    run = RunDir(tmp_path / record.jobs[0]["directory"])
    run.path.mkdir()
    command = [f"sweep.resume={stored(record, tmp_path)}"]
    if noted:
        assert cli.main(command) == 0
    else:
        with run_lock(run.job_lock):
            assert cli.main(command) == 0
    assert states(begun) == ["running"]
    assert begun[0].jobs[0]["attempts"][-1]["pid"] == os.getpid()


def test_only_what_holds_for_the_rest_can_change(make_sweep, tmp_path, begun, capsys):
    """The number of jobs and retries may change; a seed or the number of threads may not."""
    place = stored(make_sweep({}, threads=3), tmp_path)
    may = ["hydra.launcher.n_jobs=2", "sweep.retries=5"]
    assert cli.main([f"sweep.resume={place}", *may]) == 0
    assert (begun[0].n_jobs, begun[0].retries, begun[0].threads) == (2, 5, 3)
    said = refused(capsys, f"sweep.resume={place}", "hydra.launcher.n_jobs=0")
    assert "hydra.launcher.n_jobs: out of range" in said
    for override in ("seed=3", "hydra.launcher.threads=1"):
        said = refused(capsys, f"sweep.resume={place}", override)
        assert "cannot change when a sweep continues" in said


@pytest.mark.parametrize(
    ("nodes", "queued", "said"),
    [
        ("1", ["7_0"], "jobs of the sweep are still in Slurm's queue"),
        ("null", [], "a sweep needs a number of nodes to continue"),
    ],
)
def test_other_nodes_are_refused(
    make_sweep, tmp_path, begun, monkeypatch, capsys, nodes, queued, said
):
    """A queued job would start with the number of nodes of its submission."""
    seen = {
        name: Seen(queue_id=name, number=0, state="PENDING", reason="None", exit_code=None)
        for name in queued
    }
    monkeypatch.setattr(resume, "queue_of", lambda _: seen)
    monkeypatch.setattr(resume, "executor_problems", lambda *_: [])
    settings = launcher_values(SlurmLauncher(nodes=2))
    place = stored(make_sweep({}, launcher="slurm", launcher_settings=settings), tmp_path)
    before = SweepDir(place).record.read_bytes()
    assert said in refused(capsys, f"sweep.resume={place}", f"hydra.launcher.nodes={nodes}")
    assert begun == []
    assert SweepDir(place).record.read_bytes() == before


@pytest.fixture
def of_two_nodes(make_sweep, tmp_path, monkeypatch):
    """A frozen sweep of two jobs on two nodes, which has not started."""
    monkeypatch.setattr(resume, "queue_of", lambda _: {})
    monkeypatch.setattr(resume, "executor_problems", lambda *_: [])
    settings = launcher_values(SlurmLauncher(nodes=2))
    record = make_sweep({}, {}, launcher="slurm", launcher_settings=settings)
    for number, job in enumerate(record.jobs):
        overrides = ["model=tiny_llama", "trainer=ddp", "trainer.devices=1", f"seed={number}"]
        overrides.append("trainer.num_nodes=2")
        [one] = compose([overrides])
        run = RunDir(tmp_path / job["directory"])
        run.path.mkdir(parents=True)
        run.config.write_text(to_yaml(one.values), "utf-8")
        job["config_digest"] = config_digest(one.values)
        Job(
            number=number,
            overrides=overrides,
            choices={},
            config_digest=job["config_digest"],
            code_sha256="0" * 64,
        ).write(run.job)
    record.write(SweepDir(tmp_path).record)
    return tmp_path


def frozen(place):
    """Return the numbers of nodes in each job's files, and whether all digests agree."""
    found = []
    for job in SweepRecord.read(SweepDir(place).record).jobs:
        run = RunDir(place / job["directory"])
        values, stored = from_yaml(run.config), Job.read(run.job)
        told = {job["config_digest"], stored.config_digest, config_digest(values)}
        nodes = [text for text in stored.overrides if text.startswith("trainer.num_nodes=")]
        found.append((values.trainer.num_nodes, nodes, len(told) == 1))
    return found


ONE, TWO = ((number, [f"trainer.num_nodes={number}"], True) for number in (1, 2))


@pytest.mark.parametrize("write", range(7))
def test_a_move_to_other_nodes_that_is_killed_is_completed(of_two_nodes, begun, monkeypatch, write):
    """Killed before any of the six writes, the next command completes it, without the number."""
    rename, done = os.replace, []

    def killed(source, target, **more):
        if len(done) == write:
            raise SystemExit
        done.append(target)
        rename(source, target, **more)

    command = [f"sweep.resume={of_two_nodes}"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with contextlib.suppress(SystemExit):
            cli.main([*command, "hydra.launcher.nodes=1"])
    assert len(done) == min(write, 6)
    assert cli.main(command) == 0
    assert frozen(of_two_nodes) == [ONE if write else TWO] * 2
    nodes = SweepRecord.read(SweepDir(of_two_nodes).record).launcher_settings["nodes"]
    assert nodes == (1 if write else 2)


def test_a_configuration_that_was_edited_is_not_frozen_anew(of_two_nodes, begun):
    """The job refuses it, because the record still has the original digest."""
    run = next(of_two_nodes.glob("0*"))
    text = RunDir(run).config.read_text("utf-8")
    RunDir(run).config.write_text(text.replace("seed: 0", "seed: 7"), "utf-8")
    assert cli.main([f"sweep.resume={of_two_nodes}"]) == 0
    assert [agrees for *_, agrees in frozen(of_two_nodes)] == [False, True]


def test_a_sweep_of_joblib_goes_on_with_local(make_sweep, make_search, tmp_path, begun, capsys):
    """As many jobs run at a time as at launch; one message says so, and the record keeps it."""
    fixed = ["seed=3", "hydra/launcher=joblib", "hydra.launcher.backend=loky"]
    settings = {"n_jobs": -1, "backend": "loky", "threads": None}
    place = stored(
        make_sweep({}, launcher="joblib", launcher_settings=settings, n_jobs=5), tmp_path
    )
    path = SweepDir(place).record
    found = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**found, "version": 1}), "utf-8")
    assert cli.main([f"sweep.resume={place}"]) == 0
    assert (
        "launched with hydra/launcher=joblib and continues with hydra/launcher=local"
        in " ".join(capsys.readouterr().err.split())
    )
    record = begun[0]
    assert (record.launcher, record.n_jobs) == ("local", 5)
    assert record.launcher_settings == {"n_jobs": -1, "threads": None}
    assert cli.main([f"sweep.resume={place}", "hydra.launcher.n_jobs=2"]) == 0
    assert (begun[1].n_jobs, begun[1].notes) == (2, record.notes)
    search = make_search(fixed=fixed)
    path.write_text(json.dumps({**found, "version": 1, "search": search}, default=str), "utf-8")
    read = SweepRecord.read(path).search
    assert read is not None
    assert read["fixed"] == ["seed=3", "hydra/launcher=local"]


def test_a_sweep_of_slurm_keeps_its_launcher_under_its_new_name(
    make_sweep, tmp_path, begun, monkeypatch
):
    """Its settings stay, and jobs are looked up in the queue instead of among processes."""
    monkeypatch.setattr(resume, "executor_problems", lambda *_: [])
    running = {"state": JobState.RUNNING, "attempts": [attempt(pid=os.getpid())]}
    running["attempts"][0]["process_started"] = psutil.Process().create_time()
    settings = {"timeout_min": 7, "array_parallelism": 3}
    named = {"launcher": "submitit_slurm", "launcher_settings": settings}
    place = stored(make_sweep(running, **named), tmp_path)
    path = SweepDir(place).record
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "version": 1}), "utf-8")
    assert cli.main([f"sweep.resume={place}", "hydra.launcher.array_parallelism=5"]) == 0
    record = begun[0]
    assert (record.launcher, record.n_jobs) == ("slurm", 5)
    assert record.launcher_settings == {"timeout_min": 7, "array_parallelism": 5}
    assert states(begun) == ["waiting"]


@pytest.mark.parametrize(
    "broken", [{"launcher": ["joblib"]}, {"launcher_settings": 3}, {"search": {}}, {"notes": 1}]
)
def test_a_damaged_record_of_joblib_is_refused(make_sweep, tmp_path, capsys, broken):
    """The message names the damaged key, as for a current record."""
    place = stored(make_sweep({}, launcher="joblib"), tmp_path)
    path = SweepDir(place).record
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "version": 1, **broken}))
    assert next(iter(broken)) in refused(capsys, f"sweep.resume={place}")


def test_other_code_is_refused_unless_told(make_sweep, tmp_path, begun, capsys):
    """Accepting it leaves a note."""
    place = stored(make_sweep({}, code_sha256="0" * 64), tmp_path)
    said = refused(capsys, f"sweep.resume={place}")
    assert "the code of mens_exp has changed since the sweep was launched" in said
    assert "sweep.changes=accept" in said
    assert cli.main([f"sweep.resume={place}", "sweep.changes=accept"]) == 0
    assert begun[0].changes == "accept"
    assert "other code" in begun[0].notes[0]


def test_what_is_no_sweep_is_refused(make_sweep, tmp_path, capsys):
    """A directory without a record, no directory, and a record with a path outside of it."""
    assert "no sweep.json in this directory" in refused(capsys, f"sweep.resume={tmp_path}")
    assert "no such directory" in refused(capsys, f"sweep.resume={tmp_path / 'gone'}")
    record = make_sweep({})
    text = stored(record, tmp_path) / "sweep.json"
    text.write_text(text.read_text().replace("0_job", "../0_job"))
    assert "below the sweep's own directory" in refused(capsys, f"sweep.resume={tmp_path}")


def test_two_launchers_do_not_share_a_sweep(make_sweep, tmp_path, capsys):
    """The second one is refused while the first one is running."""
    place = stored(make_sweep({}), tmp_path)
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as other:
        started = psutil.Process(other.pid).create_time()
        SweepDir(place).lock.write_text(f'{{"pid": {other.pid}, "started": {started}}}')
        said = refused(capsys, f"sweep.resume={place}")
    assert f"process {other.pid}" in said
