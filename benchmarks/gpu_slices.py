"""The slices of benchmarks/gpu.py: each does its work within its time, and says what it found.

This module is also a pytest plugin that records the outcome of each test in the tests slice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_arms
import record
from gpu_arms import FP8, OURS, UNCHECKPOINTED, UNSLOTH
from gpu_results import Card, Found, Goal, Slice, State
from record import Better, Figure

from mens_exp.artifacts.host import spawn_python
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).parents[1]
TURNS = 6  # maximum per arm, if time allows
RESERVE_S = 15  # of a slice's time, for ending processes and writing
TESTS_NEED = ("pytest", "hypothesis", "filelock")
REPORT = "MENS_EXP_GPU_TESTS"  # variable with the file for the outcome of each test
UNFINISHED = "out of time"
SESSION = "the session of pytest"
PYTEST_ENDED = {"0", "1", "5"}  # all passed, some failed, none left to run
# Goals of this project, for one H200 and 2 × 2,048 tokens.
GOAL_CARD, GOAL_TOKENS_PER_S, GOAL_GIB = "H200", 16_000, 7.4


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A slice to run.

    Attributes:
        device: ``cuda``, or ``cpu`` in a dry run.
        end: its deadline, by ``time.monotonic()``.
        place: an empty directory for its files.
        earlier: its last result, if it was stopped.
        card: the GPU.
    """

    device: str
    end: float
    place: Path
    earlier: Slice | None
    card: Card | None

    @property
    def is_dry(self) -> bool:
        """Whether the run is on the CPU, where results are meaningless."""
        return self.device == "cpu"

    @property
    def left_s(self) -> float:
        """Seconds left for work."""
        return self.end - RESERVE_S - time.monotonic()

    def environment(self) -> dict[str, str]:
        """Return the environment of the slice's processes, with this process's import path."""
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        places = [Path(__file__).parent, *(Path(one).absolute() for one in given if one)]
        return {
            **os.environ,
            "MENS_EXP_CACHE": str(self.place / "cache"),
            "PYTHONPATH": os.pathsep.join(map(str, places)),
        }

    @contextlib.contextmanager
    def started(
        self, arguments: Sequence[str], log: Path, cwd: Path | None = None, **more: str
    ) -> Iterator[Any]:
        """Start ``python`` with output to a file; end the process tree at the end of the block."""
        with log.open("wb") as output:
            process = spawn_python(
                arguments,
                output=output,
                environment=self.environment() | more,
                cwd=cwd or self.place,
            )
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def finished(
        self, arguments: Sequence[str], log: Path, cwd: Path | None = None, **more: str
    ) -> int | None:
        """Run ``python`` and return its exit code; None if time ran out."""
        if self.left_s <= 0:
            return None
        with self.started(arguments, log, cwd, **more) as process:
            try:
                code: int = process.wait(self.left_s)
            except subprocess.TimeoutExpired:
                return None
            return code


