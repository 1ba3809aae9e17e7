from __future__ import annotations

import errno
import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from mens_exp import cli
from mens_exp.artifacts import atomic
from mens_exp.artifacts.host import run_lock
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_document_losses, read_events, write_document_losses
from mens_exp.config.trainer import Strategy
from mens_exp.errors import Problems, RequestError
from mens_exp.tasks import fit
from mens_exp.tasks.train import prepare_resumption


def adapter(run):
    return (run.adapter / "adapter.safetensors").read_bytes()


def step_values(run, metric):
    read = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "step"]
    return [(payload["step"], payload[metric]) for payload in read]


def files(run):
    return {str(p): p.read_bytes() for p in run.path.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def template(train_in, tmp_path_factory):
    """A cancelled run with the cosine schedule; copy it, do not change it."""
    from mens_exp.tasks.run import Cancelled
    from mens_exp.training.module import TrainingModule

    original = TrainingModule.training_step

    def step(self, batch, index):
        if batch.index == 5:
            raise Cancelled("SIGINT")
        return original(self, batch, index)

    directory = tmp_path_factory.mktemp("template") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingModule, "training_step", step)
        return train_in(directory, "schedule=cosine", code=130)


def test_a_failed_run_goes_on_from_its_last_checkpoint(broken, finished, tmp_path):
    """The failed steps are redone, and the end is that of a run without a failure."""
    run = broken(tmp_path / "run", 7, error=OSError("disk full"))
    assert Manifest.read(run.manifest).status is Status.FAILED
    assert cli.main([f"resume={run.path}"]) == 0
    assert adapter(run) == adapter(finished)
    manifest = Manifest.read(run.manifest)
    assert (manifest.status, manifest.error) == (Status.SUCCEEDED, None)
    assert manifest.attempts[-1]["resumed_from_step"] == 2


def test_resumed_figures_cover_the_whole_run(broken, finished, tmp_path):
    """Losses, learning rates and counters equal those of a single process, step by step."""
    run = broken(tmp_path / "run", 7)
    assert cli.main([f"resume={run.path}"]) == 0
    for metric in ("train/loss", "train/grad_norm", "optim/lr", "data/tokens"):
        assert step_values(run, metric) == step_values(finished, metric), metric
    ours, theirs = (Manifest.read(one.manifest).results for one in (run, finished))
    for figure in ("tokens", "micro_batches"):
        assert ours[figure] == theirs[figure], figure


def test_padded_batches_resume_too(broken, train_in, tmp_path):
    """Without packing, the data stream has another order, resumed by the same rule."""
    through = train_in(tmp_path / "through", "data.packing=false", "data.micro_batch_size=2")
    run = broken(tmp_path / "run", 7, "data.packing=false", "data.micro_batch_size=2")
    assert cli.main([f"resume={run.path}"]) == 0
    assert adapter(run) == adapter(through)


def test_latest_is_the_newest_training_run(broken, tmp_path, monkeypatch):
    """A plan that was made later is not the latest run."""
    monkeypatch.chdir(tmp_path)
    broken("outputs/train/default/a", 3)
    run = broken("outputs/train/default/b", 3)
    assert cli.main(["task=plan", "model=tiny_llama", "hydra.run.dir=outputs/plan/c"]) == 0
    assert cli.main(["resume=latest"]) == 0
    assert Manifest.read(run.manifest).status is Status.SUCCEEDED
    assert len(Manifest.read(run.manifest).attempts) == 2


def test_eight_steps_in_two_runs_are_eight_steps(
    train_in,
    tmp_path,
    capsys,
    notes_of,
):
    """Under the constant schedule a finished run of four is extended to eight, byte for byte."""
    through = train_in(tmp_path / "through", "trainer.max_steps=8")
    run = train_in(tmp_path / "run")
    capsys.readouterr()
    assert cli.main([f"resume={run.path}", "trainer.max_steps=8"]) == 0
    note = "trainer.max_steps went from 4 to 8; the constant schedule is unchanged"
    assert note in capsys.readouterr().err
    assert adapter(run) == adapter(through)
    assert step_values(run, "train/loss") == step_values(through, "train/loss")
    manifest = Manifest.read(run.manifest)
    assert notes_of(run) == [note]
    assert manifest.results["steps"] == 8
    assert "max_steps: 8" in run.config.read_text(encoding="utf-8")
    expected = Manifest.read(through.manifest).config_digest
    assert manifest.config_digest == expected
    assert manifest.contract == Manifest.read(through.manifest).contract


