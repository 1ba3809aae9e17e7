"""A campaign of faults at the writes of each task, and of what the next command makes of them.

    python tests/support/campaign.py --minutes 30      # what `make soak` runs
    python tests/support/campaign.py --tasks merge --limit 20 --results /tmp/merge.json

A task is first run undisturbed, and its calls that change files are listed (disk_faults). A case is
one fault at one of these calls: the first, the middle or the last of those that are alike. The
case's command runs in a fork with that fault; then the task's next commands run, and `after_faults`
judges all of it. The cases are drawn by a seed, in turn from each task, so that a campaign that is
cut short is a fair sample.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import platform
import queue
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import after_faults
import disk_faults
import fork_server
import planned_signals
import slurm_faults
from disk_faults import Fault, Watcher

RESULTS = Path(__file__).parents[1] / "faults/campaign.json"
FORMAT = "mens_exp_campaign"
LIMIT_S = 240  # per command; the slowest undisturbed one takes some tens of seconds
# Plots take a third of a tiny run's time; reports are written without them too.
BEFORE_EACH = (
    "from mens_exp.report import plots\n"
    "plots._drawn = lambda *_: '<svg viewBox=\"0 0 1 1\"></svg>'\n" + disk_faults.source()
)
SHAPE = [
    "model=tiny_llama",
    "trainer=cpu",
    "logger=none",
    "suite=none",
    "suite.items=0",
    "schedule=constant",
]
SHAPE += ["schedule.warmup_steps=0", "data=jsonl", "data.path=rows.jsonl", "data.seq_len=192"]
SHAPE += ["data.val_frac=0.1", "data.heldout_frac=0.1", "optim.lr=1e-3"]
TRAIN = [*SHAPE, "trainer.max_steps=4", "checkpoint.every_n_steps=2", "hydra.run.dir=run"]
SHORT = [*SHAPE, "trainer.max_steps=1", "checkpoint.every_n_steps=1", "hydra.run.dir=run"]
SWEEP = ["-m", *SHAPE, "trainer.max_steps=1", "checkpoint.every_n_steps=1", "hydra.sweep.dir=all"]
SEARCH = [*SWEEP, "hydra/sweeper=optuna", "lora.r=4,8", "hydra.sweeper.n_trials=2"]
CORPUS = ["task=corpus", "corpus.steps=[extract,validate,split]", "corpus.input=project"]
CORPUS += ["corpus.output=out"]
OPEN = ["task=promote", "ledger=decisions.jsonl", f"promote.suite_digest={'ab' * 32}"]
OPEN += ["promote.arms=[qlora,burn]", "promote.factor=backend"]
SOURCE = '''
def add{number}(a, b):
    """Add {number} times."""
    total = a + b
    return total * {number}
'''


@dataclass(frozen=True)
class Task:
    """A command, and the commands a user runs next if it fails.

    Attributes:
        name: as the page has it.
        world: the files that it begins with.
        command: words of the command line.
        again: next commands, tried in turn until one ends well. A directory of a run may be taken
            then, so some of them name others: own2 and own3 for own1, and out2 for out1.
        under: paths of the sites, below the directory of the case; the others are another task's.
        is_done: words of a refusal that says that everything is done.
    """

    name: str
    world: str
    command: tuple[str, ...]
    again: tuple[tuple[str, ...], ...]
    under: tuple[str, ...] = ("",)
    is_done: str | None = None


def _twice(*command, other=()):
    """Return a command with its own directory, and the follow-up commands, also in others."""
    return (*command, "hydra.run.dir=own1"), (
        (*command, "hydra.run.dir=own1"),
        (*command, "hydra.run.dir=own2"),
        *([(*command, *other, "hydra.run.dir=own3")] if other else []),
    )


_RESUME, _ENDED = ("resume=run",), "the run has ended already"
_DDP = tuple("trainer=ddp" if text == "trainer=cpu" else text for text in TRAIN)
_DDP += ("trainer.accelerator=cpu", "trainer.devices=2")
_SLURM = (*SWEEP, "seed=1,2", "hydra/launcher=slurm", "hydra.launcher.poll_s=0.5")
TASKS = [
    Task("base", "rows", tuple(SHORT), (_RESUME, tuple(SHORT)), ("cache/models",)),
    Task("encode", "base", tuple(SHORT), (_RESUME, tuple(SHORT)), ("cache/",)),
    Task("train", "encoded", tuple(TRAIN), (_RESUME, tuple(TRAIN)), ("run",), is_done=_ENDED),
    Task("ddp", "encoded", _DDP, (_RESUME, _DDP), ("run",), is_done=_ENDED),
    Task("resume", "stopped", _RESUME, (_RESUME,)),
    Task("merge", "trained", *_twice("task=merge", "logger=none", "path=run")),
    Task(
        "export",
        "trained",
        *_twice("task=export", "path=run", "export.format=peft", "out=out1", other=("out=out2",)),
    ),
    Task("corpus", "project", *_twice(*CORPUS)),
    Task("sweep", "encoded", (*SWEEP, "seed=1,2"), (("sweep.resume=all",), (*SWEEP, "seed=1,2"))),
    Task("slurm", "encoded", _SLURM, (("sweep.resume=all",), _SLURM)),
    Task("search", "encoded", tuple(SEARCH), (("sweep.resume=all",), tuple(SEARCH))),
    Task(
        "promote",
        "ledger",
        *_twice(*OPEN, "promote.open_cycle=two", "promote.seeds=[5,6]"),
        is_done="is already registered",
    ),
    Task("sync", "trained", *_twice("task=sync", "path=run")),
]


@dataclass(frozen=True)
class Moment:
    """SIGKILL at a random moment, for one or all of a command's processes.

    Attributes:
        share: of the time that the undisturbed command takes.
        which: picks the process; None is all of them.
    """

    share: float
    which: int | None
    action: str = "moment"


@dataclass(frozen=True)
class Case:
    """One fault in one task."""

    task: Task
    fault: Fault | Moment


class Place:
    """A directory in which cases run one after the other, always under the same path."""

    def __init__(self, root):
        self.case, self._worlds = root / "case", root / "worlds"
        self.case.mkdir(parents=True)
        self._worlds.mkdir()
        self._clean, self.took_s = {}, {}

    def put(self, world):
        """Reset the case's directory to a copy of a world."""
        kept = self._worlds / world
        if not kept.exists():
            getattr(self, f"_make_{world}")()
            shutil.copytree(self.case, kept, symlinks=True)
        shutil.rmtree(self.case)
        shutil.copytree(kept, self.case, symlinks=True)

    def run(self, command, *, address="", before=None, **environment):
        """Run a command of mens_exp in a fork."""
        environment = {
            **os.environ,
            "MENS_EXP_CACHE": str(self.case / "cache"),
            "COLUMNS": "200",
            disk_faults.VARIABLE: address,
            **environment,
        }
        return fork_server.run(
            [sys.executable, "-m", "mens_exp", *command],
            capture_output=True,
            text=True,
            cwd=self.case,
            env=environment,
            before=before or slurm_faults.before(environment),
            timeout=LIMIT_S,
        )

    def clean(self, task):
        """Run a task undisturbed, once; return its calls and its files."""
        if task.name not in self._clean:
            self.put(task.world)
            with Watcher(self.case) as watcher, service(task) as more:
                done = self.run(task.command, address=watcher.address, **more)
            self.put(task.world)
            with service(task) as more:
                began = time.monotonic()
                done = self.run(task.command, **more)
                self.took_s[task.name] = time.monotonic() - began
            assert done.returncode == 0, f"{task.name}: {done.stdout}{done.stderr}"
            self._clean[task.name] = watcher.calls, after_faults.read(self.case)
        return self._clean[task.name]

    def play(self, case):
        """Run a case; return the problems found afterwards, in sentences."""
        task = case.task
        _, expected = self.clean(task)
        self.put(task.world)
        with service(task) as more:
            try:
                hit = self._hit(case, more)
            except subprocess.TimeoutExpired:
                return ["hangs after the fault"]
            if hit is None:
                return None
            problems = [*after_faults.first(hit, case.fault.action)]
            problems += after_faults.believed(self.case)
            ended = task.command
            if hit.returncode != 0 or case.fault.action in ("kill", "torn", "moment"):
                try:
                    found, ended = self._go_on(task, more)
                except subprocess.TimeoutExpired:
                    return [*problems, "the next command hangs"]
                problems += found
        problems += after_faults.believed(self.case)
        said = hit.stdout + hit.stderr
        problems += after_faults.differences(self.case, expected, _own_of(ended), said)
        return [one for one in problems if not _is_what_the_fault_kept(self.case, case.fault, one)]

    def _hit(self, case, more):
        """Run a case's command with its fault; None if it ended before the fault."""
        task, fault = case.task, case.fault
        if isinstance(fault, Fault):
            with Watcher(self.case, fault) as watcher:
                done = self.run(task.command, address=watcher.address, **more)
            return done if watcher.fired else None
        killed = []

        def kill():
            there = sorted([*self._processes(), *slurm_faults.daemons(more)])
            chosen = (
                there if fault.which is None or not there else [there[fault.which % len(there)]]
            )
            for pid in chosen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
            slurm_faults.start_again(more, killed)

        timer = threading.Timer(fault.share * self.took_s[task.name], kill)
        timer.start()
        try:
            done = self.run(task.command, **more)
        finally:
            timer.cancel()
            timer.join()
        if task.name == "ddp":  # other workers notice it, and are not a job that continues
            until = time.monotonic() + LIMIT_S
            while self._processes() and time.monotonic() < until:
                time.sleep(0.05)
        return done if killed else None

    def _processes(self):
        """Return the ids of processes that run in the case's directory."""
        found = []
        for place in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                words = (place.parent / "cmdline").read_bytes()
                is_ours = words.startswith(b"fork_server of") or place.parent.name == str(
                    os.getpid()
                )
                if place.readlink().is_relative_to(self.case) and not is_ours:
                    found.append(int(place.parent.name))
        return found

    def _go_on(self, task, more):
        """Run the next commands until one succeeds; return the problems and that command."""
        problems, said = [], []
        slurm_faults.wait_until_there(more)
        for command in task.again:
            done = self.run(command, **more)
            if done.returncode == 0:
                return problems, command
            problems += [f"{command[-1]}: {one}" for one in after_faults.refusal(done)]
            said.append(" ".join((done.stdout + done.stderr)[-600:].split()))
            if task.is_done is not None and task.is_done in done.stderr:
                return problems, ()
        return [*problems, f"no next command ends well; they said: {' | '.join(said)}"], ()

    def _make_rows(self):
        rows = [
            {"prompt": f"Add {n}.", "response": f"def add_{n}(x):\n    return x + {n}\n"}
            for n in range(60)
        ]
        shutil.rmtree(self.case)
        self.case.mkdir()
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (self.case / "rows.jsonl").write_text(text, "utf-8")

    def _make_trained(self):
        self.put("rows")
        self._must(TRAIN)

    def _make_encoded(self):
        self.put("trained")
        shutil.rmtree(self.case / "run")

    def _make_base(self):
        self.put("encoded")
        for name in ("encoded", "data_contract"):
            shutil.rmtree(self.case / "cache" / name)

    def _make_stopped(self):
        self.put("encoded")
        planned = [{"at": "micro-batch", "call": 13, "signal": "SIGKILL"}]
        assert self.run(TRAIN, before=planned_signals.source(planned)).returncode == -9

    def _make_ledger(self):
        self.put("rows")
        self._must([*OPEN, "promote.open_cycle=one", "promote.seeds=[1,2]", "hydra.run.dir=opened"])

    def _make_project(self):
        self.put("rows")
        project = self.case / "project"
        project.mkdir()
        for number in range(12):
            (project / f"m{number}.py").write_text(SOURCE.format(number=number), "utf-8")

    def _must(self, command):
        done = self.run(command)
        assert done.returncode == 0, done.stdout + done.stderr


