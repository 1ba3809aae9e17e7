"""The command task=rejection_sampling with objective=grpo: graded answers, by its files alone."""

from __future__ import annotations

import hashlib
import json
import re
import shutil

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.telemetry import read_events
from mens_exp.tasks.run import Cancelled

DIGIT = re.compile(r"\d")
MODEL = ["trainer=cpu", "data.seq_len=96", "logger=none", "suite=none", "schedule.warmup_steps=0"]
MODEL += ["lora.targets=[all_linear,lm_head]", "lora.alpha=64", "data.contract.max_overlap_frac=1"]
DRAWN = ["suite=jsonl", "suite.path=tasks.jsonl", "suite.max_new_tokens=6"]
DRAWN += ["eval.samples=8", "eval.temperature=1.0"]
ROUNDS = ["task=rejection_sampling", "objective=grpo", "rejection_sampling.output=rounds"]
GROUPS = ["rejection_sampling.start=last", "rejection_sampling.rows=newest"]


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def command(*overrides, drawn=(), groups=GROUPS, model="model=hf"):
    by_key = {text.partition("=")[0]: text for text in (*DRAWN, *drawn)}
    quoted = ",".join(f"'{text}'" for text in by_key.values())
    named = [model, *(["model.id=merged"] if model == "model=hf" else [])]
    sample = f"rejection_sampling.sample=[{quoted}]"
    fixed = [*ROUNDS, *groups, sample, *named, *MODEL, "trainer.max_steps=8", "optim.lr=5e-3"]
    return cli.main([*fixed, *overrides])


def write_tasks(place, expected=r"\d"):
    tasks = [
        {"id": f"t{n}", "prompt": f"Digit of task {n}?", "expected": expected, "check": "regex"}
        for n in range(8)
    ]
    (place / "tasks.jsonl").write_text(lines(*tasks), "utf-8")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model that answers with one of two digits and two letters, then ends; and its tasks."""
    place = tmp_path_factory.mktemp("base")
    rows = [{"prompt": f"Digit of item {n}?", "response": "37ab"[n % 4]} for n in range(64)]
    (place / "own.jsonl").write_text(lines(*rows), "utf-8")
    write_tasks(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        own = ["data=jsonl", "data.path=own.jsonl", "callbacks=minimal", "hydra.run.dir=own"]
        learns = ["model=tiny_llama", "trainer.max_steps=30", "optim.lr=2e-2"]
        learns += ["trainer.accumulate_grad_batches=1"]
        assert cli.main([*learns, *own, *MODEL]) == 0
        assert cli.main(["task=merge", "path=own", "merge.mode=full", "out=merged"]) == 0
    return place


@pytest.fixture(scope="module")
def done(base):
    """Two finished rounds; copy them, do not change them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        more = ["callbacks=default", "checkpoint.every_n_steps=4", "hydra.run.dir=whole"]
        assert command("rejection_sampling.rounds=2", *more) == 0
    return base


