"""The command task=rejection_sampling, judged by its files alone."""

from __future__ import annotations

import hashlib
import json
import re
import shutil

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.tasks.run import Cancelled

DIGIT = re.compile(r"\d")
OWN = [
    *("model=tiny_llama", "trainer=cpu", "trainer.max_steps=40", "data.seq_len=96"),
    "trainer.accumulate_grad_batches=1",
    *("logger=none", "callbacks=minimal", "optim.lr=2e-2", "schedule.warmup_steps=0"),
    *("data=jsonl", "data.path=own.jsonl", "data.contract.max_overlap_frac=1"),
    *("lora.targets=[all_linear,lm_head]", "lora.alpha=64"),  # a random model learns to end
]
DRAWN = ["suite=jsonl", "suite.path=tasks.jsonl", "suite.max_new_tokens=6", "eval.samples=4"]


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def sample(*texts):
    quoted = ",".join(f"'{text}'" for text in (*DRAWN, "eval.temperature=1.0", *texts))
    return f"rejection_sampling.sample=[{quoted}]"


def command(*overrides, drawn=(), suite=("suite=none",)):
    fixed = ["task=rejection_sampling", "rejection_sampling.output=rounds", sample(*drawn)]
    return cli.main([*fixed, *OWN, *suite, *overrides])


def written(place):
    """Write rows answered with digits, tasks that ask for a digit, and tasks for scoring."""
    own = [{"prompt": f"Digit of item {n}?", "response": "37"[n % 2]} for n in range(60)]
    (place / "own.jsonl").write_text(lines(*own), "utf-8")
    for name, count in (("tasks", 8), ("scored", 4)):
        asked = [
            {"id": f"{name}{n}", "prompt": f"Digit of {name} {n}?", "expected": r"\d"}
            for n in range(count)
        ]
        rows = [{**one, "check": "regex"} for one in asked]
        (place / f"{name}.jsonl").write_text(lines(*rows), "utf-8")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Three rounds, scored by other tasks than they sample."""
    place = tmp_path_factory.mktemp("rounds")
    written(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        suite = ("suite=jsonl", "suite.path=scored.jsonl", "suite.max_new_tokens=6")
        assert command("hydra.run.dir=whole", suite=suite) == 0
    return place


@pytest.fixture
def here(tmp_path, monkeypatch):
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def lab(done, tmp_path, monkeypatch):
    """A copy of the three rounds, which a test may change."""
    shutil.copytree(done, tmp_path / "lab")
    monkeypatch.chdir(tmp_path / "lab")
    return tmp_path / "lab"


def rows_in(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def manifest(path):
    return Manifest.read(path / "manifest.json")


def rounds_of(place):
    return manifest(place / "whole").facts["rounds"]


def answers(place, number):
    """The finished answers of a round's sampled model that contain a digit, by task."""
    found = {}
    for event in rows_in(place / "rounds" / f"round_{number}" / "sample" / "events.jsonl"):
        if DIGIT.search(event["completion"]) and event["finished"]:
            found.setdefault(event["item_id"], set()).add(event["completion"].strip())
    return found


def test_rounds_train_on_the_finished_answers_that_pass(done):
    """Counted again from the events by the task's own pattern."""
    known = set()
    assert len(rounds_of(done)) == 3
    for one in rounds_of(done):
        place = done / "rounds" / f"round_{one['number']}"
        events = rows_in(place / "sample" / "events.jsonl")
        assert one["sampled"] == len(events) == 8 * 4
        assert one["passed"] == sum(bool(DIGIT.search(e["completion"])) for e in events)
        known |= {(task, a) for task, some in answers(done, one["number"]).items() for a in some}
        file = place / "rows.jsonl"
        rows = rows_in(file) if file.is_file() else []
        kept = {(row["provenance"]["item"], row["response"].strip()) for row in rows}
        assert kept <= known
        assert {task for task, _ in kept} == {task for task, _ in known}
        assert one["rows"] == len(rows) == len(kept)
        read = json.loads((place / "train" / "manifest.json").read_text())["data_contract"]
        assert one["train_rows"] == read["tokens"]["documents"]  # its own rows included
    assert rounds_of(done)[-1]["rows"] > 4


