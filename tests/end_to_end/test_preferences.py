"""Runs that learn which answers are better: complete, resumed, in two processes."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import load_file

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.telemetry import read_events

PAIRED = ("dpo", "cpo", "simpo", "orpo")
REFERENCED = ("dpo", "kto")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Files with the same answers as pairs and with labels, by objective."""
    place = tmp_path_factory.mktemp("rows")
    pairs = [
        {
            "prompt": f"Add {n}.",
            "chosen": f"def add_{n}(x):\n    return x + {n}\n",
            "rejected": "no idea " * (1 + n % 3),
        }
        for n in range(60)
    ]
    labelled = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs
        for side in ("chosen", "rejected")
    ]
    for name, made in (("pairs", pairs), ("labelled", labelled)):
        text = "".join(json.dumps(row) + "\n" for row in made)
        (place / f"{name}.jsonl").write_text(text, "utf-8")
    return {
        **dict.fromkeys(PAIRED, f"data.path={place / 'pairs.jsonl'}"),
        "kto": f"data.path={place / 'labelled.jsonl'}",
    }


def events(run, name):
    return [event["payload"] for event in read_events(run.telemetry) if event["event"] == name]


def tensors(run):
    return load_file(run.adapter / "adapter.safetensors")


@pytest.mark.parametrize("objective", [*PAIRED, "kto"])
def test_answers_that_are_preferred_gain(objective, rows, train_in, tmp_path):
    """NF4 with packing: after eight steps, preferred answers have more reward and the loss falls.

    The data contract is fulfilled, and the role of every token is known.
    """
    beta = {"simpo": 2.0, "orpo": 2.0}.get(objective, 0.1)
    settings = (f"objective={objective}", f"objective.beta={beta}", "trainer.max_steps=8")
    run = train_in(tmp_path / "run", *settings, rows[objective])
    manifest = Manifest.read(run.manifest)
    base, tuned = events(run, "validation")
    assert tuned["val/loss"] < base["val/loss"]
    margins = [one["val/chosen_reward"] - one["val/rejected_reward"] for one in (base, tuned)]
    assert margins[1] > margins[0] + 1e-3
    if objective != "kto":
        assert margins[1] == pytest.approx(tuned["val/reward_margin"])
    if objective in {"cpo", "orpo"}:  # which also imitate the chosen answer
        assert tuned["val/chosen_nll"] < base["val/chosen_nll"]
    if objective in REFERENCED:
        assert margins[0] == pytest.approx(0, abs=1e-6)
    assert all("train/chosen_reward" in one for one in events(run, "step")[:1])
    page = run.report.read_text("utf-8")
    assert "Metrics of the objective" in page
    assert "callbacks and modules" not in page
    assert f"per {'answer' if objective == 'kto' else 'pair'}" in page
    sides = (f"{side}_rows" for side in ("train", "val", "heldout"))
    assert sum(manifest.inputs["data"][side] for side in sides) == 60 * (1 + (objective == "kto"))
    found = manifest.data_contract["tokens"]
    assert found["trained_by_role"]["end_marker"] == found["documents"]
    assert (found["trained_by_role"]["user"] > 0) is (objective == "orpo")
    assert "no likelihood" in manifest.unknown["results.tuned_val_bits_per_byte"]
    assert manifest.contract["settings"]["objective.beta"] == beta


@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto"])
def test_a_run_in_parts_ends_with_the_bits_of_one(objective, rows, whole_and_parts):
    """Two steps and two more, padded, so that no block has several pairs."""
    settings = (f"objective={objective}", rows[objective], "data.packing=false")
    whole, parts = whole_and_parts(*settings)
    for name, values in tensors(whole).items():
        assert (tensors(parts)[name] == values).all()
    for mine, its in zip(events(parts, "step"), events(whole, "step"), strict=True):
        assert mine["train/loss"] == its["train/loss"]
        assert mine["train/chosen_reward"] == its["train/chosen_reward"]


@pytest.mark.parametrize(
    "words",
    [("objective=dpo",), ("objective=kto",), ("objective=dpo", "objective.share_prompt=true")],
)
def test_two_processes_take_the_course_of_one(words, rows, train_in, tmp_path):
    """The batches are the same; losses and rewards are equal within rounding."""
    settings = (*words, rows[words[0].partition("=")[2]], "quant.compute_dtype=f32")
    one = train_in(tmp_path / "one", *settings)
    two = train_in(tmp_path / "two", *settings, "trainer=ddp", "trainer.accelerator=cpu")
    assert Manifest.read(two.manifest).facts["processes"] == 2
    for kind, names in (
        ("step", ("train/loss", "train/chosen_reward", "train/rejected_reward")),
        ("validation", ("val/loss", "val/chosen_reward", "val/rejected_reward")),
    ):
        for mine, its in zip(events(two, kind), events(one, kind), strict=True):
            assert mine.get("batches_sha256") == its.get("batches_sha256")
            for name in names:
                assert mine[name] == pytest.approx(its[name], rel=1e-4, abs=1e-6)


