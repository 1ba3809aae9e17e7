"""Slurm's answers about a job and the launcher's conclusions; Slurm's commands are stand-ins."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import AttemptLog, JobState, SweepDir
from mens_exp.config.sweep import SlurmLauncher
from mens_exp.errors import SetupError
from mens_exp.sweeps import executors, slurm_commands, slurm_task
from mens_exp.sweeps.executors import SlurmExecutor, SlurmWork
from mens_exp.sweeps.process import Ended


class Queue:
    """Stand-in for sbatch, squeue, scancel and sinfo."""

    def __init__(self):
        self.lines = []
        self.asked = []
        self.error = None
        self.number = 7
        self.nodes = "idle\n"

    def __call__(self, command, text=""):
        self.asked.append(list(command))
        if command[0] == "sinfo":
            return self.nodes
        if self.error:
            raise OSError(self.error)
        return f"{self.number}\n" if command[0] == "sbatch" else "\n".join(self.lines)

    def says(self, state, reason="None", status=0, number=0):
        self.lines = [f"7|{number}|{state}|{reason}|{status}|{self.script}|"]

    script = ""


@pytest.fixture
def queue(monkeypatch, tmp_path):
    made = Queue()
    made.script = str(tmp_path.resolve() / "batch" / "submission_1.sh")
    monkeypatch.setattr(executors, "call", made)
    monkeypatch.setattr(slurm_commands, "call", made)
    return made


@pytest.fixture
def executor(make_sweep, tmp_path, queue):
    record = make_sweep({}, {}, launcher="slurm")
    launcher = SlurmLauncher(max_num_timeout=1)
    return SlurmExecutor(SweepDir(tmp_path), record, launcher)


def test_all_jobs_are_one_array(executor, queue, tmp_path):
    """Each job has its own index in the array, and waits until Slurm says that it runs."""
    jobs = executor._record.jobs
    queue.says("PENDING", "Resources")
    (first, work), (second, other) = executor.start(jobs)
    assert (first["number"], second["number"]) == (0, 1)
    assert not isinstance(work, str)
    assert not isinstance(other, str)
    assert [command[0] for command in queue.asked] == ["sbatch", "squeue"]
    assert work.ended() is None
    assert work.waits == "in Slurm's queue as 7_0: Resources"
    queue.says("RUNNING")
    executor.poll()
    assert work.ended() is None
    assert work.waits is None
    assert "--array=0,1%256" in (tmp_path / "batch" / "submission_1.sh").read_text("utf-8")


@pytest.mark.parametrize(
    ("state", "status", "expected", "reason", "may_pass"),
    [
        ("CANCELLED", 0, JobState.CANCELLED, "CANCELLED: ended by scancel", False),
        ("NODE_FAIL", 0, JobState.FAILED, "NODE_FAIL: its node failed", True),
        ("OUT_OF_MEMORY", 9, JobState.FAILED, "OUT_OF_MEMORY: it took more than", False),
        ("TIMEOUT", 9, JobState.FAILED, "TIMEOUT: its 60 minutes were over, 1 time", True),
    ],
)
def test_why_slurm_ended_a_job_is_the_reason(
    executor,
    queue,
    state,
    status,
    expected,
    reason,
    may_pass,
):
    """In Slurm's own word; only what another node or more time may fix is retried."""
    ((job, work),) = executor.start(executor._record.jobs[:1])
    assert not isinstance(work, str)
    executor.log(job).began(5, 1.0, host="node", queue_id="7_0")
    queue.says(state, status=status)
    executor.poll()
    ended = work.ended()
    assert ended is not None
    assert ended.stop is not None
    assert (ended.stop.state, ended.stop.may_pass) == (expected, may_pass)
    assert ended.stop.reason.startswith(reason)
    assert job["attempts"][0]["why"] == state
    assert job["attempts"][0]["ended_utc"] is not None


