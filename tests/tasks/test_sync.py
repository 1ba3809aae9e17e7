"""The command task=sync, against a stand-in for the W&B service on loopback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Destination, Manifest, Status, SyncRecord, delivery_at
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import SweepRecord
from mens_exp.artifacts.telemetry import Telemetry
from mens_exp.config.promotion import StudyConfig
from mens_exp.config.task import SyncConfig
from mens_exp.sweeps.study_request import settings_of
from mens_exp.tasks.study_runs import named_paths
from mens_exp.tasks.sync import parcels
from mens_exp.training.wandb_names import agent_inputs

STEPS = 3


@pytest.fixture
def sweep(study, sweep_over):
    """Two arms of one seed, three steps of telemetry each, and a job that failed."""
    root = study(seeds=[1])
    for run in (RunDir(root / f"{number}_runs") for number in (0, 1)):
        with Telemetry(run.telemetry, clock=lambda: 1_700_000_000.0) as telemetry:
            for step in range(1, STEPS + 1):
                telemetry.emit("step", {"step": step, "train/loss": 2.0 - step / 4})
        run.adapter.mkdir()
        (run.adapter / "adapter.safetensors").write_bytes(run.path.name.encode())
    return sweep_over(root, 1)


@pytest.fixture
def sync(tmp_path):
    """Run task=sync on a path, in a new directory each time."""
    numbers = iter(range(99))

    def command(path, *overrides):
        own = f"hydra.run.dir={tmp_path}/sync_{next(numbers)}"
        return cli.main(["task=sync", f"path={path}", own, *overrides])

    return command


def steps(service, run):
    """Rows of a run's history as the service received them."""
    rows = service.runs[run].history
    return [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]


def test_a_sweep_is_sent_in_order_with_names_and_lineage(sweep, sync, wandb_service):
    """Runs are sent first, then the sweep as one run; a second command sends nothing."""
    assert sync(sweep.path) == 0
    assert wandb_service.unknown == []
    assert list(wandb_service.runs) == ["runs_0_runs", "runs_1_runs", "runs_sweep"]
    run = wandb_service.runs["runs_1_runs"]
    assert (run.project, run.group, run.job_type) == ("mens_exp", "runs", "train")
    assert run.tags == ["quant.double_quant=false", "seed=1"]
    assert run.display_name == "double_quant=false seed1 #1 tiny_llama qlora"
    assert run.settings["quant"]["double_quant"] is False
    assert run.exit_code == 0
    assert steps(wandb_service, "runs_1_runs") == [(1, 1.75), (2, 1.5), (3, 1.25)]
    assert {row["_timestamp"] for row in run.history} == {1_700_000_000}
    assert run.summary["tuned/val_loss"] == pytest.approx(1.91)
    assert wandb_service.lineage >= {
        ("base-bbbbbbbbbbbb", "runs_0_runs"),
        ("runs_0_runs", "adapter-runs_0_runs"),
        ("runs_0_runs", "scorecard-runs_0_runs"),
        ("scorecard-runs_0_runs", "runs_sweep"),
        ("scorecard-runs_1_runs", "runs_sweep"),
        ("runs_sweep", "comparison-runs"),
    }
    assert all(one.state == "COMMITTED" for one in wandb_service.artifacts.values())
    wandb_service.operations.clear()
    assert sync(sweep.path) == 0
    assert wandb_service.operations == []


def test_the_sweep_is_one_run_with_its_tables_and_drawings(sweep, sync, wandb_service):
    """The cells have factors, KPIs, cost and state, and the drawings are those of sweep.html."""
    assert sync(sweep.path) == 0
    run = wandb_service.runs["runs_sweep"]
    assert (run.job_type, run.group) == ("sweep", "runs")
    (row,) = run.history
    assert {"cells", "predictions", "verdicts", "arms", "sweep"} <= row.keys()
    assert {"parallel_coordinates", "forest"} <= row.keys()
    cells = json.loads(run.files[row["cells"]["path"]])
    assert cells["columns"][:4] == ["cell", "quant.double_quant", "seed", "status"]
    assert [line[:4] for line in cells["data"]] == [
        [0, "true", "1", "succeeded"],
        [1, "false", "1", "succeeded"],
        [2, "false", "9", "failed"],
    ]
    drawn = run.files[row["parallel_coordinates"]["path"]].decode()
    assert drawn.count('class="cell"') == 3
    items = json.loads(run.files[row["predictions"]["path"]])
    assert items["columns"][3:7] == ["prompt", "base", "tuned", "reference"]
    assert {"base/parse_rate", "tuned/parse_rate", "base/error", "tuned/error"} <= {
        *items["columns"]
    }
    assert {"tuned/val_loss", "tuned/parse_rate", "train_s"} <= {*cells["columns"]}
    assert len(items["data"]) == 8
    assert (run.summary["succeeded"], run.summary["failed"]) == (2, 1)


