from __future__ import annotations

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.telemetry import read_events

WINDOWS = ["data.streaming=true", "data.shuffle_buffer=25", "data.val_frac=0.2"]


def adapter(run):
    return (run.adapter / "adapter.safetensors").read_bytes()


def losses(run):
    steps = [event["payload"] for event in read_events(run.telemetry) if event["event"] == "step"]
    return [step["train/loss"] for step in steps]


def test_streamed_and_cached_rows_train_the_same_adapter(finished, train_in, tmp_path):
    """With all sixty rows in the buffer, the losses of all steps and the adapter are equal."""
    run = train_in(tmp_path / "run", "data.streaming=true", "data.shuffle_buffer=60")
    assert losses(run) == losses(finished)
    assert adapter(run) == adapter(finished)


def test_a_broken_streamed_run_goes_on_to_the_same_bytes(broken, train_in, tmp_path):
    """Stopped inside a window of rows, it is resumed from its checkpoint."""
    through = train_in(tmp_path / "through", *WINDOWS)
    run = broken(tmp_path / "run", 7, *WINDOWS)
    assert cli.main([f"resume={run.path}"]) == 0
    assert adapter(run) == adapter(through)
    results = [Manifest.read(one.manifest).results["streamed"] for one in (run, through)]
    assert results[0] == results[1]


def test_the_manifest_says_what_was_read(train_in, tmp_path):
    """The total number of rows is null with the reason; those that were read are counted."""
    run = train_in(tmp_path / "run", *WINDOWS)
    manifest = Manifest.read(run.manifest)
    data = manifest.inputs["data"]
    assert data["rows_sha256"] is None
    assert "streamed" in manifest.unknown["inputs.data.rows_sha256"]
    assert data["streaming"]["first_rows"]["rows"] == 25
    assert data["first_window"]["train_rows"] > 0
    streamed = manifest.results["streamed"]
    assert streamed["rows"]["rows"] >= 25
    assert len(streamed["rows_sha256"]) == 64
    assert streamed["documents"] == streamed["rows"]["trained_on"]


def test_changed_first_rows_are_refused_on_resume(broken, tmp_path, rows_file, capsys):
    """Changed first rows are refused, as any change is in a run that reads all its rows."""
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(rows_file.read_bytes())
    run = broken(tmp_path / "run", 7, *WINDOWS, f"data.path={rows}")
    rows.write_text(rows.read_text("utf-8").replace("Add 1.", "Add one."), "utf-8")
    assert cli.main([f"resume={run.path}"]) == 2
    assert "has changed since the run was trained on it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["trainer.max_steps=-1", "trainer.max_epochs=1"], ["trainer.max_steps", "max_epochs"]),
        (["trainer.max_epochs=2"], ["trainer.max_epochs: cannot be computed"]),
    ],
)
def test_epochs_of_a_stream_are_refused(tiny_run, overrides, told, capsys):
    """The end of an epoch of a stream is unknown."""
    kept = [one for one in tiny_run if "max_steps" not in one or "max_steps" not in overrides[0]]
    assert cli.main([*kept, "data.streaming=true", *overrides, "task=plan"]) == 2
    said = capsys.readouterr().err
    assert all(text in said for text in told)


def test_a_buffer_without_streaming_is_refused(tiny_run, capsys):
    """Without streaming all rows are shuffled together."""
    assert cli.main([*tiny_run, "data.shuffle_buffer=100", "task=plan"]) == 2
    assert "data.shuffle_buffer: has no effect with data.streaming=false" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "key"), [("stdlib", "streaming=true"), ("synthetic", "shuffle_buffer=9")]
)
def test_only_rows_that_somebody_wrote_are_streamed(source, key, capsys):
    """Generated rows are made here, so there is nothing to stream."""
    assert cli.main([f"data={source}", f"data.{key}", "task=plan"]) == 2
    assert f"data.{key.partition('=')[0]}" in capsys.readouterr().err


def test_a_mix_streams_no_source(rows_file, capsys):
    """A mix draws by weight, and needs to know all rows of its sources."""
    source = f"{{path:{rows_file},weight:1,streaming:true}}"
    assert cli.main(["data=mix", f"data.sources=[{source}]", "task=plan"]) == 2
    assert "data.sources[0].streaming: is not a key of jsonl in a mix" in capsys.readouterr().err


@pytest.mark.parametrize("split", ["train[:10]", "train+test"])
def test_parts_and_sums_of_splits_are_not_streamed(split, capsys):
    """`datasets` can only stream a whole split from its beginning."""
    command = ["data=hub", "data.id=a/b", f"data.split='{split}'", "data.streaming=true"]
    assert cli.main([*command, "trainer.max_steps=1", "task=plan"]) == 2
    assert "data.split: part of a split cannot be streamed" in capsys.readouterr().err