def test_a_job_that_ended_by_itself_is_read_from_its_log(executor, queue):
    """A later answer from Slurm does not change the exit code that the log has."""
    ((job, work),) = executor.start(executor._record.jobs[:1])
    assert not isinstance(work, str)
    executor.log(job).began(5, 1.0, host="node", queue_id="7_0")
    executor.log(job).ended(2)
    executor.poll()
    assert work.ended() == Ended(exit_code=2)
    queue.says("FAILED", "NonZeroExitCode", status=512)
    executor.poll()
    assert work.ended() == Ended(exit_code=2)


def test_a_job_that_has_succeeded_by_its_log_is_not_waited_for(executor, queue):
    """Slurm may still list it as running if its controller missed the end."""
    job = executor._record.jobs[0]
    queue.says("RUNNING")
    ((_, work),) = executor.start([job])
    log = executor.log(job)
    log.began(1, 1.0, host="n", queue_id="7_0")
    assert work.ended() is None
    log.ended(None, why="TIMEOUT")
    assert work.ended() is None
    log.began(2, 2.0, host="n", queue_id="7_0")
    assert work.ended() is None
    log.ended(0)
    assert work.ended() == Ended(exit_code=0)


def test_a_job_that_is_gone_before_it_began_was_cancelled(executor, queue):
    """Slurm does not list a task that scancel removed from the queue."""
    queue.says("PENDING")
    ((_, work),) = executor.start(executor._record.jobs[:1])
    assert not isinstance(work, str)
    assert work.ended() is None
    queue.lines = []
    for _ in range(3):  # a restarted controller may not list it at once
        executor.poll()
    ended = work.ended()
    assert ended is not None
    assert ended.stop is not None
    assert ended.stop.state is JobState.CANCELLED
    assert ended.stop.reason == "CANCELLED: 7_0 left Slurm's queue before it began"


def test_a_job_that_slurm_does_not_list_for_a_moment_is_still_at_work(executor, queue):
    """A restarting controller does not list it; after three polls in a row the job is gone."""
    ((_, work),) = executor.start(executor._record.jobs[:1])
    for _ in range(2):
        queue.says("RUNNING")
        executor.poll()
        queue.lines = []
        for _ in range(2):
            executor.poll()
            assert work.ended() is None
    executor.poll()
    assert work.ended() is not None


def test_a_silent_slurm_changes_nothing(executor, queue):
    """The controller may come back; a job that cannot be cancelled is named."""
    ((_, work),) = executor.start(executor._record.jobs[:1])
    assert not isinstance(work, str)
    queue.error = "Unable to contact slurm controller"
    executor.poll()
    assert work.ended() is None
    executor.cancel([work], 2)
    ended = work.ended()
    assert ended is not None
    assert ended.stop is not None
    assert "`scancel 7_0` failed: Unable to contact" in ended.stop.reason


def test_a_job_that_is_drawn_later_is_a_submission_of_its_own(executor, queue, tmp_path):
    """An array of one, with the cell's number as its index."""
    first, second = executor._record.jobs
    ((_, work),) = executor.start([first])
    queue.number = 8
    ((_, later),) = executor.start([second])
    assert isinstance(work, SlurmWork)
    assert isinstance(later, SlurmWork)
    assert (work.queue_id, later.queue_id) == ("7_0", "8_1")
    scripts = [tmp_path / "batch" / f"submission_{number}.sh" for number in (1, 2)]
    arrays = [path.read_text("utf-8").partition("--array=")[2] for path in scripts]
    assert [one.partition("%")[0] for one in arrays] == ["0", "1"]


def test_one_job_is_ended_alone(executor, queue):
    """The other job stays in the queue."""
    ((_, work), _) = executor.start(executor._record.jobs)
    assert not isinstance(work, str)
    work.end()
    assert queue.asked[-1] == ["scancel", "7_0"]
    executor.poll()
    assert queue.asked[-1][0] == "squeue"


def test_slurm_is_told_of_an_end_as_soon_as_it_answers(executor, queue):
    """`scancel` is repeated once, and meanwhile the other job does not count as lost."""
    ((_, work), (_, other)) = executor.start(executor._record.jobs)
    assert not isinstance(work, str)
    assert not isinstance(other, str)
    queue.error = "slurm_kill_job2() failed: Unable to contact slurm controller"
    work.end()
    executor.poll()
    assert other.ended() is None
    queue.error = None
    queue.asked.clear()
    executor.poll()
    executor.poll()
    assert [command[0] for command in queue.asked] == ["squeue", "scancel", "squeue"]