def test_a_study_is_named_on_each_of_its_runs(sweep, sync, wandb_service):
    """Its hypothesis is in the notes and its name in the tags, on the sweep's own run too."""
    record = SweepRecord.read(sweep.record)
    settings = settings_of(StudyConfig(hypothesis="It is lower.", seeds=[1]))
    record.study = {
        "name": "ranks",
        "sha256": "0" * 64,
        "settings": settings,
        "factors": ["quant.double_quant"],
        "ledger": "ledger.jsonl",
        "entry": 1,
        "entry_sha256": "0" * 64,
        "registered_utc": "2026-11-20T05:58:01.123Z",
        "later": [],
        "stopped": None,
        "comparison": None,
    }
    record.write(sweep.record)
    assert sync(sweep.path) == 0
    runs = wandb_service.runs.values()
    assert [one.name for one in runs] == ["runs_0_runs", "runs_1_runs", "runs_sweep"]
    assert {one.notes for one in runs} == {"It is lower."}
    assert all(one.tags[0] == "study=ranks" for one in runs)


def test_a_service_with_errors_ends_it_and_the_next_command_sends_the_rest_once(
    sweep,
    sync,
    wandb_service,
    capsys,
):
    """The second run's artifacts are refused after its rows arrived, which are not sent twice."""
    wandb_service.refuses = lambda name: (
        name == "CommitArtifact" and "runs_1_runs" in wandb_service.runs
    )
    assert sync(sweep.path, "sync.timeout_s=8") == 3
    assert "not sent: 2 of what was asked for" in capsys.readouterr().err
    to = Destination(wandb_service.url, None, "mens_exp")
    first, second = (
        delivery_at(RunDir(sweep.path / name).sync, to) for name in ("0_runs", "1_runs")
    )
    assert first is not None
    assert first["why"] is None
    assert second is not None
    assert second["digest"] is None
    assert second["why"]
    wandb_service.refuses = lambda _: False
    wandb_service.operations.clear()
    assert sync(sweep.path) == 0
    assert "was sent before" in capsys.readouterr().out
    for name in ("runs_0_runs", "runs_1_runs"):
        assert steps(wandb_service, name) == [(1, 1.75), (2, 1.5), (3, 1.25)]
        assert len(wandb_service.versions(f"adapter-{name}")) == 1
    assert sum("runs_0_runs/file_stream" in name for name in wandb_service.operations) == 0


def test_a_service_that_never_answers_is_given_up_on(sweep, sync, wandb_service):
    """After the time limit, the sending process is ended and its staged files are removed."""
    wandb_service.hangs = lambda _: True
    assert sync(sweep.path / "0_runs", "sync.timeout_s=8") == 3
    (delivery,) = SyncRecord.read(sweep.path / "0_runs" / "sync.json").deliveries
    assert delivery["digest"] is None
    assert delivery["why"]
    assert list((sweep.path / "0_runs").glob(".sync-*")) == []
    assert not (sweep.path / "1_runs" / "sync.json").exists()


def test_a_run_that_is_stopped_in_the_service_is_sent_to_its_end(
    sweep, sync, wandb_service, wandb_sweeps
):
    """W&B's client interrupts the sending process when a run is stopped in the service."""
    wandb_sweeps.stopping.add("runs_0_runs")
    assert sync(sweep.path / "0_runs") == 0
    assert steps(wandb_service, "runs_0_runs") == [(1, 1.75), (2, 1.5), (3, 1.25)]
    assert wandb_service.runs["runs_0_runs"].exit_code == 0


def test_a_slow_service_gets_everything(sweep, sync, wandb_service):
    """Each of hundreds of responses takes a tenth of a second."""
    wandb_service.delay_s = 0.1
    assert sync(sweep.path / "0_runs", "sync.project=elsewhere") == 0
    assert steps(wandb_service, "runs_0_runs") == [(1, 1.75), (2, 1.5), (3, 1.25)]
    assert wandb_service.runs["runs_0_runs"].project == "elsewhere"


def test_without_an_account_nothing_is_asked_and_nothing_prompted(
    sweep,
    sync,
    wandb_service,
    monkeypatch,
    capsys,
):
    """The message says how to get an account."""
    monkeypatch.delenv("WANDB_API_KEY")
    assert sync(sweep.path) == 3
    assert "wandb login" in capsys.readouterr().err
    assert wandb_service.operations == []


def test_nothing_to_send_is_refused(tmp_path, sync, wandb_service):
    """An empty directory is no sweep."""
    (tmp_path / "empty").mkdir()
    assert sync(tmp_path / "empty") == 2
    assert wandb_service.operations == []


def test_a_run_that_is_sent_by_another_process_is_not_sent_twice(
    sweep, sync, wandb_service, capsys
):
    """Its lock shows that it is being sent."""
    from mens_exp.artifacts.host import run_lock

    with run_lock(sweep.path / "0_runs" / "sync.lock"):
        assert sync(sweep.path / "0_runs") == 3
    assert "is sending it" in capsys.readouterr().err
    assert wandb_service.operations == []


# What is sent, and in which order.


