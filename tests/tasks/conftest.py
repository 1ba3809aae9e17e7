from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import pytest
from hand_written_runs import write_cycles

from mens_exp import cli
from mens_exp.artifacts.atomic import json_line, write_bytes, write_text
from mens_exp.artifacts.certificate import Inspection
from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Scorecard
from mens_exp.artifacts.sweep import JobState, LeftOut, SweepDir, SweepJob, SweepRecord
from mens_exp.config.compose import compose, config_digest, to_yaml
from mens_exp.config.compose import typed as typed_config
from mens_exp.config.overrides import check
from mens_exp.planning.contract import contract_of
from mens_exp.report.write import write_report


@pytest.fixture(scope="session")
def cell(tiny_run):
    """A finished training run, shared by all tests: do not change it."""
    checked = check(tiny_run)
    assert not checked.problems
    return checked.cells[0]


@pytest.fixture
def break_at():
    """Raise an error just before a micro-batch is trained on, until the patch is undone.

    It changes no number, so a test of it may use known probes; `monkeypatch` would forbid them.
    """
    from mens_exp.training.module import TrainingModule

    original = TrainingModule.training_step

    def planned(number, error=None):
        def step(self, batch, index):
            if batch.index == number:
                raise error or KeyboardInterrupt
            return original(self, batch, index)

        TrainingModule.training_step = step

    yield planned
    TrainingModule.training_step = original


@pytest.fixture
def broken(break_at, train_in):
    """A training run that was cancelled, or failed, before a micro-batch."""
    from mens_exp.tasks.run import Cancelled

    def made(directory, at, *overrides, error=None):
        break_at(at, error or Cancelled("SIGINT"))
        run = train_in(directory, *overrides, code=1 if error else 130)
        break_at(None)
        return run

    return made


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Type a command in an empty directory, and return what it said."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COLUMNS", "200")

    def command(*overrides, code=0):
        assert cli.main(list(overrides)) == code
        said = capsys.readouterr()
        return said.out + said.err

    return command


@pytest.fixture
def inspect(typed, tmp_path):
    """Inspect a path and return the record."""
    number = iter(range(99))

    def command(path, *overrides, code=0):
        own = tmp_path / "here" / f"inspection_{next(number)}"
        typed("task=inspect", f"path={path}", *overrides, f"hydra.run.dir={own}", code=code)
        return Inspection.read(own / "inspection.json")

    return command


@pytest.fixture(scope="session")
def study_at():
    """Write runs of arms and seeds, four items each, as their own training would leave them."""
    return lambda root, **how: write_study(root, Told(**how))


@pytest.fixture(scope="session")
def honest(shelf, study_at):
    """Write the runs of two cycles, not yet compared; shared by all tests: do not change."""

    def write(place):
        place.mkdir()
        write_cycles(place, study_at)

    return shelf("honest_cycles", write)


@pytest.fixture
def study(study_at, tmp_path):
    """Write a study below the test's own directory, and return where it is."""

    def written(name="runs", **how):
        root = tmp_path / "study" / name
        study_at(root, **how)
        return root

    return written


@pytest.fixture(scope="session")
def frozen():
    """Return the rules that a cycle freezes by default, in the form the ledger has them."""
    return {
        "alpha": 0.05,
        "test": "t",
        "condition": "tuned",
        "target": "these_items",
        "sequential": "none",
        "challenger": "burn",
        "incumbent": "qlora",
        "floors": {
            "strictness": 0.95,
            "compile_pass_1": 0.90,
            "semantic_task_success": 0.85,
            "anti_stub_pass": 0.92,
            "richness": 0.20,
        },
        "ceilings": {"trivial_placeholder_output": 0.08, "placeholder_marker_hits": 0.08},
        "share_margin": 0.02,
        "relative_margin": 0.1,
        "least_cycles": 2,
        "certificate": True,
    }


@pytest.fixture
def compare(typed, tmp_path):
    """Compare the runs below a path and return the record."""
    number = iter(range(99))

    def command(path, *overrides):
        own = tmp_path / "here" / f"comparison_{next(number)}"
        usual = [] if any(text.startswith("logger=") for text in overrides) else ["logger=none"]
        typed("task=compare", f"path={path}", *usual, *overrides, f"hydra.run.dir={own}")
        return Comparison.read(own / "compare.json")

    return command


@functools.cache  # composing with Hydra takes 0.3 s each time
def composed(*overrides):
    usual = ["model=tiny_llama", "trainer=cpu", "logger=none", "suite=none"]
    return compose([[*usual, *overrides]])[0]