def test_a_job_that_has_ended_by_itself_is_not_told_again(executor, queue):
    """Slurm says that the job has already ended."""
    ((_, work),) = executor.start(executor._record.jobs[:1])
    assert not isinstance(work, str)
    queue.error = "scancel: error: Kill job error on job id 7_0: Job already completed"
    work.end()
    queue.error = None
    queue.asked.clear()
    executor.poll()
    assert [command[0] for command in queue.asked] == ["squeue"]


def test_a_submission_waits_for_a_slurm_that_does_not_answer(executor, queue):
    """The job has not failed; one that Slurm accepted without an answer is not submitted twice."""
    lost, other = executor._record.jobs
    queue.error = "sbatch: error: Batch job submission failed: Unable to contact slurm controller"
    assert executor.start([lost, other]) == []
    assert str(lost["reason"]).startswith("Slurm does not take it yet: sbatch: error")
    executor.poll()
    assert executor.start([lost, other]) == []
    queue.error = None
    queue.says("PENDING", "Priority", number=0)
    executor.poll()
    queue.number = 8
    taken = executor.start([lost, other])
    ids = [work.queue_id for _, work in taken if isinstance(work, SlurmWork)]
    assert ids == ["7_0", "8_1"]
    assert executor.start([]) == []


def test_a_pruned_job_that_is_still_in_the_queue_is_adopted(executor, queue):
    """Its launcher died before it could tell Slurm, and the next launcher will."""
    job = executor._record.jobs[0]
    job["state"] = JobState.PRUNED
    queue.says("RUNNING")
    assert executor.adopt(job) is not None


def test_a_refused_submission_fails_its_jobs(executor, queue):
    """Their reason has sbatch's message."""
    queue.error = "sbatch: error: QOSMaxSubmitJobPerUserLimit"
    ((_, said), _) = executor.start(executor._record.jobs)
    assert said == "Slurm did not take it: sbatch: error: QOSMaxSubmitJobPerUserLimit"


NO_NODES = "allocation failure: Requested node configuration is not available"


@pytest.mark.parametrize("nodes", ["idle\nunknown\n", "down*\n", "mixed\ndrained\n"])
def test_a_submission_waits_for_nodes_that_are_away(executor, queue, nodes):
    """While nodes are missing, the controller says that no node is large enough."""
    job = executor._record.jobs[0]
    queue.error, queue.nodes = NO_NODES, nodes
    assert executor.start([job]) == []
    queue.error = None
    executor.poll()
    ((_, work),) = executor.start([job])
    assert isinstance(work, SlurmWork)


def test_nodes_that_are_all_there_are_believed(executor, queue):
    """Then the request really is larger than any node."""
    queue.error = NO_NODES
    ((_, said),) = executor.start(executor._record.jobs[:1])
    assert said == f"Slurm did not take it: {NO_NODES}"
    assert slurm_commands.refused(NO_NODES).exit_code == 2
    queue.nodes = "mixed\nidle*\n"
    error = slurm_commands.refused(NO_NODES)
    assert error.exit_code == 3
    assert "Slurm lacks nodes for the jobs at the moment" in str(error)


def test_only_jobs_of_this_sweep_are_adopted(executor, queue, tmp_path):
    """They are recognized by their script; a finished job is not adopted."""
    job = executor._record.jobs[1]
    queue.lines = [
        "3|1|RUNNING|None|0|/elsewhere/batch/submission_1.sh|",
        f"5|1|FAILED|None|256|{queue.script}|",
        f"7|1|PENDING|Priority|0|{queue.script}|",
        f"8|N/A|RUNNING|None|0|{queue.script}|",
        "9|N/A|RUNNING|None|0||",
    ]
    work = executor.adopt(job)
    assert work is not None
    assert work.ended() is None
    assert work.waits == "in Slurm's queue as 7_1: Priority"
    assert executor.adopt(executor._record.jobs[0]) is None
    job["state"] = JobState.SUCCEEDED
    assert executor.adopt(job) is None