@pytest.fixture
def lab(done, tmp_path, monkeypatch):
    """A copy of the rounds, which a test may change."""
    shutil.copytree(done, tmp_path / "lab")
    monkeypatch.chdir(tmp_path / "lab")
    return tmp_path / "lab"


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_tasks(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_in(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def manifest(path):
    return Manifest.read(path / "manifest.json")


def test_rounds_train_on_all_finished_answers_by_their_rewards(done):
    """Counted again from the events by the task's own pattern."""
    for one in manifest(done / "whole").facts["rounds"]:
        place = done / "rounds" / f"round_{one['number']}"
        expected = {}
        for event in rows_in(place / "sample" / "events.jsonl"):
            if event["finished"] and event["completion"].strip():
                reward = int(bool(DIGIT.search(event["completion"])))
                expected.setdefault(event["item_id"], []).append((event["completion"], reward))
        expected = {task: some for task, some in expected.items() if len(some) > 1}
        found = {}
        for row in rows_in(place / "rows.jsonl"):
            answer = (row["response"], row["fields"]["reward"])
            found.setdefault(row["provenance"]["item"], []).append(answer)
        assert found == expected
        of_both = sum(len({reward for _, reward in some}) > 1 for some in expected.values())
        assert one["prompts_of_both"] == of_both > 0
        assert one["rows"] == sum(map(len, expected.values()))
        known = manifest(place / "train").facts["sampled_answers"]
        assert 0 < known["groups"] - known["groups_of_equal_rewards"] <= of_both  # one is held out


def test_a_round_begins_with_the_adapter_that_answered(done):
    """The ratio is 1 at the first step, and the answers of the second round have more reward."""
    first, second = (done / "rounds" / f"round_{n}" for n in (1, 2))
    assert manifest(first / "train").inputs.get("init_from") is None
    weights = (first / "train" / "adapter" / "adapter.safetensors").read_bytes()
    sampled = manifest(second / "sample").inputs["adapter_sha256"]
    trained = manifest(second / "train").inputs["init_from"]["adapter_sha256"]
    assert sampled == trained == hashlib.sha256(weights).hexdigest()
    assert manifest(second / "train").results["initial_val_loss"] == pytest.approx(0, abs=1e-2)
    for place in (first, second):
        steps = [e["payload"] for e in read_events(place / "train" / "telemetry.jsonl")]
        (clipped,) = [
            e["train/clip_frac"] for e in steps if e.get("step") == 1 and "train/loss" in e
        ]
        assert clipped == 0
    passed = [one["passed"] for one in manifest(done / "whole").facts["rounds"]]
    assert passed[1] > passed[0]
    page = (done / "whole" / "report.html").read_text("utf-8")
    assert re.search(r"both kinds in \d tasks", page)


def test_an_interrupted_round_goes_on_to_the_same_adapter(lab, done, break_at):
    """Cancelled during training, the round is continued by the same command."""
    shutil.rmtree(lab / "rounds" / "round_2" / "train")
    more = ["callbacks=default", "checkpoint.every_n_steps=4", "rejection_sampling.rounds=2"]
    break_at(6, Cancelled("SIGINT"))
    assert command(*more) == 130
    break_at(None)
    assert command(*more) == 0
    assert len(manifest(lab / "rounds" / "round_2" / "train").attempts) == 2
    weights = "rounds/round_2/train/adapter/adapter.safetensors"
    assert (lab / weights).read_bytes() == (done / weights).read_bytes()


def test_rounds_end_where_nothing_can_be_compared(lab, capsys):
    """If every answer of the first round fails, there is nothing to compare, and it is refused."""
    write_tasks(lab, expected="never said")
    shutil.rmtree(lab / "rounds")
    assert command() == 4
    said = " ".join(capsys.readouterr().err.split())
    assert "no task has both answers that pass and answers that fail" in said
    assert "0 of 64 answers passed" in said
    assert not (lab / "rounds" / "round_1" / "train").exists()


@pytest.mark.parametrize(
    ("drawn", "groups", "overrides", "said"),
    [
        ((), (), [], "add rejection_sampling.start=last rejection_sampling.rows=newest"),
        ((), GROUPS[:1], [], "found rejection_sampling.start=last rejection_sampling.rows=all"),
        (("eval.temperature=0.8",), GROUPS, [], "write eval.temperature=1"),
        (("eval.top_p=0.9",), GROUPS, [], "write eval.top_p=1"),
        (("eval.samples=1",), GROUPS, [], "write eval.samples=8"),
        (("eval.max_retries=1",), GROUPS, [], "write eval.max_retries=0"),
        (("eval.keep_failing=false",), GROUPS, [], "is decided by the rounds"),
        ((), GROUPS, ["data=jsonl", "data.path=tasks.jsonl"], "learns from sampled answers alone"),
    ],
)
def test_rounds_of_other_answers_are_not_begun(here, capsys, drawn, groups, overrides, said):
    """Their loss would not be the one that the objective states."""
    code = command(*overrides, drawn=drawn, groups=groups, model="model=tiny_llama")
    assert code == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (here / "rounds").exists()