BEFORE = "objective.precompute_ref_log_probs=true"
ONCE = "objective.share_prompt=true"


def test_pairs_that_share_prompts_are_validated_as_others(rows, train_in, tmp_path):
    """In f32, the base has the same loss and rewards on fewer tokens; transformers agrees."""
    settings = ("objective=orpo", rows["orpo"], "quant.compute_dtype=f32", "trainer.max_steps=2")
    apart = train_in(tmp_path / "apart", *settings)
    once = train_in(tmp_path / "once", *settings, ONCE)
    streamed = train_in(
        tmp_path / "streamed", *settings, ONCE, "data.streaming=true", "data.heldout_frac=0.2"
    )
    mine, its = (events(run, "validation")[0] for run in (once, apart))
    assert mine["val/supervised_tokens"] == its["val/supervised_tokens"]
    for name in ("val/loss", "val/chosen_reward", "val/rejected_reward", "val/chosen_nll"):
        assert mine[name] == pytest.approx(its[name], rel=1e-5)
    assert Manifest.read(once.manifest).contract["settings"][ONCE.partition("=")[0]] is True
    assert ONCE.partition("=")[0] not in Manifest.read(apart.manifest).contract["settings"]
    for run in (once, streamed):
        probe = Manifest.read(run.manifest).data_contract["probe"]
        assert probe["targets_follow"]
        assert probe["reference"]["loss"] <= 1e-5
        assert probe["reference"]["gradient"] <= 1e-4
    density = [
        one["data/supervised_tokens"] / one["data/tokens"]
        for one in (events(run, "step")[-1] for run in (once, apart))
    ]
    assert density[0] > 1.2 * density[1]


def precomputed(run):
    return Manifest.read(run.manifest).facts["reference_log_probs"]


@pytest.mark.parametrize("words", [("objective=dpo",), ("objective=kto",), ("objective=dpo", ONCE)])
def test_a_base_that_passes_before_training_changes_no_bit(words, rows, train_in, tmp_path):
    """NF4, packing, micro-batches of one block; also if resumed, and from the cache at r=2."""
    settings = (*words, rows[words[0].partition("=")[2]], "data.micro_batch_size=1")
    usual = train_in(tmp_path / "usual", *settings)
    before = train_in(tmp_path / "before", *settings, BEFORE, "trainer.max_steps=2")
    assert precomputed(before)["from_cache"] == 0
    assert cli.main([f"resume={before.path}", "trainer.max_steps=4"]) == 0
    for name, values in tensors(usual).items():
        assert (tensors(before)[name] == values).all()
    for kind, last in (("step", 4), ("validation", 1)):
        for mine, its in zip(
            events(before, kind)[-last:], events(usual, kind)[-last:], strict=True
        ):
            scores = {name for name in its if name.endswith(("loss", "reward", "kl"))}
            assert {name: mine[name] for name in scores} == {name: its[name] for name in scores}
    again = train_in(tmp_path / "again", *settings, BEFORE, "lora.r=2")
    found = precomputed(again)
    assert found["from_cache"] == found["train_documents"] + found["val_documents"]


def test_blocks_in_other_company_have_the_reference_within_rounding(rows, train_in, tmp_path):
    """Two blocks of a micro-batch run together in training, and separately before it."""
    settings = ("objective=dpo", rows["dpo"], "data.micro_batch_size=2", "quant.compute_dtype=f32")
    usual = train_in(tmp_path / "usual", *settings)
    before = train_in(tmp_path / "before", *settings, BEFORE)
    for mine, its in zip(events(before, "step"), events(usual, "step"), strict=True):
        for name in ("train/loss", "train/chosen_reward", "train/rejected_reward"):
            assert mine[name] == pytest.approx(its[name], rel=1e-4, abs=1e-6)


def test_two_processes_compute_the_reference_of_one(rows, train_in, tmp_path, monkeypatch):
    """Each computes its share of the documents, and both use all values."""
    settings = ("objective=dpo", rows["dpo"], "quant.compute_dtype=f32", BEFORE)
    one = train_in(tmp_path / "one", *settings)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    two = train_in(tmp_path / "two", *settings, "trainer=ddp", "trainer.accelerator=cpu")
    for mine, its in zip(events(two, "step"), events(one, "step"), strict=True):
        for name in ("train/loss", "train/chosen_reward", "train/rejected_reward"):
            assert mine[name] == pytest.approx(its[name], rel=1e-4, abs=1e-6)
    names = ("train_documents", "val_documents")
    assert {n: precomputed(two)[n] for n in names} == {n: precomputed(one)[n] for n in names}