def test_longer_cosine_says_what_becomes_of_the_rate(template):
    """Step 3 of four has half the peak rate; of eight it has cos²(π/8) of it, 0.854."""
    resumption = prepare_resumption(str(template.path), {"trainer.max_steps": "8"})
    differs = "the run differs from one that was started with 8 steps, and so does its contract,"
    laid = "trainer.max_steps went from 4 to 8: the cosine schedule is laid over 8 steps from here"
    assert resumption.notes == [
        f"{laid} on, so the rate of step 3 is 0.000854 instead of 0.0005",
        f"{differs} because of the learning rates of earlier steps",
    ]


def test_another_number_of_processes_is_said(template):
    """A run of one process is resumed by two, which share its micro-batches."""
    resumption = prepare_resumption(str(template.path), {"trainer.devices": "2"})
    assert resumption.notes == ["continued with 2 processes instead of 1"]
    assert resumption.cell.config.trainer.sharing is Strategy.ddp
    assert resumption.cell.config.trainer.world_size == 2
    assert prepare_resumption(str(template.path), {}).cell.config.trainer.sharing is Strategy.one


def test_longer_cosine_takes_the_rate_that_was_said(broken, tmp_path):
    """Step 3 trains at the rate of the new schedule, and no step is left out."""
    run = broken(tmp_path / "run", 5, "schedule=cosine")
    assert cli.main([f"resume={run.path}", "trainer.max_steps=8"]) == 0
    rates = step_values(run, "optim/lr")
    assert [step for step, _ in rates] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rates[2][1] == pytest.approx(1e-3 * 0.8535534)
    assert rates[7][1] == pytest.approx(1e-3 * 0.0380602)


@pytest.mark.parametrize(
    ("overrides", "complaints"),
    [
        (["seed=1"], ["seed"]),
        (["lora.r=8", "optim.lr=1e-4", "trainer.max_steps=8"], ["lora.r", "optim.lr"]),
        (["~callbacks.progress"], ["~callbacks.progress"]),
        (["hydra.run.dir=elsewhere"], ["hydra.run.dir"]),
        (["trainer.max_steps=4"], ["trainer.max_steps"]),
        (["trainer.max_steps=3"], ["trainer.max_steps"]),
        (["trainer.max_steps=8,9"], ["trainer.max_steps"]),
        (["trainer.max_steps=-1"], ["trainer.max_steps"]),
        (["trainer.devices=0"], ["trainer.devices"]),
        (["trainer.devices=two"], ["trainer.devices"]),
        (["trainer.devices=3"], ["trainer.accumulate_grad_batches"]),
        (["trainer.num_nodes=2"], ["trainer.num_nodes"]),
    ],
    ids=" ".join,
)
def test_nothing_but_a_longer_run_is_accepted(
    template,
    overrides,
    complaints,
    capsys,
):
    """The message names every refused key; exit code 2, and the run is unchanged."""
    before = files(template)
    assert cli.main([f"resume={template.path}", *overrides]) == 2
    said = capsys.readouterr().err
    assert all(f"{key}:" in said for key in complaints)
    assert files(template) == before