def test_what_is_made_of_something_comes_after_it(study, compare, tmp_path):
    """Training, then its evaluation, then the comparison that used the evaluation."""
    root = study(seeds=[1])
    scored = study("scored", seeds=[1], of=root)
    compare(f"[{root},{scored}]")
    everything = [str(tmp_path / "here"), str(scored), str(root)]
    found = parcels(everything, SyncConfig(), "http://w")
    assert [one.what for one in found.parcels] == [
        *("train", "train", "evaluate", "evaluate", "compare")
    ]
    uses = [one.order.uses for one in found.parcels]
    assert uses[:2] == [[], []]
    assert uses[2] == [("adapter", str(root / "0_runs"))]
    assert sorted(uses[4]) == [
        ("scorecard", str(scored / "0_scored")),
        ("scorecard", str(scored / "1_scored")),
    ]


def test_a_merge_is_tied_to_the_run_whose_adapter_it_read(study):
    """By the adapter's path or hash; what used the merged model is tied to the merge."""
    root = study(seeds=[1])
    trained = Manifest.read(root / "0_runs" / "manifest.json")
    for name, task, inputs in (
        ("merged", "merge", {"adapter": str(root / "0_runs" / "adapter")}),
        ("hashed", "merge", {"adapter": "/gone", "adapter_sha256": "ad" * 32}),
        ("scored", "evaluate", {"subject": str(root / "merged" / "merged")}),
    ):
        made = Manifest(
            run_id=name,
            task=task,
            status=Status.SUCCEEDED,
            started_utc=trained.started_utc,
            config_digest="c" * 64,
            seed=1,
            inputs=inputs,
        )
        (root / name).mkdir()
        made.write(root / name / "manifest.json")
    found = parcels([str(root)], SyncConfig(), "http://w")
    uses = {Path(one.order.path).name: one.order.uses for one in found.parcels}
    assert uses["merged"] == [("adapter", str(root / "0_runs"))]
    assert uses["hashed"] == [("adapter", str(root / "0_runs"))]
    assert uses["scored"] == [("merged", str(root / "merged"))]


def test_latest_means_the_sweep_of_the_last_run(sweep, tmp_path, monkeypatch):
    """Our launcher leaves sweep.json; without it, the last run alone is sent."""
    (tmp_path / "outputs").symlink_to(sweep.path.parent)
    monkeypatch.chdir(tmp_path)
    assert named_paths("latest") == [str(tmp_path / "outputs" / "runs")]
    sweep.record.unlink()
    (found,) = named_paths("latest")
    assert Path(found).parent == tmp_path / "outputs" / "runs"


def test_an_open_run_is_left_out_by_name(study):
    """An open run is not sent as if it were complete."""
    root = study(seeds=[1])
    manifest = Manifest.read(root / "0_runs" / "manifest.json")
    manifest.status = Status.STARTED
    manifest.write(root / "0_runs" / "manifest.json")
    found = parcels([str(root)], SyncConfig(), "http://w")
    assert [Path(one.order.path).name for one in found.parcels] == ["1_runs"]
    assert found.left_out == {str(root / "0_runs"): "it has not ended"}


def test_the_project_is_the_runs_own_unless_the_command_says_otherwise(
    study,
):
    """A mirror is sent to the project that it names."""
    root = study(seeds=[1], arms=[["logger=wandb", "logger.project=lab", "logger.entity=us"], []])
    first, second = parcels([str(root)], SyncConfig(), "http://w").parcels
    assert first.order.to == Destination("http://w", "us", "lab")
    assert second.order.to == Destination("http://w", None, "mens_exp")
    told = parcels([str(root)], SyncConfig(project="p", entity="e"), "http://w").parcels
    assert {one.order.to for one in told} == {Destination("http://w", "e", "p")}


def test_an_agents_run_goes_where_its_sweep_is(study):
    """It ignores the account's default project; a project in the command takes precedence."""
    root = study(seeds=[1])
    path = root / "0_runs" / "manifest.json"
    manifest = Manifest.read(path)
    told = {"WANDB_RUN_ID": "theirs", "WANDB_SWEEP_ID": "sweep"}
    manifest.inputs |= agent_inputs(told | {"WANDB_ENTITY": "lab", "WANDB_PROJECT": "mine"})
    manifest.write(path)
    first, second = parcels([str(root)], SyncConfig(), "http://w").parcels
    assert first.order.to == Destination("http://w", "lab", "mine")
    assert second.order.to == Destination("http://w", None, "mens_exp")
    moved = parcels([str(root)], SyncConfig(project="p", entity="e"), "http://w").parcels
    assert {one.order.to for one in moved} == {Destination("http://w", "e", "p")}


def test_a_run_that_has_changed_is_another_parcel(study):
    """The digest of the changed run differs."""
    root = study(seeds=[1])
    (first, _) = parcels([str(root)], SyncConfig(), "http://w").parcels
    before = first.digest()
    assert first.digest() == before
    manifest = Manifest.read(root / "0_runs" / "manifest.json")
    manifest.notes.append("resumed")
    manifest.write(root / "0_runs" / "manifest.json")
    assert first.digest() != before
