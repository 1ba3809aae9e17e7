"""Runs on rewards of sampled answers: complete, resumed, in two processes, refused."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import load_file

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.telemetry import read_events

LEARNS = ("objective=grpo", "optim.lr=1e-2", "schedule.warmup_steps=0", "data.val_frac=0.2")
GRPO = (*LEARNS, "lora.dropout=0.1")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Four answers to each of 40 prompts; two have a reward, or all four for every tenth prompt."""
    path = tmp_path_factory.mktemp("rows") / "rewarded.jsonl"
    made = [
        {
            "prompt": f"Add {n}.",
            "response": f"x + {n} " * (1 + k),
            "fields": {"reward": float(k < 2 or n % 10 == 0)},
        }
        for n in range(40)
        for k in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in made), "utf-8")
    return f"data.path={path}"


def events(run, name):
    return [event["payload"] for event in read_events(run.telemetry) if event["event"] == name]


def tensors(run):
    return load_file(run.adapter / "adapter.safetensors")


def test_answers_with_more_reward_gain(rows, train_in, tmp_path):
    """NF4, packing and dropout: on unseen prompts the loss falls below that of the base."""
    run = train_in(tmp_path / "run", *GRPO, rows, "trainer.max_steps=8")
    manifest, first = Manifest.read(run.manifest), events(run, "step")[0]
    base, tuned = events(run, "validation")
    assert base["val/loss"] == pytest.approx(0, abs=1e-5)
    assert tuned["val/loss"] < -0.01
    assert tuned["val/base_kl"] > 0
    assert tuned["val/reward"] == base["val/reward"]
    assert first["train/clip_frac"] == 0
    assert any(step["train/clip_frac"] > 0 for step in events(run, "step"))
    known = manifest.facts["sampled_answers"]
    assert known["groups"] == 40 - manifest.inputs["data"]["heldout_rows"] / 4
    assert 0 < known["groups_of_equal_rewards"] <= 4
    assert manifest.contract["settings"]["objective.beta"] == 0.04
    page = run.report.read_text("utf-8")
    assert "Metrics of the objective" in page
    assert "per answer" in page
    assert "%" not in page.partition("Validation loss")[2][:200]


def test_means_of_micro_batches_pass_the_checks_of_a_step(rows, train_in, tmp_path):
    """The checks compare a batch with its documents, which bnpo does not allow."""
    settings = (*GRPO, rows, "trainer.max_steps=1", "data.micro_batch_size=2")
    run = train_in(tmp_path / "run", *settings, "objective.loss_type=bnpo")
    assert Manifest.read(run.manifest).contract["settings"]["objective.loss_type"] == "bnpo"
    assert "per token" in run.report.read_text("utf-8")


def test_a_run_in_parts_ends_with_the_bits_of_one(rows, train_in, tmp_path):
    """After resuming, log-probabilities of the first part's starting adapter are used."""
    parts = train_in(tmp_path / "parts", *GRPO, rows, "trainer.max_steps=2")
    known = Manifest.read(parts.manifest).facts["sampled_answers"]["sha256"]
    assert cli.main([f"resume={parts.path}", "trainer.max_steps=4"]) == 0
    whole = train_in(tmp_path / "whole", *GRPO, rows)
    assert Manifest.read(whole.manifest).facts["sampled_answers"]["sha256"] != known  # more rows
    for name, values in tensors(whole).items():
        assert (tensors(parts)[name] == values).all()
    for mine, its in zip(events(parts, "step"), events(whole, "step"), strict=True):
        for name in ("train/loss", "train/base_kl", "train/clip_frac", "train/reward"):
            assert mine[name] == its[name]


def test_an_adapter_to_start_from_is_the_one_to_compare_with(rows, train_in, tmp_path):
    """The initial validation loss is that of no change, unlike the base's."""
    settings = (*LEARNS, rows, "data.micro_batch_size=1", "objective.beta=0")
    first = train_in(tmp_path / "first", *settings)
    again = train_in(tmp_path / "again", *settings, f"lora.init_from={first.path}", "optim.lr=1e-9")
    step = events(again, "step")[0]
    assert Manifest.read(again.manifest).results["initial_val_loss"] == pytest.approx(0, abs=1e-6)
    assert abs(Manifest.read(again.manifest).results["base_val_loss"]) > 1e-3
    assert step["train/clip_frac"] == 0
    assert "train/base_kl" not in step


