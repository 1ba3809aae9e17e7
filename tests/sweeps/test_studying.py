"""Studies: one file, one command, one page."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

from mens_exp import cli
from mens_exp.artifacts.comparison import Comparison, Verdict
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.sweep import JobState, SweepDir, SweepRecord
from mens_exp.config.compose import study_in
from mens_exp.config.promotion import Stopping, StudyBudget, StudyConfig
from mens_exp.errors import ConfigError, RequestError
from mens_exp.report.comparison_view import hypothesis
from mens_exp.sweeps import study_request, studying
from mens_exp.tasks.promotion_evidence import _are_registered

HYPOTHESIS = "A model of rank 8 has a lower loss after two steps than one of rank 2."


def settings(rows, **changes):
    """A study of two ranks and two seeds, whose runs take a second each."""
    shared = [
        *("model=tiny_llama", "trainer=cpu", "suite=none", "logger=none", "callbacks=minimal"),
        *("data=jsonl", f"data.path={rows}", "data.seq_len=192", "data.val_frac=0.1"),
        *("data.heldout_frac=0.1", "trainer.max_steps=2", "schedule=constant"),
        "trainer.accumulate_grad_batches=1",
    ]
    usual = {
        "hypothesis": HYPOTHESIS,
        "shared": shared,
        "grid": {"lora.r": [2, 8]},
        "seeds": [5, 6],
        "margin": 0.001,
        "budget": {"runs": 4, "hours": 2},
    }
    return {**usual, **changes}


def write(place, values, name="ranks"):
    """Write a study as an option of the working directory."""
    file = place / "conf" / "study" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    told = {"defaults": ["/schema/study/study@_here_", "_self_"], **values}
    file.write_text(f"# What is asked.\n{yaml.safe_dump(told, sort_keys=False)}", "utf-8")
    return file


@pytest.fixture(scope="module")
def conducted(tmp_path_factory, rows_file):
    """A completed study in its own working directory; do not change it."""
    place = tmp_path_factory.mktemp("study")
    write(place, settings(rows_file))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert cli.main(["study=ranks", "hydra.launcher.n_jobs=1"]) == 0
    return place


@pytest.fixture
def lab(conducted, tmp_path, monkeypatch):
    """A copy of the completed study, which a test may change."""
    shutil.copytree(conducted, tmp_path / "lab")
    record = tmp_path / "lab" / "outputs" / "study" / "ranks" / "sweep.json"
    for file in (record, *record.parent.glob("comparison_*/compare.json")):
        text = file.read_text("utf-8")
        file.write_text(text.replace(str(conducted), str(tmp_path / "lab")), "utf-8")
    monkeypatch.chdir(tmp_path / "lab")
    return tmp_path / "lab"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(capsys):
    """Run a command that must exit with 2 and change nothing; return its message."""

    def said(*arguments):
        before = {path: path.stat().st_mtime_ns for path in Path.cwd().rglob("*")}
        assert cli.main(list(arguments)) == 2
        after = {path: path.stat().st_mtime_ns for path in Path.cwd().rglob("*")}
        assert {p: t for p, t in after.items() if p.name != "sweep.lock"} == before
        return " ".join(capsys.readouterr().err.split())

    return said


def record_of(place):
    return SweepRecord.read(SweepDir(place / "outputs" / "study" / "ranks").record)


def entries(place):
    ledger = place / "outputs" / "study" / "ranks" / "ledger.jsonl"
    return [json.loads(line) for line in ledger.read_text("utf-8").splitlines()]


def manifests(place):
    found = (place / "outputs" / "study" / "ranks").glob("[0-9]*/manifest.json")
    return [Manifest.read(file) for file in sorted(found)]


def test_a_study_is_registered_before_any_of_its_runs(conducted):
    """The entry has the arms, seeds, KPI, rules and digest, and is older than every run."""
    first = entries(conducted)[0]
    cycle = first["cycle"]
    assert cycle["cycle"] == "ranks"
    assert cycle["arms"] == ["lora.r=2", "lora.r=8"]
    assert (cycle["seeds"], cycle["factor"], cycle["suite_digest"]) == ([5, 6], "lora.r", None)
    assert (cycle["kpi"], cycle["direction"], cycle["margin"]) == ("val_loss", "lower", 0.001)
    assert cycle["study"]["hypothesis"] == HYPOTHESIS
    assert cycle["frozen"]["sequential"] == "none"
    runs = manifests(conducted)
    assert sorted((run.seed, run.facts["trainable_parameters"]) for run in runs) == sorted(
        (seed, 2048 * rank) for seed in (5, 6) for rank in (2, 8)
    )
    assert all(run.started_utc > first["utc"] for run in runs)


def test_its_comparison_is_the_registered_one(conducted):
    """Differences by seed, calculated from the runs' records; the ledger froze each run."""
    [file] = (conducted / "outputs" / "study" / "ranks").glob("comparison_*/compare.json")
    made = Comparison.read(file)
    assert (made.cycle, made.exploratory, made.declared) == ("ranks", None, True)
    loss = {(r.seed, r.facts["trainable_parameters"]): r.results for r in manifests(conducted)}
    by_hand = [
        loss[seed, 16384]["tuned_val_loss"] - loss[seed, 4096]["tuned_val_loss"] for seed in (5, 6)
    ]
    kpi = made.contrasts[0]["kpis"]["val_loss"]
    assert kpi["differences"] == pytest.approx(by_hand)
    assert len(entries(conducted)[1]["evidence"]) == 4