@functools.cache  # the same for every study of these arms
def settled(overrides, seed):
    """Return a run's configuration as YAML, its digest and the record of its contract."""
    values = composed(*overrides).values.copy()
    values.seed = seed
    contract = contract_of(typed_config(values)).record()
    return to_yaml(values), config_digest(values), json.dumps(contract)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a study's runs are and measured.

    Attributes:
        arms: overrides of each.
        seeds: of each.
        passes: how many of the four items parse, by arm and seed.
        loss: validation loss, likewise.
        kpis: further fields of an item, by arm, seed and item.
        metrics: values of the run's own metrics, by arm and seed, and what is declared of them.
        suite: digest.
        rows: digest.
        torch: version.
        started: time.
        of: a study whose runs these evaluate.
        answering: how answers were made, by arm.
        overlap: how many of the four items the training rows contain, by arm.
    """

    arms: Any = ((), ("quant.double_quant=false",))
    seeds: Any = range(1, 7)
    passes: Any = lambda arm, seed: (seed + arm) % 4
    loss: Any = lambda arm, seed: 2 + seed / 100 - arm / 10
    kpis: Any = lambda *_: {}
    metrics: Any = (lambda *_: {}, {})
    suite: str = "ab" * 32
    rows: str = "e" * 64
    torch: str = "2.6"
    started: str = "2026-11-20T06:00:00.000Z"
    of: Any = None
    answering: Any = lambda _: {}
    overlap: Any = lambda _: None


def write_study(root, told):
    """Write one run for each seed and arm under a directory, as of a sweep."""
    cells = [(seed, arm) for seed in told.seeds for arm in range(len(told.arms))]
    for number, (seed, arm) in enumerate(cells):
        write_cell(root, number, seed, arm, told)


def write_cell(root, number, seed, arm, told):
    run, overrides = RunDir(root / f"{number}_{root.name}"), told.arms[arm]
    text, digest, contract = settled(tuple(overrides), seed)
    write_text(run.config, text)
    inputs = {
        "base_weights_sha256": "b" * 64,
        "data": {"rows_sha256": told.rows, "train_rows": 40, "train_truncated": 2},
    }
    is_training = told.of is None
    if told.of is not None:
        inputs["subject"] = str(told.of / f"{number}_{told.of.name}")
    overlap = None
    if (contained := told.overlap(arm)) is not None:
        overlap = {"against": "suite=own", "items": 4, "contained": contained}
        overlap["contained_frac"] = contained / 4
        inputs |= {} if is_training else {"overlap": overlap}
    write_scores(
        run,
        told.passes(arm, seed),
        told.suite,
        lambda item: told.kpis(arm, seed, item),
        told.answering(arm),
    )
    outputs = [run.config, run.scorecard, run.events]
    Manifest(
        run_id=run.path.name,
        task="train" if is_training else "evaluate",
        status=Status.SUCCEEDED,
        started_utc=told.started,
        overrides=[*overrides, f"seed={seed}"],
        choices=composed(*overrides).choices,
        config_digest=digest,
        contract=json.loads(contract) if is_training else None,
        data_contract={"overlap": [overlap]} if is_training and overlap else None,
        seed=seed,
        provenance={"commit": "c" * 40, "packages": {"torch": told.torch}},
        inputs=inputs,
        facts={"trainable_parameters": 1000, "metrics": told.metrics[1]},
        results={
            "metrics": told.metrics[0](arm, seed),
            "tuned_val_loss": told.loss(arm, seed),
            "base_val_loss": 5.0,
            "train_s": 10.0 + arm,
            "tokens": 4000,
            "supervised_tokens": 3000,
            "tokens_per_s": 400.0,
            "peak_rss_bytes": 2**30,
        },
        outputs={
            **{path.name: sha256_file(path) for path in outputs},
            "adapter/adapter.safetensors": "ad" * 32,
        },
    ).write(run.manifest)


def write_scores(
    run,
    passed,
    suite,
    kpis,
    answering,
):
    lines = [
        {
            "item_id": f"item{item}",
            "condition": condition,
            "prompt": "p",
            "reference": "r",
            "completion": "c",
            "parses": condition == "tuned" and item < passed,
            "finished": True,
            "error": None,
            "tokens_in": 5,
            "tokens_out": 7,
            **({"sample": sample} if "samples" in answering else {}),
            **kpis(item),
        }
        for condition in ("base", "tuned")
        for item in range(4)
        for sample in range(answering.get("samples", 1))
    ]
    write_bytes(run.events, b"".join(json_line(line, "events") for line in lines))
    Scorecard(
        suite="heldout_syntax",
        suite_digest=suite,
        items=4,
        conditions={"base": {"parse_rate": 0.0}, "tuned": {"parse_rate": passed / 4}},
        generation={"engine": "hf", **answering},
    ).write(run.scorecard)


@pytest.fixture
def sweep_over():
    """Write the record of a sweep over the runs that `study` has written, with so many seeds."""
    return made_sweep


def made_sweep(root, seeds):
    """Add a failed job to the runs of a study."""
    cells = [(seed, arm) for seed in range(1, seeds + 1) for arm in (0, 1)]
    jobs = [
        _job(number, f"{number}_{root.name}", seed, arm) for number, (seed, arm) in enumerate(cells)
    ]
    for job in jobs:
        write_report(RunDir(root / job["directory"]))
    failed = _job(len(jobs), f"{len(jobs)}_failed", 9, 1)
    failed["state"], failed["reason"] = JobState.FAILED, "killed by <b>SIGKILL</b>"
    SweepRecord(
        sweep_id=root.name,
        created_utc="2026-11-20T05:58:01.123Z",
        command=["seed=1,2", "quant.double_quant=true,false"],
        code_sha256="0" * 64,
        n_jobs=1,
        threads=1,
        retries=0,
        changes="refuse",
        jobs=[*jobs, failed],
        left_out=[LeftOut(number=99, differs=["lora.r=0"], why="invalid: <r>", same_as=None)],
    ).write(SweepDir(root).record)
    return SweepDir(root)


def _job(number, directory, seed, arm):
    value = ("true", "false")[arm]
    return SweepJob(
        number=number,
        directory=directory,
        differs=[f"seed={seed}", f"quant.double_quant={value}"],
        state=JobState.SUCCEEDED,
        reason=None,
        config_digest="c" * 64,
        contract=None,
        estimate={},
        results={},
        notes=[],
        attempts=[],
    )
