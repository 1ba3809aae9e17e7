"""A suite from an installed package: one object, one YAML file and this test."""

from __future__ import annotations

import json
import shutil
from string import ascii_lowercase

import pytest

from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.digest import manifest_digest, sha256_file
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import read_item_events
from mens_exp.config.suite import SuiteConfig, SuiteSpec
from mens_exp.errors import RequestError, SetupError
from mens_exp.evals.attempts import judged_once
from mens_exp.evals.engines import Completion
from mens_exp.evals.suite import Item, Judgement, suite_class

BASE = ("task=evaluate", "path=base", "model=tiny_llama", "trainer=cpu", "logger=none")
LETTERS = ("suite=letters", "suite.items=26", "suite.max_new_tokens=64", "eval.temperature=1")


def test_a_base_is_scored_on_an_installed_suite(typed, tmp_path):
    """The package judges each answer; the scorecard has the suite's self-test and digest."""
    typed(*BASE, *LETTERS, "hydra.run.dir=scored")
    run = RunDir(tmp_path / "scored")
    card = json.loads(run.scorecard.read_text("utf-8"))
    events = read_item_events(run.events)
    assert [event["item_id"] for event in events] == list(ascii_lowercase)
    judged = [event["item_id"] in event["completion"].casefold() for event in events]
    assert {True, False} == set(judged)
    assert [event["task_success"] for event in events] == judged
    base = card["conditions"]["base"]
    assert (card["suite"], base["task_success"]) == ("letters", pytest.approx(sum(judged) / 26))
    assert base["compile_at_1"] is None
    assert "judges words" in card["unknown"]["conditions.base.compile_at_1"]
    assert (card["self_test"]["references"], card["sandbox"]) == ({"whole": 26}, None)
    assert len(card["suite_digest"]) == 64
    sizes = [
        len(event["completion"]) for event, is_right in zip(events, judged, strict=True) if is_right
    ]
    assert base["letters/characters"] == pytest.approx(sum(sizes) / len(sizes))
    assert [event.get("values") for event in events] == [
        {"letters/characters": len(event["completion"])} if is_right else None
        for event, is_right in zip(events, judged, strict=True)
    ]
    about = {"unit": "characters", "direction": "min", "note": "of a right answer"}
    assert card["declared"] == {"letters/characters": about}
    assert "letters/characters" in run.report.read_text("utf-8")