def test_two_processes_take_the_course_of_one(rows, train_in, tmp_path, monkeypatch):
    """Each computes its share of the log-probabilities before training."""
    settings = ("objective=grpo", rows, "quant.compute_dtype=f32")
    one = train_in(tmp_path / "one", *settings)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    two = train_in(tmp_path / "two", *settings, "trainer=ddp", "trainer.accelerator=cpu")
    for kind, side in (("step", "train"), ("validation", "val")):
        for mine, its in zip(events(two, kind), events(one, kind), strict=True):
            for name in ("loss", "base_kl", "reward", "equal_frac"):
                found, expected = mine[f"{side}/{name}"], its[f"{side}/{name}"]
                assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_plan_counts_the_passes_before_training(rows, train_in, tmp_path, monkeypatch):
    """Twice as long with a KL term; the steps need as many FLOPs."""
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))
    plans = {}
    for beta in (0.04, 0):
        run = train_in(
            tmp_path / f"{beta}",
            "task=plan",
            "objective=grpo",
            "model=smollm2_135m",
            rows,
            f"objective.beta={beta}",
        )
        plans[beta] = json.loads(run.plan.read_text("utf-8"))
    seconds = [one["time_s"]["reference"] for one in plans.values()]
    assert seconds[0] == pytest.approx(2 * seconds[1], abs=0.11)  # both are rounded
    assert seconds[0] > 0
    assert "reference" not in plans[0.04]["memory_bytes"]["components"]
    flops = {one["time_s"]["flop_per_step"] for one in plans.values()}
    assert len(flops) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("objective=grpo", "objective.beta=-1"), "objective.beta"),
        (("objective=grpo", "objective.epsilon_low=1"), "objective.epsilon_low"),
        (("objective=grpo", "objective.epsilon_high=0"), "objective.epsilon_high"),
        (("objective=grpo", "objective.scale_rewards=rank"), "objective.scale_rewards"),
        (
            ("objective=grpo", "objective.max_completion_tokens=9"),
            "objective.max_completion_tokens",
        ),
        (("objective=grpo", "objective.loss_type=sapo"), "objective.loss_type"),
        (("objective=grpo", "objective.weight_field=reward"), "objective.weight_field"),
        (("objective=grpo", "backend=full", "quant=none", "optim.lr=1e-4"), "whose base is frozen"),
        (
            ("objective=grpo", "data.streaming=true", "data.heldout_frac=0"),
            "objective=grpo: needs all rows before training",
        ),
        (("objective=assistant",), "objective=grpo, which learns from rewards"),
    ],
)
def test_what_cannot_be_learned_is_refused(words, said, rows, train_in, tmp_path, capsys):
    """Exit code 2 before training."""
    run = train_in(tmp_path / "run", rows, *words, code=2)
    assert said in " ".join(capsys.readouterr().err.split())
    assert not run.adapter.exists()


@pytest.mark.parametrize(
    ("task", "side"), [("plan", "path"), ("train", "path"), ("train", "val_path")]
)
def test_a_prompt_with_one_answer_is_refused(task, side, train_in, tmp_path, capsys):
    """No run directory; the message has the row and the number of such prompts."""
    words = [f"task={task}", "objective=grpo", "data.heldout_frac=0.001"]
    for name in ("path", "val_path"):
        rows = [
            {"prompt": f"{name} {n // 2}", "response": f"{n}", "fields": {"reward": n % 2}}
            for n in range(80)
            if name != side or n not in {5, 8}
        ]
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        words.append(f"data.{name}={file}")
    train_in(tmp_path / "run", *words, code=2, without="data.val_frac")
    said = " ".join(capsys.readouterr().err.split())
    assert "a prompt has a single answer, which can be compared with none" in said
    assert f"{side}.jsonl:5)" in said
    assert "found 2 of " in said
    assert not (tmp_path / "run").exists()