def test_each_round_samples_from_the_adapter_of_the_round_before(done):
    """Each is trained from the base, on its own rows and those of the user."""
    first = manifest(done / "rounds" / "round_1" / "sample")
    assert first.inputs["subject"] == "base"
    for number in (2, 3):
        place = done / "rounds" / f"round_{number}"
        before = done / "rounds" / f"round_{number - 1}" / "train" / "adapter"
        weights = (before / "adapter.safetensors").read_bytes()
        sampled = manifest(place / "sample")
        assert sampled.inputs["adapter_sha256"] == hashlib.sha256(weights).hexdigest()
        files = manifest(place / "train").inputs["data"]["files"]
        hashes = {name: one["sha256"] for name, one in files.items()}
        rows = (place / "rows.jsonl").read_bytes()
        assert hashlib.sha256(rows).hexdigest() in hashes.values()
        assert len(hashes) == 2
        assert not any("init_from" in text for text in manifest(place / "train").overrides)


def test_rounds_are_scored_by_other_tasks(done):
    """The KPI of a round is that of its training run's scorecard, and the report shows both."""
    for one in rounds_of(done):
        card = json.loads((done / one["train"] / "scorecard.json").read_text("utf-8"))
        assert one["kpi"] == "task_success"
        assert one["tuned"] == card["conditions"]["tuned"]["task_success"]
        assert one["base"] == card["conditions"]["base"]["task_success"]
    page = (done / "whole" / "report.html").read_text("utf-8")
    assert "task_success after" in page
    assert f"{rounds_of(done)[2]['passed']} of 32" in page


def test_a_finished_command_does_nothing_again(lab, capsys):
    """A fourth round continues from the third, and no file of a finished round is written again."""
    steps = sorted((lab / "rounds").glob("round_*/*/manifest.json"))
    before = {path: path.stat().st_mtime_ns for path in steps}
    suite = ("suite=jsonl", "suite.path=scored.jsonl", "suite.max_new_tokens=6")
    assert command("rejection_sampling.rounds=4", "hydra.run.dir=again", suite=suite) == 0
    assert {path: path.stat().st_mtime_ns for path in steps} == before
    found = manifest(lab / "again")
    assert found.facts["rounds"][:3] == rounds_of(lab)
    assert (lab / "rounds" / "round_4" / "sample").is_dir()
    assert (len(found.facts["rounds"]) == 4) == (found.results["stopped"] is None)


def test_another_command_is_refused(lab, capsys):
    """The message names the settings that differ, before anything is done."""
    suite = ("suite=jsonl", "suite.path=scored.jsonl", "suite.max_new_tokens=6")
    assert command("lora.r=4", suite=suite) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "round_1/sample: this round was made by another command" in said
    assert "without nothing, with lora.r=4" in said


def test_changed_answers_are_refused(lab, capsys):
    """After one more row in the answers, nothing is trained on them."""
    file = lab / "rounds" / "round_2" / "sample" / "passing.jsonl"
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"prompt": "Digit?", "response": "9", "group": "jsonl/x"}) + "\n")
    suite = ("suite=jsonl", "suite.path=scored.jsonl", "suite.max_new_tokens=6")
    assert command(suite=suite) == 2
    assert "is not the file that the sampling wrote" in capsys.readouterr().err


def test_an_interrupted_sampling_is_done_again(lab):
    """The incomplete answers are kept under another name, and the new rows are the same."""
    place = lab / "rounds" / "round_3"
    rows = (place / "rows.jsonl").read_bytes()
    shutil.rmtree(place / "train")
    killed = manifest(place / "sample")
    killed.status = Status.STARTED
    killed.write(place / "sample" / "manifest.json")
    suite = ("suite=jsonl", "suite.path=scored.jsonl", "suite.max_new_tokens=6")
    assert command(suite=suite) == 0
    assert (place / "sample.interrupted_1" / "manifest.json").is_file()
    assert (place / "rows.jsonl").read_bytes() == rows