def test_a_finished_run_is_refused_with_the_way_on(finished, capsys):
    """A finished run can only be extended, and the message says how."""
    before = files(finished)
    assert cli.main([f"resume={finished.path}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the run has ended already" in said
    assert "trainer.max_steps=<more than 4>" in said
    assert files(finished) == before


def test_a_run_killed_after_its_end_gets_its_pages(finished, tmp_path, capsys):
    """The record says succeeded, but pages are missing and a dead process's lock is left."""
    run = RunDir(shutil.copytree(finished.path, tmp_path / "run"))
    before = files(run)
    pages = [run.report, run.model_card, run.run_summary, run.skip_stats]
    for page in pages[1:]:
        page.unlink()
    run.lock.write_text(json.dumps({"pid": 2**22, "started": 0.0}), "ascii")
    half = run.path / f".MODEL_CARD.md.{atomic._machine()}-{2**22}-00000000.tmp"
    half.write_bytes(b"# H")
    assert cli.main([f"resume={run.path}"]) == 0
    assert "The run had ended; its missing pages have been written" in capsys.readouterr().err
    assert files(run) == before
    assert cli.main([f"resume={run.path}"]) == 2  # there is nothing left to do


def test_a_base_whose_losses_were_not_written_is_validated_again(
    train_in, finished, tmp_path, monkeypatch
):
    """The document losses are there in the end, and the base's validation is recorded once."""
    written = fit.write_document_losses

    def full(*_):
        monkeypatch.setattr(fit, "write_document_losses", written)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fit, "write_document_losses", full)
    run = train_in(tmp_path / "run", code=3)
    assert not run.validation.exists()
    assert cli.main([f"resume={run.path}"]) == 0
    assert run.validation.read_bytes() == finished.validation.read_bytes()
    steps = [
        [e["payload"]["step"] for e in read_events(one.telemetry) if e["event"] == "validation"]
        for one in (run, finished)
    ]
    assert steps[0] == steps[1] == [0, 4]


def test_a_run_at_work_on_its_pages_is_left_alone(finished, tmp_path, capsys):
    """The run's own process is still writing its pages."""
    run = RunDir(shutil.copytree(finished.path, tmp_path / "run"))
    run.report.unlink()
    with run_lock(run.lock):
        assert cli.main([f"resume={run.path}"]) == 2
    assert "still working on this run" in capsys.readouterr().err
    assert not run.report.exists()


def test_a_run_bounded_by_epochs_cannot_get_longer(broken, tmp_path):
    """A higher number of steps would not exceed the run's epochs."""
    run = broken(tmp_path / "run", 3, "trainer.max_steps=-1", "trainer.max_epochs=1")
    with pytest.raises(RequestError, match=r"trainer\.max_epochs ends this run"):
        prepare_resumption(str(run.path), {"trainer.max_steps": "8"})


def test_only_training_goes_on(tmp_path, monkeypatch):
    """A plan is made again instead of being resumed."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["task=plan", "model=tiny_llama", "hydra.run.dir=plan"]) == 0
    with pytest.raises(RequestError, match=r"only training can be continued.*\(plan\)"):
        prepare_resumption("plan", {})


def test_a_missing_run_is_refused(tmp_path):
    """The message names the path that was given."""
    with pytest.raises(RequestError, match="no such run directory"):
        prepare_resumption(str(tmp_path / "nowhere"), {})


def test_one_run_at_a_time_goes_on(template, capsys):
    """A sweep of resumptions is refused."""
    assert cli.main(["-m", f"resume={template.path}"]) == 2
    assert "drop -m" in capsys.readouterr().err


def test_a_damaged_configuration_is_refused(broken, tmp_path):
    """The file is named, and the record does not change."""
    run = broken(tmp_path / "run", 3)
    run.config.write_text("seed: [", encoding="utf-8")
    before = files(run)
    with pytest.raises(RequestError, match=r"config\.yaml"):
        prepare_resumption(str(run.path), {})
    assert files(run) == before


def test_a_run_at_work_is_left_alone(template, capsys):
    """Two processes in one run directory would corrupt its record."""
    with run_lock(template.lock):
        before = files(template)
        assert cli.main([f"resume={template.path}"]) == 2
        assert files(template) == before
    assert "still working on this run" in capsys.readouterr().err


def test_other_rows_than_before_are_refused(broken, rows_file, tmp_path, capsys):
    """A run must not resume on data other than it began with."""
    mine = tmp_path / "rows.jsonl"
    mine.write_bytes(rows_file.read_bytes())
    run = broken(tmp_path / "run", 5, f"data.path={mine}")
    mine.write_bytes(mine.read_bytes().replace(b"return x + 59", b"return 59 + x"))
    assert cli.main([f"resume={run.path}"]) == 2
    assert (
        "inputs.data.rows_sha256: has changed since the run was trained on it"
        in capsys.readouterr().err
    )
    assert Manifest.read(run.manifest).status is Status.FAILED
    mine.write_bytes(rows_file.read_bytes())
    assert cli.main([f"resume={run.path}"]) == 0


def test_a_file_that_has_gone_is_told_before_the_run_is_reopened(broken, rows_file, tmp_path):
    """The record stays closed and unchanged."""
    mine = tmp_path / "rows.jsonl"
    mine.write_bytes(rows_file.read_bytes())
    run = broken(tmp_path / "run", 5, f"data.path={mine}")
    mine.unlink()
    before = files(run)
    with pytest.raises((RequestError, Problems), match=r"rows\.jsonl"):
        prepare_resumption(str(run.path), {})
    assert files(run) == before


def test_a_mirrored_run_goes_on_in_the_same_wandb_run(broken, finished, tmp_path, notes_of):
    """Both offline files have one id, so `wandb sync` uploads them as one run."""
    run = broken(tmp_path / "run", 5, "logger=wandb")
    assert cli.main([f"resume={run.path}"]) == 0
    files = sorted(path.name for path in run.wandb.glob("offline-run-*/*.wandb"))
    assert files == ["run-run.wandb", "run-run.wandb"]
    assert adapter(run) == adapter(finished)
    assert notes_of(run) == []


def flip(path):
    """Flip a bit in the middle of a file, so that its size stays and torch.load reads it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x80
    path.write_bytes(bytes(content))


EVERY = ("checkpoint.every_n_steps=1", "checkpoint.keep=3")


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(broken, finished, tmp_path):
    """It used to be resumed silently; now the end is that of a run without a failure."""
    run = broken(tmp_path / "run", 7, *EVERY)
    flip(run.last_checkpoint())
    assert cli.main([f"resume={run.path}"]) == 0
    manifest = Manifest.read(run.manifest)
    assert manifest.attempts[-1]["resumed_from_step"] == 2
    assert any(
        "step_00000003.ckpt is damaged and was passed over" in note for note in manifest.notes
    )
    assert adapter(run) == adapter(finished)


def test_a_run_whose_checkpoints_are_all_damaged_begins_again(broken, finished, tmp_path):
    """Each damaged checkpoint is reported, and the end is the same."""
    run = broken(tmp_path / "run", 7, *EVERY)
    for path in run.checkpoints.glob("*.ckpt"):
        flip(path)
    assert cli.main([f"resume={run.path}"]) == 0
    manifest = Manifest.read(run.manifest)
    assert manifest.attempts[-1]["resumed_from_step"] == 0
    assert sum("is damaged and was passed over" in note for note in manifest.notes) == 3
    assert adapter(run) == adapter(finished)


def test_a_checkpoint_of_an_earlier_version_is_gone_on_from_and_labelled(
    broken, finished, tmp_path
):
    """The digest of an older checkpoint was not recorded."""
    run = broken(tmp_path / "run", 7, *EVERY)
    (run.checkpoints / "sha256.json").unlink()
    assert cli.main([f"resume={run.path}"]) == 0
    manifest = Manifest.read(run.manifest)
    assert manifest.attempts[-1]["resumed_from_step"] == 3
    assert any("no digest of step_00000003.ckpt" in note for note in manifest.notes)
    assert adapter(run) == adapter(finished)


@pytest.mark.parametrize("text", ["[]", "{", '{"step_00000003.ckpt": 3}'])
def test_digests_that_cannot_be_read_are_refused(broken, tmp_path, capsys, text):
    """Without digests no checkpoint is trusted, and none is removed."""
    run = broken(tmp_path / "run", 7, *EVERY)
    (run.checkpoints / "sha256.json").write_text(text, "utf-8")
    before = files(run)
    assert cli.main([f"resume={run.path}"]) == 2
    assert "contains no digests of training states" in capsys.readouterr().err
    assert files(run) == before


def test_losses_of_an_earlier_attempt_go_where_the_resumed_one_has_none(tmp_path):
    """The selected adapter is of another validation, so only the base's losses still apply."""
    path = tmp_path / "validation.jsonl"
    lines = [
        {"item_id": "a", "condition": condition, "loss": 2.5, "tokens": 3}
        for condition in ("base", "tuned")
    ]
    write_document_losses(path, lines)
    run = SimpleNamespace(dir=SimpleNamespace(validation=path))
    data = SimpleNamespace(val_document_ids=lambda places: [str(place) for place in places])
    fit._note_documents(run, "tuned", data, None)
    assert read_document_losses(path) == lines[:1]
    fit._note_documents(run, "tuned", data, torch.tensor([[0.0, 0.0], [4.0, 2.0]]))
    assert [(one["item_id"], one["loss"]) for one in read_document_losses(path)] == [
        ("a", 2.5),
        ("1", 4.0),
    ]


def test_a_run_that_succeeded_stays_so_when_going_on_is_refused(
    train_in, rows_file, tmp_path, capsys
):
    """Its rows have changed: the record stays byte for byte, and the run is not failed."""
    mine = tmp_path / "rows.jsonl"
    mine.write_bytes(rows_file.read_bytes())
    run = train_in(tmp_path / "run", f"data.path={mine}", "trainer.max_steps=4")
    before = files(run)
    mine.write_bytes(mine.read_bytes().replace(b"return x + 59", b"return 59 + x"))
    assert cli.main([f"resume={run.path}", "trainer.max_steps=6"]) == 2
    assert "has changed since the run was trained on it" in capsys.readouterr().err
    assert files(run) == before
    assert Manifest.read(run.manifest).status is Status.SUCCEEDED
