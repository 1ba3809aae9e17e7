"""Edited and rehashed runs are refused, as their records contradict each other."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
from hand_written_runs import SEEDS, STARTED, Lab, Run, answer, forge, sha256_of, task

from mens_exp.errors import RequestError
from mens_exp.tasks.study_runs import read_study

BROKEN = "def f0(a:\n    return"


@pytest.fixture
def lab(honest, tmp_path, typed, frozen):
    return Lab(honest, tmp_path, typed, frozen)


def refusal(run):
    """Read one run as a comparison does, and return the reason it is refused."""
    with pytest.raises(RequestError) as found:
        read_study([str(run.path)])
    return " ".join(str(found.value).split())


def test_two_honest_cycles_promote(lab):
    """The unedited cycles promote; without this, no refusal below would mean anything."""
    for name in SEEDS:
        lab.compare(name)
    assert "burn_production: promote" in lab.promote(code=0)


def test_a_figure_that_its_items_do_not_come_to_is_refused(lab):
    """Seed 1 of qlora passes two of four; the message has KPI, item count and both numbers."""
    run = lab.run("qlora", 1)
    run.score(tuned={"task_success": 1.0})
    run.rehash()
    said = lab.compare("one", f"path={run.path}", code=2)
    assert f"{run.card}: conditions.tuned.task_success" in said
    assert "found 1.0" in said
    assert "expected 0.5, from 4 items" in said


def test_a_figure_that_only_the_scorecard_has_is_refused_too(lab):
    """No line has a field pass_at_1, so a comparison reads it from the scorecard."""
    run = lab.run("burn", 5)
    run.score(tuned={"pass_at_1": 0.75})
    run.rehash()
    assert "conditions.tuned.pass_at_1" in refusal(run)


def test_a_figure_of_what_no_item_was_measured_in_is_refused(lab):
    """The KPI is null in every line, but a number in the scorecard."""
    run = lab.run("burn", 5)
    run.score(tuned={"latency_p50_ms": 1.0})
    run.rehash()
    assert "conditions.tuned.latency_p50_ms" in refusal(run)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"task_success": True}, "task_success"),
        ({"task_success": True, "pass_1": True, "repair_depth": 0}, "outcome"),
        ({"outcome": "passed"}, "outcome"),
        ({"semantic_task_success": True}, "semantic_task_success"),
        ({"pass_1": True}, "pass_1"),
        ({"repair_depth": 0}, "repair_depth"),
        ({"attempts": 3}, "attempts"),
        ({"compile_pass_1": False}, "compile_pass_1"),
        ({"repair_stalled": True}, "repair_stalled"),
        ({"time_to_first_valid_ms": 1.0}, "time_to_first_valid_ms"),
    ],
)
def test_a_verdict_that_the_rest_of_its_line_contradicts_is_refused(lab, changes, field):
    """The verdict on item 3 of qlora's seed 1 is flipped, and figures and hashes are adapted."""
    run = lab.run("qlora", 1)
    run.edit(3, **changes)
    run.sum_up()
    run.rehash()
    said = refusal(run)
    assert f"{run.events}: {field}" in said
    assert "item t3 of tuned" in said


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (BROKEN, "parses"),
        (BROKEN, "task_success"),
        ("Here you are, this is the whole function.\n" + answer(0, is_right=True), "strictness"),
        ("def f0(a):\n    pass\n", "trivial_placeholder_output"),
        (answer(0, is_right=True).replace("d = c", "d = c  # TODO"), "placeholder_marker_hits"),
        (answer(0, is_right=True).replace("    d = c\n", ""), "richness"),
        (answer(0, is_right=True).replace("    ", "  "), "canonical_pass"),
    ],
    ids=["broken", "undone", "chatter", "stub", "marker", "poor", "layout"],
)
def test_an_answer_that_reads_otherwise_than_its_verdict_says_is_refused(lab, text, field):
    """Answers graded without execution are graded again; one that is no program passes nothing."""
    run = lab.run("burn", 6)
    run.edit(0, completion=text)
    run.rehash()
    said = refusal(run)
    assert f"{run.events}: {field}" in said
    assert "item t0 of tuned" in said


@pytest.mark.parametrize("field", ["prompt", "reference", "item_id"])
def test_another_item_than_the_suite_has_is_refused(lab, field):
    """The suite's digest fixes the items that are asked."""
    run = lab.run("burn", 6)
    run.edit(0, **{field: "x"})
    run.rehash()
    assert f"{run.events}: {field}" in refusal(run)