def test_a_damaged_reference_is_named_and_computed_again(rows, train_in, tmp_path, monkeypatch):
    """Flipping one bit of the stored values; values never computed do not count as damage."""
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))
    settings = ("objective=dpo", rows["dpo"], BEFORE)
    few = train_in(tmp_path / "few", *settings, "trainer.max_steps=1", "data.seq_len=96")
    more = train_in(tmp_path / "more", *settings, "data.seq_len=96")
    assert precomputed(few)["train_documents"] < precomputed(more)["train_documents"]
    has_all = precomputed(more)["train_documents"] + precomputed(more)["val_documents"]
    assert 0 < precomputed(more)["from_cache"] < has_all
    for path in (tmp_path / "cache" / "reference_log_probs").glob("*/values.npy"):
        content = bytearray(path.read_bytes())
        content[-4] ^= 1
        path.write_bytes(content)
    again = train_in(tmp_path / "again", *settings, "data.seq_len=96")
    assert precomputed(again)["from_cache"] == 0
    assert precomputed(again)["sha256"] == precomputed(more)["sha256"]
    notes = [one for one in Manifest.read(again.manifest).notes if "was damaged" in one]
    assert len(notes) == 2
    assert all("reference_log_probs" in one for one in notes)


def test_the_plan_counts_the_pass_of_the_reference(rows, train_in, tmp_path, monkeypatch):
    """DPO keeps the base's states and computes more than CPO; the remaining memory is equal."""
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))  # no rows are encoded there
    plans = {}
    for name, *words in (("dpo",), ("cpo",), ("before", BEFORE)):
        objective = "cpo" if name == "cpo" else "dpo"
        words += [f"objective={objective}", rows["dpo"]]
        run = train_in(tmp_path / name, "task=plan", *words)
        plans[name] = json.loads(run.plan.read_text("utf-8"))
    before = plans.pop("before")
    flop = {name: plan["time_s"]["flop_per_step"] for name, plan in plans.items()}
    assert before["time_s"]["flop_per_step"] == flop["cpo"] < flop["dpo"]
    assert before["time_s"]["reference"] is not None
    assert "reference" not in before["memory_bytes"]["components"]
    assert "reference" not in plans["dpo"]["time_s"]
    parts = {name: plan["memory_bytes"]["components"] for name, plan in plans.items()}
    assert parts["dpo"].pop("reference") == 192 * 64 * 2
    measured = "as earlier runs here"
    own = [{n: v for n, v in one.items() if n != measured} for one in parts.values()]
    assert own[0] == own[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("objective=assistant",), "objective=dpo, which learns from both answers"),
        (("objective=kto",), "objective=dpo, which learns from both answers"),
        (
            ("objective=dpo", "backend=full", "quant=none", "optim.lr=1e-4"),
            "a backend whose base is frozen: qlora, lora or proxy",
        ),
        (
            ("objective=dpo", "objective.loss=hinge", "objective.label_smoothing=0.1"),
            "objective.label_smoothing",
        ),
        (
            ("objective=dpo", "objective.loss=ipo", "objective.length_normalised=true"),
            "which compares means over tokens",
        ),
        (("objective=dpo", "objective.loss=robust"), "objective.label_smoothing above 0"),
        (("objective=dpo", "objective.label_smoothing=0.5"), "objective.label_smoothing"),
        (("objective=simpo", "objective.loss=ipo"), "objective.loss"),
        (("objective=orpo", "objective.nll_weight=1"), "objective.nll_weight"),
        (("objective=kto", "objective.wanted_weight=0"), "objective.wanted_weight"),
        (("objective=dpo", "data.format=unpaired"), "the row has no 'label'"),
        (("objective=cpo", BEFORE), "objective.precompute_ref_log_probs"),
        (("objective=dpo", ONCE, "data.packing=false"), "data.packing=true"),
        (("objective=cpo", ONCE, "backend=proxy"), "which knows no documents"),
        (("objective=kto", ONCE), "objective.share_prompt"),
        (
            ("objective=dpo", BEFORE, "data.streaming=true", "data.heldout_frac=0"),
            "needs all rows before training",
        ),
    ],
)
def test_what_cannot_be_learned_is_refused(words, said, rows, train_in, tmp_path, capsys):
    """Exit code 2 before training."""
    run = train_in(tmp_path / "run", rows["dpo"], *words, code=2)
    assert said in capsys.readouterr().err
    assert not run.adapter.exists()


def test_rows_without_a_rejected_answer_are_refused(rows_file, train_in, tmp_path, capsys):
    """There would be nothing to compare with."""
    train_in(tmp_path / "run", "objective=dpo", f"data.path={rows_file}", code=2)
    assert "no rejected answer" in capsys.readouterr().err


def test_other_names_of_columns_are_given(rows, train_in, tmp_path):
    """data.columns maps them; the chosen answer alone is an ordinary row."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"q": f"Add {n}.", "good": f"x + {n}", "bad": f"{n}", "source": "s"}) + "\n"
            for n in range(40)
        ),
        "utf-8",
    )
    both = "data.columns={prompt:q,chosen:good,rejected:bad}"
    run = train_in(tmp_path / "both", "objective=dpo", f"data.path={path}", both)
    (file,) = Manifest.read(run.manifest).inputs["data"]["files"].values()
    assert file["form"] == "preference"
    alone = "data.columns={prompt:q,response:good}"
    train_in(tmp_path / "alone", "objective=assistant", f"data.path={path}", alone)