@pytest.fixture(scope="module")
def swept(typed_in, tmp_path_factory):
    """The directory of a sweep of two arms with two seeds; do not change it."""
    directory = tmp_path_factory.mktemp("swept")
    rows = [{"prompt": f"Say {n}.", "response": f"word {n}"} for n in range(60)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny = ("model=tiny_llama", "trainer=cpu", "logger=none", "trainer.max_steps=2", "data=jsonl")
    tiny += ("data.path=rows.jsonl", "data.seq_len=64", "data.val_frac=0.1", "optim.lr=0.05")
    tiny += ("schedule=constant", "schedule.warmup_steps=0", "hydra.sweep.dir=all")
    tiny += ("trainer.accumulate_grad_batches=1",)
    typed_in(directory)("-m", *tiny, *LETTERS, "lora.r=2,4", "seed=1,2")
    return directory / "all"


@pytest.fixture
def sweep(swept, tmp_path):
    """Return the runs of a copy of the sweep, in the order of the command."""
    shutil.copytree(swept, tmp_path / "all")
    found = [RunDir(one) for one in (tmp_path / "all").iterdir() if one.is_dir()]
    return sorted(found, key=lambda run: run.path.name)


def tuned_sizes(run):
    return {
        event["item_id"]: len(event["completion"])
        for event in read_item_events(run.events)
        if event["condition"] == "tuned" and event["item_id"] in event["completion"].casefold()
    }


def mean_difference(run, other):
    """Return the mean difference over items that both answered correctly."""
    mine, theirs = tuned_sizes(run), tuned_sizes(other)
    both = mine.keys() & theirs.keys()
    return sum(mine[item] - theirs[item] for item in both) / len(both)


COMPARED = ("task=compare", "path=all", "logger=none", "compare.primary=letters/characters")


def test_its_own_kpi_decides_a_comparison(typed, sweep, tmp_path):
    """Its direction decides; values by hand, item by item for each seed."""
    typed(*COMPARED, "hydra.run.dir=compared")
    record = Comparison.read(tmp_path / "compared" / "compare.json")
    (contrast,) = record.contrasts
    found = contrast["kpis"]["letters/characters"]
    assert (found["unit"], found["direction"]) == ("characters", "min")
    expected = (mean_difference(sweep[2], sweep[0]) + mean_difference(sweep[3], sweep[1])) / 2
    sign = 1 if contrast["arm"] == "lora.r=4" else -1
    assert found["estimate"] == pytest.approx(sign * expected)
    decided = ("task=promote", "path=compared", "ledger=ledger.jsonl", "policy=eval_gate")
    typed(*decided, "policy.ceilings={letters/characters:1.0}", "hydra.run.dir=decided", code=4)
    entry = json.loads((tmp_path / "ledger.jsonl").read_text("utf-8").splitlines()[-1])
    rules = {
        rule["rule"]: rule
        for rule in entry["decision"]["rules"]
        if rule["kpi"] == "letters/characters"
    }
    (four,) = [arm for arm in record.arms if arm["name"] == contrast["arm"]]
    ceiling = rules["ceiling"]
    assert (ceiling["outcome"], ceiling["threshold"]) == ("failed", 1.0)
    assert ceiling["observed"] == pytest.approx(four["kpis"]["letters/characters"])
    worse = {True: "failed", False: "passed"}[sign * expected > 0.03]
    assert rules["regression"]["outcome"] == worse


def test_a_value_that_its_answer_contradicts_is_refused(typed, sweep):
    """It is refused even if the mean and all digests were adjusted."""
    run = sweep[0]
    lines = [json.loads(line) for line in run.events.read_text("utf-8").splitlines()]
    mine = [one for one in lines if one["condition"] == "tuned" and "values" in one]
    mine[0]["values"]["letters/characters"] -= 1
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    card = json.loads(run.scorecard.read_text("utf-8"))
    values = [one["values"]["letters/characters"] for one in mine]
    card["conditions"]["tuned"]["letters/characters"] = sum(values) / len(values)
    run.scorecard.write_text(json.dumps(card), "utf-8")
    rehash(run, run.events, run.scorecard)
    said = typed(*COMPARED, code=2).stderr
    assert "values: is not what its answer says" in " ".join(said.split())


def rewrite(run, **changes):
    """Edit a scorecard and update every digest of it in the run."""
    card = json.loads(run.scorecard.read_text("utf-8"))
    run.scorecard.write_text(json.dumps(card | changes), "utf-8")
    rehash(run, run.scorecard)


def rehash(run, *files):
    """Update every digest of edited files in the run, as a forger would."""
    manifest = json.loads(run.manifest.read_text("utf-8"))
    for file in files:
        manifest["outputs"][file.name] = sha256_file(file)
    *events, end = map(json.loads, run.telemetry.read_text("utf-8").splitlines())
    end["payload"]["manifest_sha256"] = manifest_digest(manifest)
    run.telemetry.write_text("".join(f"{json.dumps(one)}\n" for one in [*events, end]), "utf-8")
    manifest["outputs"][run.telemetry.name] = sha256_file(run.telemetry)
    run.manifest.write_text(json.dumps(manifest), "utf-8")


def test_another_declaration_than_that_of_the_class_is_refused(typed, sweep):
    """With another direction the worse arm would win; a note may be reworded."""
    about = {"unit": "characters", "direction": "min", "note": "of a right answer"}
    verify = ("task=inspect", f"path={sweep[0].path}", "inspect.verify=true")
    for forged in ({"direction": "max"}, {"unit": "words"}, None):
        declared = {} if forged is None else {"letters/characters": about | forged}
        for run in sweep:
            rewrite(run, declared=declared)
        for command, code in ((COMPARED, 2), (verify, 4)):
            done = typed(*command, code=code)
            said = " ".join((done.stdout + done.stderr).split())
            assert (
                "declared.letters/characters: contradicts what the suite's class declares" in said
            )
            assert "expected direction min, unit characters" in said
    rewrite(sweep[0], declared={"letters/characters": about | {"note": "reworded"}})
    for run in sweep[1:]:
        rewrite(run, declared={"letters/characters": about})
    typed(*verify)
    typed(*COMPARED, "hydra.run.dir=compared")


def test_a_declaration_that_is_none_is_refused(typed, sweep):
    """The scorecard was edited and names another suite."""
    about = {"unit": "characters", "direction": "up", "note": "of a right answer"}
    for run in sweep:
        rewrite(run, suite_digest="0" * 64, declared={"letters/characters": about})
    assert "is not a declaration of a metric" in typed(*COMPARED, code=2).stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("task_success", 1.0, "has the name of a built-in KPI"),
        ("canonical", 1.0, "has the name of a built-in KPI"),
        ("latency_m", 1.0, "has the name of a built-in KPI, or nearly so"),
        ("eval/pass_at_1", 1.0, "already recorded by every run"),
        ("own/x", float("nan"), "is not a finite number"),
    ],
)
def test_a_kpi_that_would_be_taken_for_another_is_refused(name, value, said):
    """A reserved name or an invalid value is refused at the first answer."""
    item = Item(id="a", messages=({"role": "user", "content": "?"},))
    completion = Completion(text="a", tokens_in=1, tokens_out=1, latency_ms=1.0, is_finished=True)
    judgement = Judgement(success=True, values={name: value})
    with pytest.raises(RequestError, match=said):
        judged_once(item, completion, judgement, "base")


@pytest.mark.parametrize(
    ("word", "said"), [("suite.items=27", "suite.items"), ("suite.path=x", "suite.path")]
)
def test_its_settings_are_those_of_its_schema(typed, word, said):
    """Bounds of the schema are checked before anything is loaded."""
    assert said in typed(*BASE, "suite=letters", word, code=2).stderr


@pytest.mark.parametrize("place", ["no_such_module:It", "math:pi", "mens_exp.errors:MensError"])
def test_a_suite_without_a_class_is_refused(place):
    """The import path is resolved when the suite is needed, and must give a suite."""
    spec = SuiteSpec(name="nowhere", schema=SuiteConfig, suite=place)
    with pytest.raises(SetupError, match="the suite nowhere cannot be used"):
        suite_class(spec)