def test_its_page_says_what_was_claimed_and_what_came_of_it(conducted):
    """The page has the hypothesis, the registration and the answer."""
    page = (conducted / "outputs" / "study" / "ranks" / "sweep.html").read_text("utf-8")
    for text in (HYPOTHESIS, "entry 1 of", entries(conducted)[0]["sha256"], "for lora.r=8"):
        assert text in page
    assert "The hypothesis" in page
    assert "python -m mens_exp study=ranks" in page
    assert "-m study" not in page


def test_the_same_command_again_runs_nothing(lab, capsys):
    """The runs are verified, and the answer is shown again."""
    before = manifests(lab)
    assert cli.main(["study=ranks"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The hypothesis" in said
    assert manifests(lab) == before
    assert len(list((lab / "outputs" / "study" / "ranks").glob("comparison_*"))) == 1


def test_an_interrupted_study_goes_on_where_it_was(lab):
    """The missing run is repeated, and the seeds are compared again."""
    place = lab / "outputs" / "study" / "ranks"
    job = next(job for job in record_of(lab).jobs if job["number"] == 3)
    run = place / job["directory"]
    kept = Manifest.read(run / "manifest.json").results["tuned_val_loss"]
    for file in list(run.iterdir()):
        if file.name not in {"job.json", "config.yaml"}:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    before = {m.run_id: m.started_utc for m in manifests(lab)}
    # The ledger froze the deleted run, so its later entries are removed.
    ledger = place / "ledger.jsonl"
    ledger.write_text(ledger.read_text("utf-8").splitlines(keepends=True)[0], "utf-8")
    assert cli.main(["study=ranks"]) == 0
    after = {m.run_id: m for m in manifests(lab)}
    assert {name: after[name].started_utc for name in before} == before
    assert after[run.name].results["tuned_val_loss"] == kept
    assert record_of(lab).study["comparison"] == "comparison_2"


def test_a_cancelled_study_is_not_looked_at(here, rows_file, capsys):
    """Seeds are compared once; an earlier look would count against the result."""
    write(here, settings(rows_file))
    place = here / "outputs" / "study" / "ranks"

    def interrupt():
        while not [job for job in _finished(place) if job.startswith("0_")]:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert cli.main(["study=ranks", "hydra.launcher.n_jobs=1"]) == 130
    said = " ".join(capsys.readouterr().out.split())
    assert re.search("Not compared yet: [12] of 4 runs are done", said)
    assert not list(place.glob("comparison_*"))
    kinds = [json.loads(line)["kind"] for line in (place / "ledger.jsonl").read_text().splitlines()]
    assert kinds == ["cycle"]


def test_a_study_cancelled_after_a_whole_seed_is_not_looked_at(lab, capsys):
    """The signal may come just after a run succeeded, so that no run counts as cancelled."""
    place, record = lab / "outputs" / "study" / "ranks", record_of(lab)
    record.jobs, record.study["later"] = record.jobs[:2], record.jobs[2:]
    record.study["comparison"] = None
    request = study_request.requested(["study=ranks"])
    assert studying._conclude(request, SweepDir(place), record, []) == []
    assert "Not compared yet: 2 of 4 runs are done" in " ".join(capsys.readouterr().out.split())
    assert record.study["comparison"] is None


def _finished(place):
    """Return the directories of the runs that the record calls succeeded."""
    try:
        jobs = json.loads((place / "sweep.json").read_text("utf-8"))["jobs"]
    except FileNotFoundError:
        return []
    return [job["directory"] for job in jobs if job["state"] == "succeeded"]


def test_a_run_that_was_made_again_is_not_the_one_that_was_frozen(lab, capsys):
    """A run whose record was edited contradicts the ledger."""
    place = lab / "outputs" / "study" / "ranks"
    run = place / record_of(lab).jobs[0]["directory"]
    told = json.loads((run / "manifest.json").read_text("utf-8"))
    told["notes"].append("edited")
    (run / "manifest.json").write_text(json.dumps(told), "utf-8")
    record = record_of(lab)
    record.study["comparison"] = None
    record.write(SweepDir(place).record)
    cli.main(["study=ranks"])
    assert "contradicts the ledger" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seeds": [5, 6, 7]}, "seeds was [5, 6] and is [5, 6, 7]"),
        ({"margin": 0.0}, "margin was 0.001 and is 0.0"),
        ({"hypothesis": "It is higher."}, "hypothesis was A model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_edited_study_is_refused(lab, rows_file, refused, change, said):
    """The message names the change, and suggests another name for the study."""
    write(lab, settings(rows_file, **change))
    told = refused("study=ranks")
    assert "the study was edited after it was registered" in told
    assert said in told
    assert "under another name" in told


def test_a_study_that_is_there_is_continued_by_its_own_command(lab, refused):
    """Planning it again names the command, because sweep.resume refuses a study."""
    told = refused("study=ranks", "task=plan")
    assert "a sweep already exists here" in told
    assert "python -m mens_exp study=ranks" in told


def test_an_edit_of_the_record_does_not_help(lab, rows_file, refused):
    """The ledger has the digest as well."""
    write(lab, settings(rows_file, margin=0.0))
    record = record_of(lab)
    record.study["settings"]["margin"] = 0.0
    record.study["sha256"] = study_request.digest(
        study_request.settings_of(study_in(lab / "conf/study/ranks.yaml"), only_changed=True)
    )
    record.write(SweepDir(lab / "outputs" / "study" / "ranks").record)
    assert "the study was edited" in refused("study=ranks")


def test_a_comment_is_no_edit(lab, rows_file):
    """Only values are registered, neither comments nor the order of keys."""
    values = settings(rows_file)
    file = write(lab, dict(reversed(values.items())))
    file.write_text(file.read_text("utf-8") + "# more words\n", "utf-8")
    assert cli.main(["study=ranks"]) == 0


def test_a_sweep_of_a_study_goes_on_by_the_study(lab, refused):
    """The study's own rules say which runs are due."""
    said = refused("sweep.resume=outputs/study/ranks")
    assert "python -m mens_exp study=ranks" in said


def test_a_plan_shows_the_runs_and_registers_nothing(here, rows_file, capsys):
    """With the study in a file, as an experiment keeps it."""
    file = here / "experiments" / "ranks" / "study.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(settings(rows_file)), "utf-8")
    assert cli.main(["study=experiments/ranks/study.yaml", "task=plan"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "lora.r=2 seed=5" in said
    assert "4 cells" in said
    assert "Claim val_loss is lower by more than 0.001, against lora.r=2" in said
    assert "python -m mens_exp study=experiments/ranks/study.yaml" in said
    assert not (here / "outputs").exists()


def test_a_study_over_its_budget_is_not_started(here, rows_file, refused, make_sweep):
    """Too many runs or hours in the plan are refused before the registration."""
    write(here, settings(rows_file, budget={"runs": 3}))
    assert "study.budget.runs: the study costs more than its budget" in refused("study=ranks")
    study = StudyConfig(hypothesis="h", grid={"lora.r": [2, 8]}, seeds=[1])
    jobs = make_sweep(*({"estimate": {"time_s": 1900.0}} for _ in range(2))).jobs
    study.budget = StudyBudget(hours=1.1)
    study_request.refuse_over_budget(study, jobs)
    study.budget = StudyBudget(hours=1.0)
    with pytest.raises(RequestError, match=r"study.budget.hours.*about 1.06 hours for 2 runs"):
        study_request.refuse_over_budget(study, jobs)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["study=rank"], "study: unknown option found rank"),
        (["study=ranks", "lora.r=4"], "lora.r: is determined by the study's file"),
        (["study=ranks", "study.seeds=[1]"], "study.seeds: is determined by the study's file"),
        (["study=ranks", "ledgers=a"], "ledgers: is determined by the study's file"),
        (["study=ranks", "task=compare"], "task: a study only trains and compares"),
        (["-m", "study.seeds=[1]", "seed=1,2"], "study.seeds: unknown key"),
        (["-m", "study=ranks"], "study: a study defines its own runs"),
        (["study=none.yaml"], "none.yaml: cannot be read found No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_no_study_is_told(here, rows_file, refused, arguments, said):
    """The message says what is wrong with the command."""
    write(here, settings(rows_file))
    assert said in refused(*arguments)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arms": {"a": ["lora.r=2"], "b": ["lora.r=4"]}}, "has arms, or a grid"),
        ({"grid": {}}, "has arms, or a grid"),
        ({"grid": {"lora.r": 2}}, "study.grid.lora.r: must be a list of values"),
        ({"grid": {"lora.r": [2]}}, "must list at least two arms"),
        ({"seeds": [1]}, "study.seeds: must list at least two distinct seeds"),
        ({"seeds": [1, 1]}, "study.seeds: must list at least two distinct seeds"),
        ({"primary": "val_los"}, "study.primary: unknown KPI found val_los expected a known name"),
        ({"primary": "task_success"}, "study.primary: is measured by a suite, but none is chosen"),
        ({"shared": ["seed=3"]}, "study.shared: is determined by the study"),
        ({"shared": ["train"]}, "study.shared: not an override found train"),
        ({"grid": {"seed": [1, 2]}}, "study.grid: is determined by the study"),
        ({"stopping": "first_verdict", "test": "sign_flip"}, "study.sequential"),
    ],
    ids=str,
)
def test_a_study_without_a_comparison_is_told(here, rows_file, refused, change, said):
    """Each problem is reported at its setting."""
    write(here, settings(rows_file, **change))
    assert said in refused("study=ranks")


def test_arms_that_differ_in_nothing_are_told(here, rows_file, refused):
    """They would be one run, or two equal runs."""
    arms = {"one": ["lora.r=16"], "other": ["lora.alpha=16"]}
    write(here, settings(rows_file, grid={}, arms=arms))
    assert "two arms of the study are the same" in refused("study=ranks")
    arms = {"one": ["lora.rr=16"], "other": ["lora.r=2"]}
    write(here, settings(rows_file, grid={}, arms=arms))
    assert "lora.rr: unknown key" in refused("study=ranks")


def test_two_studies_of_one_ledger_share_no_seed(lab, rows_file, capsys):
    """Seeds of an earlier cycle in the ledger are refused; it and its runs do not change."""
    write(lab, settings(rows_file, margin=0.5), "other")
    before = manifests(lab), entries(lab)
    ledger = "ledger=outputs/study/ranks/ledger.jsonl"
    assert cli.main(["study=other", ledger]) == 2
    assert "study.seeds: the seeds belong to an earlier cycle" in " ".join(
        capsys.readouterr().err.split()
    )
    assert (manifests(lab), entries(lab)) == before
    assert len(before[0]) == 4
    assert not list((lab / "outputs" / "study" / "other").glob("*/manifest.json"))


def test_a_file_that_is_no_study_names_its_key(tmp_path):
    """A misspelt key must not silently become a default."""
    file = tmp_path / "study.yaml"
    file.write_text("hypothesis: h\nseeds: [1, 2]\nseed: 3\n", "utf-8")
    with pytest.raises(ConfigError, match=r"study.yaml.*seed"):
        study_in(file)
    file.write_text("hypothesis: h\n", "utf-8")
    with pytest.raises(ConfigError, match="no seeds"):
        study_in(file)
    file.write_text("[1", "utf-8")
    with pytest.raises(ConfigError, match=r"cannot be read"):
        study_in(file)


def waiting(number, seed):
    return {"number": number, "directory": f"{number}_x", "differs": [f"seed={seed}"]}


@pytest.fixture
def seeds(make_sweep, tmp_path, monkeypatch):
    """A feed of two arms over four seeds, with the verdicts that it will find."""

    def made(verdicts, **settings_of_study):
        study = StudyConfig(
            hypothesis="h", grid={"lora.r": [2, 8]}, seeds=[1, 2, 3, 4], **settings_of_study
        )
        record = make_sweep(*({} for _ in range(8)))
        record.study = {"factors": ["lora.r"], "later": record.jobs, "stopped": None}
        record.jobs = []
        looks = iter(verdicts)

        def conducted(paths, runs, factors, compared):
            assert compared.sequential.value == "always_valid"
            verdict = next(looks)
            contrasts = [{"arm": "lora.r=8", "kpis": {"val_loss": {"verdict": verdict}}}]
            return SimpleNamespace(primary="val_loss", contrasts=contrasts)

        monkeypatch.setattr(studying, "conducted", conducted)
        monkeypatch.setattr(studying, "read_study", lambda _: SimpleNamespace(runs=[]))
        console = Console(file=io.StringIO(), width=200)
        return studying.Seeds(study, SweepDir(tmp_path), record, console), record

    return made


def run_all(feed, record, state=JobState.SUCCEEDED, wall_s=1.0):
    """End each job as soon as it is supplied; return their number."""
    while feed.supply():
        record.jobs[-1]["state"], record.jobs[-1]["results"] = state, {"wall_s": wall_s}
    return len(record.jobs)


def test_without_looks_every_seed_runs(seeds):
    """There is only one look, after the last seed."""
    feed, record = seeds([])
    assert run_all(feed, record) == 8
    assert record.study["stopped"] is None


def test_the_first_verdict_ends_a_study_that_looks(seeds):
    """Here after the third seed: the fourth is not started, and the record says why."""
    verdicts = [Verdict.NOT_REACHABLE, Verdict.NO_DIFFERENCE, Verdict.WORSE]
    feed, record = seeds(verdicts, stopping=Stopping.first_verdict)
    assert run_all(feed, record) == 6
    assert record.study["stopped"] == "every arm has a verdict after 3 seeds"
    assert [job["number"] for job in record.study["later"]] == [6, 7]


def test_a_seed_begins_when_the_one_before_has_ended_well(seeds):
    """After a failed arm there is nothing to compare, and later seeds would be wasted."""
    feed, record = seeds([], stopping=Stopping.first_verdict)
    assert [feed.supply(), feed.supply(), feed.supply()] == [True, True, False]
    for job, state in zip(record.jobs, (JobState.SUCCEEDED, JobState.FAILED), strict=True):
        job["state"] = state
    assert feed.supply() is False
    assert record.study["stopped"] is None


def test_a_spent_budget_starts_no_further_seed(seeds):
    """A seed that has started is finished, since one arm alone says nothing."""
    feed, record = seeds([], budget=StudyBudget(hours=1.0))
    assert run_all(feed, record, wall_s=1000.0) == 4
    assert record.study["stopped"].startswith("the budget of 1 hours is spent: 1.11")


@pytest.mark.parametrize(
    ("seen", "stopping", "is_registered"),
    [
        ({3, 1, 2}, "all_seeds", True),
        ({3, 1}, "all_seeds", False),
        ({3, 1}, "first_verdict", True),
        ({1, 2}, "first_verdict", False),
        (set(), "first_verdict", False),
        ({3, 1, 2, 4}, "first_verdict", False),
    ],
)
def test_registered_seeds_are_all_or_the_first_ones(seen, stopping, is_registered):
    """With looks, a study may end early, but may not choose its seeds."""
    cycle = {"seeds": [3, 1, 2], "study": {"stopping": stopping}}
    assert _are_registered(seen, cycle) is is_registered


@pytest.mark.parametrize(
    ("low", "high", "margin", "claim", "answer"),
    [
        (-0.3, -0.2, 0.1, "lower by more than 0.1", "holds"),
        (-0.3, -0.05, 0.1, "lower by more than 0.1", "stays open"),
        (-0.05, 0.2, 0.1, "lower by more than 0.1", "is refuted"),
        (None, None, 0.1, "lower by more than 0.1", "stays open"),
        (-0.05, 0.08, -0.1, "higher by less than 0.1", "holds"),
        (0.05, 0.15, -0.1, "higher by less than 0.1", "stays open"),
        (0.11, 0.2, -0.1, "higher by less than 0.1", "is refuted"),
    ],
)
def test_a_hypothesis_holds_if_the_interval_lies_beyond_its_margin(
    low, high, margin, claim, answer
):
    """A negative margin claims that an arm is not worse."""
    kpi = {"low": low, "high": high, "estimate": -0.2, "seeds": [1, 2], "verdict": Verdict.BETTER}
    contrast = {"arm": "a", "confounded_by": [], "kpis": {"val_loss": kpi}}
    record = SimpleNamespace(primary="val_loss", contrasts=[contrast], sequential="none")
    [note] = hypothesis(record, {"direction": "lower", "margin": margin})
    assert note.text.startswith(f"The hypothesis {answer} for a. Claimed: val_loss is {claim}. ")
    contrast["confounded_by"] = ["another suite"]
    [note] = hypothesis(record, {"direction": "lower", "margin": 0.1})
    assert note.text.startswith("The hypothesis stays open for a (confounded)")


@pytest.mark.parametrize(
    ("seeds", "sequential", "verdict", "answer"),
    [
        (2, "none", Verdict.NO_DIFFERENCE, "stays open"),
        (5, "none", Verdict.NO_DIFFERENCE, "stays open"),
        (6, "none", Verdict.NO_DIFFERENCE, "holds"),  # 2 / 2^6 is below 0.05
        (6, "always_valid", Verdict.NO_DIFFERENCE, "stays open"),
        (20, "always_valid", Verdict.NO_DIFFERENCE, "holds"),
        (20, "none", Verdict.NOT_REACHABLE, "stays open"),
    ],
)
def test_equal_differences_need_the_seeds_of_a_sign_test(seeds, sequential, verdict, answer):
    """Their interval is a point, even for two seeds that measured nothing."""
    kpi = {"low": 0.0, "high": 0.0, "estimate": 0.0, "seeds": [*range(seeds)], "level": 0.95}
    kpi["verdict"] = verdict
    contrast = {"arm": "a", "confounded_by": [], "kpis": {"task_success": kpi}}
    record = SimpleNamespace(primary="task_success", contrasts=[contrast], sequential=sequential)
    [note] = hypothesis(record, {"direction": "higher", "margin": -0.01})
    assert note.text.startswith(f"The hypothesis {answer} ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reference": "everything"}, "study.reference: does not name an arm found everything"),
        ({"primary": "validation_loss"}, "study.primary: unknown KPI found validation_loss"),
    ],
)
def test_a_study_that_could_not_be_compared_is_not_registered(
    here, rows_file, refused, changes, said
):
    """The runs would be wasted, because a corrected file is another study."""
    write(here, settings(rows_file, **changes))
    assert said in refused("study=ranks", "task=plan")
    assert said in refused("study=ranks")