@pytest.mark.parametrize("how", ["dropped", "doubled"])
def test_every_item_is_answered_once(lab, how):
    """A failed item dropped, or a passed one repeated, is found although the figures fit."""
    run = lab.run("qlora", 1)
    lines = run.lines()
    bad = next(one for one in lines if one["condition"] == "tuned" and not one["task_success"])
    good = next(one for one in lines if one["task_success"])
    if how == "dropped":
        run.answer([one for one in lines if one is not bad])
    else:
        run.answer([good if one is bad else one for one in lines])
    run.sum_up()
    run.rehash()
    said = refusal(run)
    assert f"{run.events}: tuned" in said
    assert "expected 4 items, each answered once" in said


def test_answers_that_were_deleted_are_refused(lab):
    """Without the lines, nothing would support the figures of the scorecard."""
    run = lab.run("qlora", 1)
    run.events.unlink()
    assert f"{run.events}: is missing" in refusal(run)


def test_answers_that_were_deleted_with_their_hash_are_labelled_and_promote_nothing(lab):
    """With their hash gone too, the run looks as if it had never written any answers."""
    run = lab.run("qlora", 1)
    run.events.unlink()
    told = json.loads(run.manifest.read_text("utf-8"))
    del told["outputs"]["events.jsonl"]
    run.manifest.write_text(json.dumps(told), "utf-8")
    for name in SEEDS:
        lab.compare(name, f"path={lab.runs[name]}", "compare.primary=task_success")
    assert any("the run has no events.jsonl" in note for note in lab.notes("one"))
    lab.promote()
    assert f"{run.events} is not there" in lab.denied()


@pytest.fixture
def trained(finished, tmp_path):
    return Run(shutil.copytree(finished.path, tmp_path / "trained"))


def test_a_file_of_losses_that_was_deleted_is_refused(trained):
    """Without the documents, nothing would contradict an edited val_loss."""
    (trained.path / "validation.jsonl").unlink()
    assert "validation.jsonl: is missing" in refusal(trained)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 7}, "manifest.json: seed: contradicts the run's other records · found 7"),
        ({"started_utc": STARTED}, "as the last event of its telemetry has it"),
        ({"overrides": ["lora.r=4"]}, "as the last event of its telemetry has it"),
    ],
    ids=["seed", "start", "overrides"],
)
def test_a_manifest_edited_in_one_value_is_refused(trained, change, said):
    """By the configuration and the contract, or by the digest in the last event."""
    assert read_study([str(trained.path)]).unverifiable == []
    trained.tell(**change)
    assert said in refusal(trained)


def test_notes_may_be_added_to_a_manifest(trained):
    """A report or an upload that fails adds one after the run has ended."""
    trained.tell(notes=["the upload failed"])
    assert read_study([str(trained.path)]).unverifiable == []


def test_a_telemetry_that_was_deleted_is_refused(trained):
    """It has the digest of the manifest."""
    (trained.path / "telemetry.jsonl").unlink()
    assert "telemetry.jsonl: is missing" in refusal(trained)


@pytest.mark.parametrize("change", [{"seed": 2}, {"started_utc": STARTED.replace("0Z", "1Z")}])
def test_a_manifest_edited_in_one_value_promotes_nothing(lab, change):
    """Seed 1 of burn counts as seed 2, or as begun at another time; its digest is replaced."""
    run = lab.run("burn", 1)
    run.close()
    for name in SEEDS:
        lab.compare(name)
    run.tell(**change)
    file = lab.out("one") / "compare.json"
    record = json.loads(file.read_text("utf-8"))
    (mine,) = (one for one in record["runs"] if one["path"] == str(run.path))
    mine |= {**change, "manifest_sha256": sha256_of(run.manifest)}
    file.write_text(json.dumps(record), "utf-8")
    lab.promote()
    assert f"{run.manifest} has changed since its run wrote it" in lab.denied()


def test_a_seed_that_the_configuration_contradicts_is_refused_without_telemetry(lab):
    """The run of an older release has no digest of its manifest, but its seed is in three files."""
    run = lab.run("burn", 3)
    run.tell(seed=1)
    assert f"{run.manifest}: seed" in refusal(run)


def test_a_run_whose_manifest_has_no_digest_is_labelled(lab):
    """Older releases wrote none; all runs are named in one label."""
    lab.run("burn", 1).close()
    lab.compare("one")
    (note,) = (one for one in lab.notes("one") if "not checked as a whole" in one)
    names = [lab.run(arm, seed).path.name for seed, arm in ((1, "qlora"), (1, "burn"))]
    assert [name in note for name in names] == [True, False]


