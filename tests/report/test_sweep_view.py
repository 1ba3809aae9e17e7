from __future__ import annotations

from mens_exp.artifacts.sweep import JobState, LeftOut, SweepJob, SweepRecord
from mens_exp.report.sweep_view import job_line, planned_parts, result_parts


def record(**more):
    jobs = [
        SweepJob(
            number=number,
            directory=f"{number}_x",
            differs=[f"seed={number}", "lora=qv"],
            state=state,
            reason=reason,
            config_digest="c" * 64,
            contract="0123456789abcdef",
            estimate={"time_s": 1800.0, "memory_bytes": 2**30, "disk_bytes": 2**20, **estimate},
            results={"tuned_val_loss": 1.23456, "wall_s": 61.0} if reason is None else {},
            notes=[],
            attempts=[
                {
                    "pid": 1,
                    "process_started": 1.0,
                    "started_utc": "2026-11-20T05:58:01.123Z",
                    "ended_utc": None,
                    "exit_code": 0,
                    "peak_rss_bytes": 2**29,
                }
            ],
        )
        for number, state, reason, estimate in (
            (0, JobState.SUCCEEDED, None, {"device": "cpu"}),
            (1, JobState.FAILED, "killed by \x1b[31m [bold]SIGKILL", {"device": "cpu"}),
        )
    ]
    made = {
        "sweep_id": "s",
        "created_utc": "2026-11-20T05:58:01.123Z",
        "command": [],
        "code_sha256": "0" * 64,
        "n_jobs": 2,
        "threads": 1,
        "retries": 0,
        "changes": "refuse",
        "jobs": jobs,
        "left_out": [LeftOut(number=2, differs=["seed=0"], why="the same as cell 0: …", same_as=0)],
    }
    return SweepRecord(**{**made, **more})


def test_the_table_before_shows_what_each_cell_takes_and_the_sum(screen):
    """Two parallel CPU jobs save no time, and their memory adds up."""
    text = screen(planned_parts(record()), 160)
    assert "≈ 30 min 00 s" in text
    assert "01234567" in text
    assert "2 cells, 2 at a time, 1 thread each: ≈ 1 h 00 min, 2.00 GiB of memory" in text
    assert "2 MiB of disk" in text
    assert "left out: cell 2 (seed=0): the same as cell 0" in text


def test_jobs_on_gpus_of_their_own_share_the_time(screen):
    """Two GPUs with two parallel jobs take half of the time."""
    made = record(gpus=["0", "1"])
    for job in made.jobs:
        job["estimate"]["device"] = "cuda"
    assert "GPU 0, 1 in turn: ≈ 30 min 00 s" in screen(planned_parts(made), 160)


def test_jobs_of_several_gpus_take_as_many_at_a_time(screen):
    """Four GPUs run two jobs of two GPUs at a time."""
    made = record(gpus=["0", "1", "2", "3"], gpus_per_job=2, n_jobs=4)
    made.jobs += [dict(job) for job in made.jobs]
    for job in made.jobs:
        job["estimate"]["device"] = "cuda"
    text = screen(planned_parts(made), 160)
    assert "2 each of GPU 0, 1, 2, 3 in turn: ≈ 1 h 00 min" in text


def test_jobs_in_a_queue_share_nothing(screen):
    """Each has its own cores, and at most all cells run at once."""
    text = screen(planned_parts(record(launcher="slurm", n_jobs=256)), 160)
    assert "2 cells, 2 at a time, 1 thread each: ≈ 30 min 00 s" in text


def test_an_unknown_time_is_no_sum(screen):
    """If one cell's time is unknown, so is the total."""
    made = record()
    made.jobs[0]["estimate"]["time_s"] = None
    assert "1 thread each: –, " in screen(planned_parts(made), 160)


def test_the_table_after_shows_states_losses_and_reasons(screen):
    """It also counts the states; control characters are made visible."""
    text = screen(result_parts(record()), 160)
    assert "1.2346" in text
    assert "1 min 01 s" in text
    assert "512 MiB" in text
    assert "killed by \\x1b[31m [bold]SIGKILL" in text
    assert "1 succeeded, 1 failed" in text


def test_a_line_tells_progress_and_reason():
    """The line has the number done, the cell, the state and the reason."""
    made = record()
    text = job_line(made, made.jobs[1], "failed", "no rows")
    assert text == "[1/2] cell 1 (seed=1, lora=qv) failed: no rows"
