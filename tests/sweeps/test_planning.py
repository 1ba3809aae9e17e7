from __future__ import annotations

import shutil

import pytest

from mens_exp.errors import MensError
from mens_exp.sweeps import plan
from mens_exp.sweeps.plan import plan_sweep


@pytest.fixture
def planned(tiny_run, tmp_path, monkeypatch):
    """Plan a sweep over `tiny_run` in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def made(*overrides):
        by_key = {text.partition("=")[0]: text for text in [*tiny_run, *overrides]}
        return plan_sweep(list(by_key.values()))

    return made


def refusal(planned, *overrides):
    with pytest.raises(MensError) as caught:
        planned(*overrides)
    return caught.value


def test_every_cell_is_costed(planned, tmp_path):
    """Time, memory and disk space of each; nothing is written."""
    sweep = planned("seed=1,2", "lora.r=4,8")
    assert [job.differs for job in sweep.jobs] == [
        (f"seed={seed}", f"lora.r={rank}") for seed in (1, 2) for rank in (4, 8)
    ]
    assert [job.directory.partition("_")[0] for job in sweep.jobs] == ["0", "1", "2", "3"]
    for job in sweep.jobs:
        assert job.estimate["time_s"] >= 0
        assert job.estimate["memory_bytes"] > job.estimate["memory_low_bytes"] > 100_000_000
        assert job.estimate["disk_bytes"] > 0
        assert job.contract is not None
    assert len({job.contract for job in sweep.jobs}) == 4
    assert sweep.left_out == ()
    assert list(tmp_path.iterdir()) == []


def test_one_cell_is_a_sweep_as_well(planned):
    """-m without a list runs one job."""
    (only,) = planned("seed=3").jobs
    assert (only.cell.config.seed, only.cell.number) == (3, 0)


def test_one_bad_cell_stops_all_and_is_named(planned):
    """The message says how to run the others."""
    said = str(refusal(planned, "lora.r=8,0", "seed=1,2"))
    assert "lora.r: out of range" in said
    assert "2 of 4 cells cannot run, so none was started" in said
    assert "2 (lora.r=0, seed=1); 3 (lora.r=0, seed=2)" in said
    assert "sweep.invalid=skip" in said


def test_bad_cells_are_skipped_where_asked_for(planned):
    """They are listed with the reason, and the other cells keep their numbers."""
    sweep = planned("lora.r=0,8,-1,4", "sweep.invalid=skip")
    assert [job.cell.number for job in sweep.jobs] == [1, 3]
    assert [(one["number"], one["same_as"]) for one in sweep.left_out] == [(0, None), (2, None)]
    assert "lora.r: out of range" in sweep.left_out[0]["why"]


def test_a_value_missing_in_one_cell_skips_that_cell(planned):
    """model=hf needs an id, and tiny_llama has none."""
    sweep = planned("model=tiny_llama,hf", "sweep.invalid=skip")
    assert [job.differs for job in sweep.jobs] == [("model=tiny_llama",)]
    (out,) = sweep.left_out
    assert out["number"] == 1
    assert "model.id: a required value is missing" in out["why"]


def test_nothing_left_to_run_is_refused(planned):
    """A sweep without a valid cell is refused even with sweep.invalid=skip."""
    said = str(refusal(planned, "lora.r=0,-1", "sweep.invalid=skip"))
    assert said.count("lora.r: out of range") == 2


def test_a_wrong_command_is_refused_whatever_is_skipped(planned):
    """An unknown key is wrong in every cell."""
    said = str(refusal(planned, "seed=1,2", "lora.rr=8", "sweep.invalid=skip"))
    assert "lora.rr: unknown key" in said


def test_a_knob_without_effect_collapses_its_cells(planned):
    """backend=full has no adapter, so its ranks are one run, and a note says so."""
    sweep = planned("backend=qlora,full", "lora.r=4,8")
    assert [(job.cell.number, job.differs) for job in sweep.jobs] == [
        (0, ("backend=qlora", "lora.r=4")),
        (1, ("backend=qlora", "lora.r=8")),
        (2, ("backend=full", "lora.r=4")),
    ]
    (same,) = sweep.left_out
    assert (same["number"], same["same_as"]) == (3, 2)
    assert same["why"] == "the same as cell 2: lora.r has no effect there"
    kept = sweep.jobs[2]
    assert not any(text.startswith("lora.r=") for text in kept.cell.composed.overrides)
    assert "also represents cell 3 (backend=full, lora.r=8)" in kept.notes


def test_a_value_that_one_option_refuses_alone_collapses(planned):
    """An unquantized base has no quantization constants."""
    sweep = planned("backend=qlora,lora", "quant.double_quant=true,false")
    assert [job.cell.number for job in sweep.jobs] == [0, 1, 2]
    assert [(one["number"], one["same_as"]) for one in sweep.left_out] == [(3, 2)]


def test_a_knob_without_effect_anywhere_is_an_error(planned):
    """If no cell has the key, the command is wrong."""
    said = str(refusal(planned, "backend=full", "lora.r=4,8"))
    assert "lora.r: has no effect with backend=full" in said


def test_the_same_rows_under_two_names_are_one_cell(planned, rows_file, tmp_path):
    """The contract depends on the content of the rows, not on their path."""
    other = tmp_path / "copy.jsonl"
    shutil.copy(rows_file, other)
    sweep = planned(f"data.path={rows_file},{other}")
    assert len(sweep.jobs) == 1
    assert "the same contract, and nothing else differs" in sweep.left_out[0]["why"]


def test_what_is_left_beside_the_adapter_keeps_cells_apart(planned):
    """The contract is the same, but the runs write different files."""
    sweep = planned("logger=none,csv")
    assert len({job.contract for job in sweep.jobs}) == 1
    assert len(sweep.jobs) == 2


def test_seeds_are_no_duplicates(planned):
    """Different seeds are different cells; a repeated seed is one cell."""
    sweep = planned("seed=1,2,1")
    assert [job.cell.number for job in sweep.jobs] == [0, 1]
    assert [(one["number"], one["same_as"]) for one in sweep.left_out] == [(2, 0)]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("hydra.launcher.n_jobs=0", "hydra.launcher.n_jobs: out of range"),
        ("sweep.retries=-1", "sweep.retries: out of range"),
        ("sweep.retries=1,2", "applies to the whole sweep"),
        ("hydra.sweep.subdir=x", "names one directory for several jobs"),
        ("hydra.sweeper.max_batch_size=1", "hydra.sweeper: is not read"),
        ("hydra/launcher=ray", "unknown launcher"),
    ],
)
def test_settings_of_a_sweep_are_judged(planned, override, said):
    """The message names the setting, before anything is written."""
    assert said in str(refusal(planned, "seed=1,2", override))


def test_a_directory_that_holds_a_sweep_is_refused(planned, tmp_path):
    """The message has the command to resume it."""
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.json").write_text("{}")
    error = refusal(planned, "seed=1,2", "hydra.sweep.dir=s")
    assert "a sweep already exists here" in str(error)
    assert "sweep.resume=s" in str(error)


def test_jobs_that_need_too_much_memory_together_are_refused(planned, monkeypatch):
    """Each fits alone, with 500 MB in 700 MB."""
    estimate = {
        "time_s": 1.0,
        "memory_bytes": 500_000_000,
        "memory_low_bytes": 400_000_000,
        "disk_bytes": 1,
        "device": "cpu",
        "free_bytes": 700_000_000,
    }
    monkeypatch.setattr(plan, "estimate_of", lambda _cell: dict(estimate))
    assert planned("seed=1,2").notes == ()
    error = refusal(planned, "seed=1,2", "hydra.launcher.n_jobs=2")
    assert (error.where, error.exit_code) == ("hydra.launcher.n_jobs", 2)
    estimate["memory_low_bytes"] = 300_000_000
    (note,) = planned("seed=1,2", "hydra.launcher.n_jobs=2").notes
    assert "2 jobs at a time may need" in note