def _is_what_the_fault_kept(root, fault, problem):
    """Whether a problem is a file whose deletion failed, or a lock that nobody holds.

    If the disk fails to delete a file, that file stays. A process that is killed may leave a lock
    alone: who needs it next takes it, and a cache that is complete needs none.
    """
    if not isinstance(fault, Fault) or fault.site.kind != "unlink":
        return False
    name = problem.removeprefix("left over: ").removesuffix(" is there")
    if disk_faults.place_of(name) != fault.site.place:
        return False
    return fault.action == "error" or (name.endswith(".lock") and _is_free(root / name))


def _is_free(lock):
    """Return whether a lock names no process and can be acquired at once."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file.read() == b""
    except OSError:  # missing, or held
        return False


def _own_of(command):
    """Return the directory that a command names as its own, if any."""
    (name,) = [text for text in command if text.startswith("hydra.run.dir=own")] or [""]
    return name.removeprefix("hydra.run.dir=")


@contextlib.contextmanager
def service(task):
    """Provide what a task needs besides files; yield its environment variables."""
    if task.name == "slurm":
        with slurm_faults.cluster() as environment:
            yield environment
        return
    if task.name != "sync":
        yield {}
        return
    stand_in = runpy.run_path(str(Path(__file__).parents[1] / "stand_in_wandb.py"))
    with stand_in["serving"](stand_in["Service"]()) as there:
        yield {"WANDB_BASE_URL": there.url, "WANDB_API_KEY": "0123456789" * 4}


def cases_of(task, calls, generator):
    """Return kills at the first, middle and last of similar calls, and one of each other fault.

    The list begins with one case of each set of alike calls; a second of each follows, and so on.
    """
    counts = Counter(site for site in calls if site.place.startswith(task.under))
    of_sites = []
    for site, count in sorted(counts.items()):
        ordinals = sorted({1, (count + 1) // 2, count})
        faults = [Fault(site, ordinal, "kill") for ordinal in ordinals if site.kind != "fsync"]
        faults += [
            Fault(site, generator.choice(ordinals), action)
            for action in disk_faults.actions_of(site.kind)
        ]
        generator.shuffle(faults)
        of_sites.append(faults)
    generator.shuffle(of_sites)
    return [Case(task, one) for row in itertools.zip_longest(*of_sites) for one in row if one]


def case_named(text):
    """Return the case with the name that `told` gives; None for a kill at a random moment."""
    found = re.fullmatch(r"(\w+): (\w+) at (\w+) (\d+) of (.*)", text)
    if found is None:
        return None
    name, action, kind, ordinal, place = found.groups()
    (task,) = [one for one in TASKS if one.name == name]
    return Case(task, Fault(disk_faults.Site(kind, place), int(ordinal), action))


def moments_of(task, count, generator):
    """Return kills at random moments; two of three hit a single process."""
    return [
        Case(
            task,
            Moment(generator.random(), generator.choice([None, *generator.sample(range(97), 2)])),
        )
        for _ in range(count)
    ]


def sample(tasks, place, seed, moments=0):
    """Yield cases of tasks in turn, each task's cases in a seeded order.

    Args:
        tasks: to draw from.
        place: to try them in.
        seed: of the draw.
        moments: kills at random moments of each task; the other faults are left out then.
    """
    generator = random.Random(seed)
    lists = [
        moments_of(task, moments, generator)
        if moments
        else cases_of(task, place.clean(task)[0], generator)
        for task in tasks
    ]
    for row in itertools.zip_longest(*lists):
        yield from (case for case in row if case is not None)


class Campaign:
    """Runs cases in several places at a time, and records the results."""

    def __init__(self, tasks, seed, root, workers, moments=0):
        self.tasks, self.seed, self.moments = tasks, seed, moments
        self.places = [Place(root / str(number)) for number in range(workers)]
        self.started_utc = datetime.now(UTC).isoformat(timespec="seconds")
        self.outcomes = []  # (case, problems); problems is None if the call was not reached
        self._waiting = queue.Queue()

    def run(self, until, limit, chosen=None):
        """Run cases, drawn or chosen, until the list, the time or a number of them is exhausted."""
        for task in self.tasks:
            self.places[0].clean(task)  # its calls are counted in the record
        drawn = sample(self.tasks, self.places[0], self.seed, self.moments)
        self.planned = list(drawn) if chosen is None else chosen
        for case in self.planned[:limit]:
            self._waiting.put(case)
        threads = [threading.Thread(target=self._work, args=(at, until)) for at in self.places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, place, until):
        while time.monotonic() < until:
            try:
                case = self._waiting.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            try:
                problems = place.play(case)
            except Exception as error:  # an error of the campaign itself; the others continue
                problems = [f"could not be played: {type(error).__name__}: {str(error)[:300]}"]
            self.outcomes.append((case, problems))
            said = "not reached" if problems is None else "; ".join(problems) or "well"
            print(
                f"{len(self.outcomes):5} {time.monotonic() - began:5.1f} s  {told(case)}: {said}",
                flush=True,
            )

    def record(self, minutes):
        """Return the campaign's results in the form of the page."""
        return {
            "seed": self.seed,
            "minutes": round(minutes, 1),
            "started_utc": self.started_utc,
            **_surroundings(),
            "tasks": [self._of(task) for task in self.tasks],
            "problems": [
                {"case": told(case), "problems": [_without_places(one) for one in problems]}
                for case, problems in sorted(self.outcomes, key=lambda one: told(one[0]))
                if problems
            ],
        }

    def _of(self, task):
        calls, _ = self.places[0].clean(task)
        ours = [site for site in calls if site.place.startswith(task.under)]
        played = [(c, p) for c, p in self.outcomes if c.task is task and p is not None]
        return {
            "name": task.name,
            "calls": len(ours),
            "alike": len(set(ours)),
            "planned": sum(case.task is task for case in self.planned),
            "played": dict(sorted(Counter(case.fault.action for case, _ in played).items())),
            "alike_played": len({c.fault.site for c, _ in played if isinstance(c.fault, Fault)}),
            "well": sum(problems == [] for _, problems in played),
        }