def test_a_reference_may_be_named_as_the_file_names_its_arms(here, rows_file):
    """The comparison uses the name that it gives to arms itself."""
    arms = {"small": ["lora.r=2"], "large": ["lora.r=8"]}
    write(here, settings(rows_file, grid={}, arms=arms, reference="large"))
    assert cli.main(["study=ranks", "hydra.launcher.n_jobs=1"]) == 0
    place = here / "outputs" / "study" / "ranks"
    assert Comparison.read(place / "comparison_1" / "compare.json").reference == "lora.r=8"


def test_a_comparison_that_fails_is_an_error_and_its_page_answers_nothing(lab, capsys, monkeypatch):
    """No other comparison replaces the registered one."""
    record = record_of(lab)
    record.study["comparison"] = None
    record.write(SweepDir(lab / "outputs" / "study" / "ranks").record)

    def fails(*_):
        raise RequestError("nothing to compare", where="for the test")

    monkeypatch.setattr(studying, "_compared", fails)
    assert cli.main(["study=ranks"]) == 2
    assert "Not compared: for the test: nothing to compare" in capsys.readouterr().out
    page = (lab / "outputs" / "study" / "ranks" / "sweep.html").read_text("utf-8")
    assert "Not compared: the registered comparison failed" in page
    assert "The hypothesis stays open" not in page