def tests_slice(job: Job) -> Found:
    """Run the GPU tests; give up a test that exceeds the time even when run first."""
    lacking = [name for name in TESTS_NEED if importlib.util.find_spec(name) is None]
    if lacking:
        return Found(state=State.SKIPPED, reason=f"not installed: {', '.join(lacking)}")
    known = dict(job.earlier["tests"]) if job.earlier else {}
    log, report = job.place / "pytest.log", job.place / "tests.jsonl"
    words = ["-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "-o", "addopts=", "-p", "gpu_slices"]
    words += ["-W", "ignore::pytest.PytestWarning", "-p", "no:cacheprovider"]
    words += ["-p", "no:randomly", f"--basetemp={job.place / 'pytest'}"]
    words += [f"--deselect={name}" for name in known]
    code = job.finished(words, log, ROOT, **{REPORT: str(report)})
    lines = report.read_text("utf-8").splitlines() if report.is_file() else []
    told = [json.loads(line) for line in lines]
    tests = {one["test"]: one["outcome"] for one in told}
    status = tests.pop(SESSION, None)  # a crashed process may have any exit code
    unfinished = [name for name, outcome in tests.items() if outcome == UNFINISHED]
    if unfinished != list(tests)[:1]:  # the next start begins with it, with the full time
        tests = {name: outcome for name, outcome in tests.items() if outcome != UNFINISHED}
    tests = known | tests
    if code is None:
        return Found(state=State.STOPPED, reason=UNFINISHED, tests=tests)
    if status not in PYTEST_ENDED:
        return replace(refused(log, f"pytest ended with exit code {code}"), tests=tests)
    counted = dict.fromkeys(("passed", "failed", "skipped", UNFINISHED), 0)
    for outcome in tests.values():
        counted[outcome.partition(":")[0]] += 1
    total = ("all of them", len(tests))
    figures = [
        record.figure(f"GPU tests {name}", count, "tests", better, total)
        for (name, count), better in zip(
            counted.items(), (Better.HIGHER, *[Better.LOWER] * 3), strict=True
        )
    ]
    return Found(tests=tests, figures=figures)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record the start of a test (pytest hook)."""
    _tell(nodeid, UNFINISHED)


def pytest_runtest_logreport(report: Any) -> None:
    """Record the outcome of a test (pytest hook)."""
    if report.passed and report.when == "call":
        _tell(report.nodeid, report.outcome)
    elif not report.passed:
        found = report.longrepr  # of a skipped test: file, line, reason
        why = found[-1] if isinstance(found, tuple) else last_of(str(found))
        _tell(report.nodeid, f"{report.outcome}: {why.removeprefix('Skipped: ')}")


def pytest_sessionfinish(exitstatus: int) -> None:
    """Record that pytest has finished (pytest hook)."""
    _tell(SESSION, str(int(exitstatus)))


def _tell(nodeid: str, outcome: str) -> None:
    with Path(os.environ[REPORT]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": nodeid, "outcome": outcome}) + "\n")


@dataclass(kw_only=True, slots=True)
class Arm:
    """The parent's side of an arm: one library of a step slice.

    ``rates`` are tokens per second for each turn, ``seconds`` the time of each step.
    """

    name: str
    process: Any
    log: Path
    said: Path
    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    lines: int = 0

    def wait(self, until: float) -> dict[str, Any] | None:
        """Return the arm's next message; None if it has died or time has run out."""
        while time.monotonic() < until:
            told = self.said.read_text("utf-8").split("\n")[:-1] if self.said.is_file() else []
            if len(told) > self.lines:
                self.lines += 1
                line: dict[str, Any] = json.loads(told[self.lines - 1])
                return line
            if self.process.poll() is not None:
                return None
            time.sleep(gpu_arms.POLL_S)
        return None

    def why_not(self) -> str:
        """Return the reason why there was no message."""
        return UNFINISHED if self.process.poll() is None else last_line(self.log)


def step_slice(name: str, job: Job) -> Found:
    """Measure training steps of the arms in turns on one shape."""
    shape = (gpu_arms.DRY if job.is_dry else gpu_arms.SHAPES)[name]
    missing: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        arms = []
        for which in _arms(name, job, missing):
            log = job.place / f"{gpu_arms.slot_of(which)}.log"
            words = [str(Path(gpu_arms.__file__)), which, name, str(job.place), job.device]
            process = stack.enter_context(job.started(words, log))
            said = job.place / f"{gpu_arms.slot_of(which)}.said"
            arms.append(Arm(name=which, process=process, log=log, said=said))
        until = time.monotonic() + job.left_s
        for arm in arms:
            ready = arm.wait(until)
            if ready is None:
                missing[arm.name] = arm.why_not()
            else:
                arm.facts = ready["ready"]
        arms = [arm for arm in arms if arm.name not in missing]
        _take_turns(arms, shape.tokens, job, until, missing)
    arms = [arm for arm in arms if arm.rates]
    if OURS not in (arm.name for arm in arms):
        reason = missing.get(OURS, UNFINISHED)
        state = State.STOPPED if reason == UNFINISHED else State.FAILED
        return Found(state=state, reason=reason, missing=missing)
    figures = [*_figures_of_speed(arms), *_figures_of_memory(arms)]
    facts = {arm.name: _described(arm) for arm in arms}
    return Found(missing=missing, facts=facts, figures=figures, goals=_goals(name, arms, job))


def _described(arm: Arm) -> str:
    """Return the facts needed to interpret an arm's results."""
    kept = "recomputed" if arm.facts["recomputed"] else "kept"
    found = arm.facts.get("kernels", {}).items()
    parts = [part for part, library in found if not library.startswith("torch")]
    fused = f"; Liger-Kernel computes {', '.join(parts)}" if parts else ""
    return f"activations {kept}; {len(arm.rates)} turns, {len(arm.seconds)} steps{fused}"


def _arms(name: str, job: Job, missing: dict[str, str]) -> Iterator[str]:
    """Yield the arms that the machine can run, and give the reasons for the others."""
    yield OURS
    if name == "2x2048":
        yield UNCHECKPOINTED
    if job.is_dry or _has_fp8():
        yield FP8
    else:
        missing[FP8] = "needs compute capability 8.9"
    for arm, needs in gpu_arms.NEEDS.items():
        lacking = [one for one in needs if importlib.util.find_spec(one) is None]
        if lacking:
            missing[arm] = f"not installed: {', '.join(lacking)}"
        elif arm == UNSLOTH and job.is_dry:
            missing[arm] = "needs a CUDA device"
        else:
            yield arm


def _has_fp8() -> bool:
    import torch

    return torch.cuda.get_device_capability() >= (8, 9)


def _take_turns(
    arms: Sequence[Arm], tokens: int, job: Job, until: float, missing: dict[str, str]
) -> None:
    """Give each arm its turns, in reverse order in every second round."""
    took = 0.0
    for turn in range(2 if job.is_dry else TURNS):
        began = time.monotonic()
        if began + took > until:
            return
        for arm in [*arms][:: -1 if turn % 2 else 1]:
            if arm.name in missing:
                continue
            (job.place / f"{gpu_arms.slot_of(arm.name)}.go.{turn}").touch()
            line = arm.wait(until)
            if line is None:
                missing[arm.name] = arm.why_not()
                continue
            arm.seconds += line["seconds"]
            arm.rates.append(tokens * len(line["seconds"]) / sum(line["seconds"]))
            arm.memory = {key: value for key, value in line.items() if key.endswith("_gib")}
        took = time.monotonic() - began


def _figures_of_speed(arms: Sequence[Arm]) -> Iterator[Figure]:
    ours = next(arm for arm in arms if arm.name == OURS)
    for arm in arms:
        yield record.figure(f"{arm.name}: speed", arm.rates, "tokens/s", Better.HIGHER)
        yield record.figure(f"{arm.name}: a step", arm.seconds, "s", Better.LOWER)
        if arm is not ours:
            rounds = min(len(ours.rates), len(arm.rates))
            pair = (arm.name, arm.rates[:rounds])
            against = f"mens_exp beside {arm.name}: speed"
            yield record.figure(against, ours.rates[:rounds], "tokens/s", Better.HIGHER, pair)


def _figures_of_memory(arms: Sequence[Arm]) -> Iterator[Figure]:
    for arm in arms:
        allocated, plan = arm.memory["allocated_gib"], arm.facts.get("plan_gib")
        beside = None if plan is None else ("the plan's figure", plan)
        yield record.figure(f"{arm.name}: peak memory", allocated, "GiB", Better.LOWER, beside)
        if "reserved_gib" in arm.memory:
            reserved = arm.memory["reserved_gib"]
            yield record.figure(f"{arm.name}: peak reserved", reserved, "GiB", Better.LOWER)


def _goals(name: str, arms: Sequence[Arm], job: Job) -> list[Goal]:
    """Compare with the goals, which apply to one card and one shape."""
    by_name = {arm.name: arm for arm in arms}
    ours, other = by_name[OURS], by_name.get(UNSLOTH)
    judged = job.card is not None and GOAL_CARD in job.card["name"]
    goals = []
    if name == "2x2048":
        rate, memory = statistics.median(ours.rates), ours.memory["allocated_gib"]
        fast, small = rate >= GOAL_TOKENS_PER_S, memory <= GOAL_GIB
        goals = [
            Goal(
                name=f"speed on one {GOAL_CARD}",
                value=rate,
                goal=GOAL_TOKENS_PER_S,
                unit="tokens/s",
                better=Better.HIGHER,
                met=fast if judged else None,
            ),
            Goal(
                name="peak memory",
                value=memory,
                goal=GOAL_GIB,
                unit="GiB",
                better=Better.LOWER,
                met=small if judged else None,
            ),
        ]
    if other is not None:
        pairs = zip(ours.rates, other.rates, strict=False)
        ratio = statistics.median(one / two for one, two in pairs)
        goals.append(
            Goal(
                name="speed of mens_exp in that of Unsloth",
                value=ratio,
                goal=1.0,
                unit="times",
                better=Better.HIGHER,
                met=ratio >= 1,
            )
        )
    return goals


COLLECTIVES = """
import json, statistics, sys, time
from pathlib import Path
import torch
from mens_exp.planning.machine import Rank
from mens_exp.training.distributed import all_gather, joined

place, device, elements = Path(sys.argv[1]), torch.device(sys.argv[2]), int(sys.argv[3])
alone = Rank(rank=0, world_size=1, local_rank=0, local_world_size=1)
store = torch.distributed.FileStore(str(place / "store"), 1)
with joined(alone, device, store):
    values = torch.ones(elements, device=device)
    seconds = []
    for _ in range(12):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        torch.distributed.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    found = {
        "backend": torch.distributed.get_backend(),
        "seconds": seconds[2:],
        "is_right": bool((values == 1).all()) and all_gather({"a": 1}, alone) == [{"a": 1}],
    }
(place / "nccl.json").write_text(json.dumps(found))
"""
ADAPTER = 41_943_040  # elements: r 16 on the seven projections of 32 layers


def nccl_slice(job: Job) -> Found:
    """Join a process group of one process, as a run does, and all-reduce an adapter."""
    log, program = job.place / "nccl.log", job.place / "nccl.py"
    program.write_text(COLLECTIVES, "utf-8")
    elements = 1024 if job.is_dry else ADAPTER
    device = "cpu" if job.is_dry else "cuda:0"
    code = job.finished([str(program), str(job.place), device, str(elements)], log)
    if code is None:
        return Found(state=State.STOPPED, reason=UNFINISHED)
    if code:
        return refused(log, f"exit code {code}")
    found = json.loads((job.place / "nccl.json").read_text("utf-8"))
    if not found["is_right"]:
        reason = f"{found['backend']} gave other values than were sent"
        return Found(state=State.FAILED, reason=reason)
    name = f"{found['backend']}: all-reduce of {elements:,} f32 values, one process"
    first, *rest = (1000 * one for one in found["seconds"])
    beside = ("the first of them", first)
    return Found(figures=[record.figure(name, rest, "ms", Better.LOWER, beside)])


def main_job_slice(job: Job) -> Found:
    """Run the first command of the README."""
    log, run = job.place / "run.log", RunDir(job.place / "run")
    more = ["experiment=smoke", "trainer=cpu"] if job.is_dry else []
    code = job.finished(["-m", "mens_exp", *more, f"hydra.run.dir={run.path}"], log)
    if code is None:
        return Found(state=State.STOPPED, reason=UNFINISHED)
    if code:
        return refused(log, f"exit code {code}")
    results = Manifest.read(run.manifest).results
    base = ("base", results["base_val_loss"])
    figures = [
        record.figure("wall time", results["wall_s"], "s", Better.LOWER),
        record.figure(
            "validation loss, tuned", results["tuned_val_loss"], "nats", Better.LOWER, base
        ),
    ]
    for key, name, unit, better in (
        ("tokens_per_s", "speed", "tokens/s", Better.HIGHER),
        ("peak_cuda_bytes", "peak memory of the GPU", "GiB", Better.LOWER),
    ):
        value = results.get(key)
        if value is not None:
            scaled = value / gpu_arms.GIB if unit == "GiB" else value
            figures.append(record.figure(name, scaled, unit, better))
    return Found(figures=figures)


def refused(log: Path, what: str) -> Found:
    """Return a failure with its reason, or a skip if the machine lacks something."""
    text = log.read_text("utf-8", "replace")
    lacking = re.search(r"No module named '([^']+)'|is needed to .*|is not installed.*", text)
    if lacking is None:
        return Found(state=State.FAILED, reason=f"{what}: {last_line(log)}")
    reason = f"not installed: {lacking[1]}" if lacking[1] else last_line(log)
    return Found(state=State.SKIPPED, reason=reason)


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log."""
    return last_of(log.read_text("utf-8", "replace"))


def last_of(text: str) -> str:
    """Return the last non-empty line of a text, at most 500 characters."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")[:500]


WORK: dict[str, Callable[[Job], Found]] = {
    "2x2048": lambda job: step_slice("2x2048", job),
    "1x8192": lambda job: step_slice("1x8192", job),
    "main_job": main_job_slice,
    "nccl": nccl_slice,
    "tests": tests_slice,
}