def _without_places(text):
    """Remove the campaign's directory from texts."""
    return re.sub(r"/\S*mens_exp_campai\S*", "(a path)", text)


def _surroundings():
    def git(*words):
        return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout

    described = Path("/proc/cpuinfo").read_text("utf-8")
    cpu = re.search(r"^model name\s*: (.*)$", described, re.MULTILINE)
    names = ("torch", "lightning", "safetensors", "wandb")
    kernel = re.match(r"[\d.]+", platform.release())
    return {
        "commit": git("rev-parse", "HEAD").strip(),
        "dirty": bool(git("status", "--porcelain", "--", "src", "conf")),
        "machine": {
            "cpu": cpu[1] if cpu else platform.machine(),
            "cores": os.cpu_count(),
            "kernel": kernel[0] if kernel else platform.release(),
        },
        "versions": {
            "Python": platform.python_version(),
            **{name: metadata.version(name) for name in names},
        },
    }


def told(case):
    """Describe a case in a line."""
    fault = case.fault
    if isinstance(fault, Moment):
        whom = "all processes" if fault.which is None else f"process {fault.which}"
        return f"{case.task.name}: kill of {whom} after {fault.share:.0%}"
    site = fault.site
    return f"{case.task.name}: {fault.action} at {site.kind} {fault.ordinal} of {site.place}"