def test_runs_that_a_ledger_froze_may_be_compared_by_another_kpi(
    conducted, tmp_path, monkeypatch, capsys
):
    """The comparison is exploratory; an edited record is still refused."""
    monkeypatch.chdir(conducted)
    place = Path("outputs/study/ranks")
    command = ["task=compare", f"path={place}", "compare.primary=val_bits_per_byte"]
    command += [f"ledger={place}/ledger.jsonl", "logger=none"]
    assert cli.main([*command, f"hydra.run.dir={tmp_path / 'looked'}"]) == 0
    made = Comparison.read(tmp_path / "looked" / "compare.json")
    assert "KPI" in made.exploratory
    run = min(place.glob("[0-9]*/manifest.json"))
    before = run.read_bytes()
    run.write_bytes(before + b"\n")
    capsys.readouterr()
    try:
        assert cli.main([*command, f"hydra.run.dir={tmp_path / 'edited'}"]) == 2
    finally:
        run.write_bytes(before)
    assert "contradicts the ledger" in capsys.readouterr().err


def test_a_study_that_was_killed_before_its_registration_registers(lab):
    """No run had started, so the entry is still the first."""
    place = lab / "outputs" / "study" / "ranks"
    record = record_of(lab)
    record.study |= {"later": record.jobs, "entry": None, "entry_sha256": None}
    record.study |= {"registered_utc": None, "comparison": None, "stopped": "for the test"}
    record.jobs = []
    record.write(SweepDir(place).record)
    (place / "ledger.jsonl").unlink()
    assert cli.main(["study=ranks"]) == 0
    assert record_of(lab).study["entry"] == 1
    assert entries(lab)[0]["cycle"]["cycle"] == "ranks"
    assert Status.SUCCEEDED in {m.status for m in manifests(lab)}