def test_an_interrupted_training_goes_on_to_the_same_adapter(here, done, break_at):
    """Cancelled in round 2, the same command gives the uninterrupted adapter, bit for bit."""
    suite = ("suite=jsonl", "suite.path=scored.jsonl", "suite.max_new_tokens=6")
    more = ["callbacks=default", "checkpoint.every_n_steps=10"]
    assert command("rejection_sampling.rounds=1", *more, suite=suite) == 0
    break_at(25, Cancelled("SIGINT"))
    assert command("rejection_sampling.rounds=2", *more, suite=suite) == 130
    assert manifest(here / "rounds" / "round_2" / "train").status is Status.CANCELLED
    break_at(None)
    assert command("rejection_sampling.rounds=2", *more, suite=suite) == 0
    weights = "rounds/round_2/train/adapter/adapter.safetensors"
    assert len(manifest(here / "rounds" / "round_2" / "train").attempts) == 2
    assert (here / weights).read_bytes() == (done / weights).read_bytes()


def test_a_round_may_start_from_the_last_adapter_and_its_own_rows(here):
    """With start=last it continues from the round before; rows=newest drops earlier answers."""
    settings = ["rejection_sampling.start=last", "rejection_sampling.rows=newest"]
    assert command("rejection_sampling.rounds=2", *settings, "hydra.run.dir=whole") == 0
    second = here / "rounds" / "round_2"
    assert "lora.init_from=rounds/round_1/train" in manifest(second / "train").overrides
    kept = {row["provenance"]["item"] for row in rows_in(second / "rows.jsonl")}
    assert kept == set(answers(here, 2))
    assert rounds_of(here)[1]["kpi"] is None


def test_a_spent_budget_begins_no_further_round(here):
    """The round in progress is finished."""
    assert command("rejection_sampling.hours=1e-6", "hydra.run.dir=whole") == 0
    assert len(rounds_of(here)) == 1
    assert manifest(here / "whole").results["stopped"].startswith("the budget of 1e-06 hours")
    assert not (here / "rounds" / "round_2").exists()


def test_nothing_is_trained_if_no_answer_passes(here, capsys):
    """Without rows of the user, the first round has nothing to train on."""
    (here / "tasks.jsonl").write_text(
        lines({"id": "none", "prompt": "Say it.", "expected": "never said", "check": "contains"})
    )
    mine = [text for text in OWN if not text.startswith("data=") and "data.path" not in text]
    fixed = ["task=rejection_sampling", "rejection_sampling.output=rounds", sample()]
    assert cli.main([*fixed, *mine, "suite=none"]) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert "no answer was kept, so there is nothing to train on" in said
    assert "0 of 4 answers passed" in said
    assert not (here / "rounds" / "round_1" / "train").exists()


def test_a_command_without_place_or_tasks_is_refused(here, capsys):
    """Both are reported together."""
    assert cli.main(["task=rejection_sampling", *OWN, "suite=none"]) == 2
    said = capsys.readouterr().err
    assert "rejection_sampling.output: no output directory given" in said
    assert "rejection_sampling.sample: no tasks given" in said


@pytest.mark.parametrize(
    ("drawn", "overrides", "code", "said"),
    [
        (["path=latest"], [], 2, "path=latest"),
        (["optim.lr=1"], [], 2, "optim.lr: has no effect with task=evaluate"),
        (["suite=mini_python"], [], 2, "suite=mini_python is an evaluation"),
        (["eval.engine=openai"], [], 2, "a server's model stays the same"),
        (["suite.path=missing.jsonl"], [], 2, "missing.jsonl"),
        ([], ["data=synthetic"], 2, "only files of rows can be added"),
        ([], ["lora.init_from=somewhere"], 2, "rounds begin at the base model"),
        ([], ["optim.lrr=1"], 2, "optim.lrr: unknown key"),
        ([], ["suite=jsonl", "suite.path=tasks.jsonl"], 4, "8 of 8 tasks"),
    ],
)
def test_rounds_that_could_not_end_are_not_begun(here, capsys, drawn, overrides, code, said):
    """They are refused before hours of sampling."""
    is_own = {"data=jsonl", "data.path=own.jsonl"} if "data=synthetic" in overrides else set()
    typed = [text for text in OWN if text not in is_own]
    fixed = ["task=rejection_sampling", "rejection_sampling.output=rounds", sample(*drawn)]
    suite = [] if "suite=jsonl" in overrides else ["suite=none"]
    assert cli.main([*fixed, *typed, *suite, *overrides]) == code
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (here / "rounds").exists()