def test_a_sweep_cannot_go_on_while_slurm_is_silent(executor, queue):
    """Its jobs may be running, so none is started."""
    queue.error = "Unable to contact slurm controller"
    with pytest.raises(SetupError, match="Slurm does not answer"):
        executor.adopt(executor._record.jobs[0])


class Task:
    """A batch process with a stand-in job."""

    def __init__(self, place, monkeypatch):
        self.place, self.requeued = place, 0
        self.environment = {}
        self.warned, self.code = False, 0
        names = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "7", "SLURM_JOB_ID": "9"}
        for name, value in {**names, "SLURM_NTASKS": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(slurm_task, "supervise", self.supervise)
        monkeypatch.setattr(slurm_task, "call", self.call)

    def supervise(self, arguments, output, environment, log, **more):
        self.environment = environment
        log.began(5, 1.0, host="node", queue_id=more["queue_id"])
        if self.warned:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGUSR1)
            assert more["signals"]() == [signal.SIGTERM]
            assert more["signals"]() == []
        return Ended(exit_code=self.code)

    def call(self, command):
        assert command == ["scontrol", "requeue", "9"]
        self.requeued += 1
        return ""

    def run(self, *, timeout_min=1):
        limits = [f"--timeout-min={timeout_min}", "--signal-delay-s=30", "--max-num-timeout=1"]
        return slurm_task.main([str(self.place), *limits])

    def why(self):
        return [one["why"] for one in AttemptLog(SweepDir(self.place).attempts(1)).attempts()]


@pytest.fixture
def task(make_sweep, tmp_path, monkeypatch):
    import signal

    make_sweep({}, {}, threads=3).write(SweepDir(tmp_path).record)
    before = {one: signal.getsignal(one) for one in (signal.SIGUSR1, signal.SIGTERM)}
    yield Task(tmp_path, monkeypatch)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_batch_process_ends_as_its_job(task):
    """The job gets its threads, and no variable that Lightning takes for a multi-task job."""
    task.code = 2
    assert task.run() == 2
    assert (task.requeued, task.why()) == (0, [None])
    assert task.environment["OMP_NUM_THREADS"] == "3"
    assert "SLURM_NTASKS" not in task.environment
    task.code = -9
    assert task.run() == 1


def test_a_warned_job_is_put_back_as_often_as_allowed(task):
    """A job that succeeds despite the warning is not; the second warning is one too many."""
    task.warned, task.code = True, 130
    assert task.run() == 0
    assert task.run() == 130
    assert (task.requeued, task.why()) == (1, ["TIMEOUT", "TIMEOUT"])
    task.code = 0
    assert task.run() == 0
    assert task.requeued == 1


def test_a_second_start_waits_for_the_process_of_the_first(task):
    """A killed controller may forget a running job and start it again."""
    run = RunDir(task.place / "1_job")
    run.path.mkdir()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    record = {"pid": other.pid, "started": psutil.Process(other.pid).create_time()}
    run.job_lock.write_text(json.dumps(record), "utf-8")
    threading.Timer(1, other.kill).start()
    assert task.run() == 0
    assert other.wait() == -signal.SIGKILL
    assert task.why() == [None]


def test_a_pruned_job_is_not_put_back(task):
    """A search pruned it when its time was just over."""
    task.warned, task.code = True, 130
    run = RunDir(task.place / "1_job")
    run.path.mkdir()
    run.pruned.write_text("worse", "utf-8")
    assert task.run() == 130
    assert (task.requeued, task.why()) == (0, ["TIMEOUT"])


def test_a_warning_long_before_the_end_is_a_preemption(task):
    """Some clusters warn of a preemption this way; it does not count as a timeout."""
    task.warned, task.code = True, 130
    assert [task.run(timeout_min=60) for _ in range(3)] == [0, 0, 0]
    assert (task.requeued, set(task.why())) == (3, {"PREEMPTED"})
    assert json.loads(SweepDir(task.place).record.read_text("utf-8"))["n_jobs"] == 1