def test_a_condition_that_is_not_summed_up_is_refused(lab):
    """A condition without figures in the scorecard leaves its lines with nothing to compare."""
    run = lab.run("burn", 6)
    card = json.loads(run.card.read_text("utf-8"))
    del card["conditions"]["tuned"]
    run.card.write_text(json.dumps(card), "utf-8")
    run.rehash()
    assert "the scorecard does not have tuned" in refusal(run)


def test_a_promotion_finds_what_was_edited_after_the_comparison(lab):
    """The promotion is refused, although the digests in the comparison were replaced as well."""
    for name in SEEDS:
        lab.compare(name)
    run = lab.run("qlora", 1)
    run.score(tuned={"task_success": 0.0})
    run.rehash()
    file = lab.out("one") / "compare.json"
    record = json.loads(file.read_text("utf-8"))
    (mine,) = (one for one in record["runs"] if one["path"] == str(run.path))
    mine["manifest_sha256"] = hashlib.sha256(run.manifest.read_bytes()).hexdigest()
    mine["scorecard_sha256"] = hashlib.sha256(run.card.read_bytes()).hexdigest()
    file.write_text(json.dumps(record), "utf-8")
    assert "burn_production: insufficient_evidence" in lab.promote()
    assert "conditions.tuned.task_success" in lab.denied()


def test_swapped_scorecards_are_refused_by_their_lines(lab):
    """The scorecards of burn and qlora for seed 1, swapped, contradict the runs' own items."""
    run, other = lab.run("burn", 1), lab.run("qlora", 1)
    cards = [one.card.read_bytes() for one in (run, other)]
    for one, data in zip((other, run), cards, strict=True):
        one.card.write_bytes(data)
        one.rehash()
    assert "conditions.tuned.task_success" in refusal(run)


def test_the_same_edit_is_not_found_without_a_ledger(lab):
    """Without a ledger the edit is not found, so the page says what was not verified."""
    forge(lab)
    lab.compare("one")
    assert any("were not executed again" in note for note in lab.notes("one"))


def regraded(lab):
    lab.run("burn", 1).score(generation={"engine": "hf", "samples": 1, "max_retries": 0})
    return "no version of grading is recorded", 4  # which confounds too


def of_today(lab):
    """Replace the suite's file by another version."""
    run = lab.run("burn", 1)
    config = run.path / "config.yaml"
    text = config.read_text("utf-8")
    other = lab.root / "other.jsonl"
    other.write_text(json.dumps(task(7)) + "\n", "utf-8")
    assert str(lab.tasks) in text
    config.write_text(text.replace(str(lab.tasks), str(other)), "utf-8")
    return "is another one now", 0


def without_suite(lab):
    run = lab.run("burn", 1)
    config = run.path / "config.yaml"
    text = config.read_text("utf-8").replace(str(lab.tasks), str(lab.root / "gone.jsonl"))
    config.write_text(text, "utf-8")
    return "gone.jsonl", 0


@pytest.mark.parametrize("change", [regraded, of_today, without_suite])
def test_answers_that_cannot_be_read_again_are_labelled(lab, change):
    """They are compared, and the record, the page and the decision say so."""
    why, code = change(lab)
    lab.run("burn", 1).rehash()
    for name in SEEDS:
        lab.compare(name)
    (note,) = (one for one in lab.notes("one") if "not read again" in one)
    assert note.startswith("unverifiable: ")
    assert why in note
    assert lab.run("burn", 1).path.name in note
    assert "not read again" in (lab.out("one") / "compare.md").read_text("utf-8")
    lab.promote(code=code)
    assert any(why in one for one in lab.decision()["unverifiable"])


def test_figures_that_no_item_gives_are_named(lab):
    """Times and losses follow from no items; one short note says they are taken as recorded."""
    lab.compare("one")
    (note,) = (one for one in lab.notes("one") if "taken as recorded" in one)
    named = "costs, losses, shares of the data and times"
    assert note == f"unverifiable: {named} are taken as recorded"


def test_a_figure_of_the_harness_is_labelled(lab):
    """It aggregates the metrics of lm-evaluation-harness, and no line has them."""
    run = lab.run("burn", 1)
    run.score(tuned={"arc_easy/acc": 0.5}, suite="lm_eval")
    run.rehash()
    (note,) = (x for x in read_study([str(run.path)]).unverifiable if "arc_easy/acc" in x)
    assert "cannot be computed again" in note


@pytest.mark.parametrize("name", ["coverage", "arc_easy/acc"])
def test_a_figure_that_no_suite_of_ours_states_is_refused(lab, name):
    """A figure that no suite gives is refused, as policies may read it (coverage, for example)."""
    run = lab.run("burn", 1)
    run.score(tuned={name: 1.0})
    run.rehash()
    assert f"conditions.tuned.{name}" in refusal(run)