def main():
    """Run the campaign; exit with 1 if there is a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--limit", type=int, help="cases at most")
    parser.add_argument("--tasks", nargs="+", choices=[task.name for task in TASKS])
    parser.add_argument("--moments", type=int, default=0, help="kills at random moments, no others")
    parser.add_argument("--again", type=Path, help="a file of results: play what was not well")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--results", type=Path, help="a file for what came of it")
    parser.add_argument("--note", default="", help="what the page is to say of it")
    parser.add_argument("--add", action="store_true", help="keep the campaigns that it has")
    given = parser.parse_args()
    began = time.monotonic()
    chosen = None
    if given.again is not None:
        earlier = json.loads(given.again.read_text("utf-8"))["campaigns"]
        names = dict.fromkeys(one["case"] for each in earlier for one in each["problems"])
        chosen = [case for case in map(case_named, names) if case is not None]
        given.tasks = {case.task.name for case in chosen}
    tasks = [task for task in TASKS if given.tasks is None or task.name in given.tasks]
    if (why := slurm_faults.missing()) is not None:
        print(f"without the task slurm: {why}")
        tasks = [task for task in tasks if task.name != "slurm"]
    with tempfile.TemporaryDirectory(prefix="mens_exp_campaign_") as root:
        fork_server.keep_log(Path(root) / "fork_server.log")
        fork_server.execute_before_each(BEFORE_EACH)
        campaign = Campaign(tasks, given.seed, Path(root), given.workers, given.moments)
        campaign.run(began + 60 * given.minutes, given.limit, chosen)
        fork_server.end_servers()
    made = {**campaign.record((time.monotonic() - began) / 60), "note": given.note}
    if given.results is not None:
        earlier = json.loads(given.results.read_text("utf-8")) if given.add else {"campaigns": []}
        kept = {"format": FORMAT, "version": 1, "campaigns": [*earlier["campaigns"], made]}
        given.results.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", "utf-8")
    played = sum(sum(task["played"].values()) for task in made["tasks"])
    print(f"{played} of {len(campaign.planned)} cases, {len(made['problems'])} with problems")
    for one in made["problems"]:
        print(one["case"], *one["problems"], sep="\n    ")
    sys.exit(1 if made["problems"] else 0)


if __name__ == "__main__":
    main()
