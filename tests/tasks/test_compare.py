"""The command task=compare, on small run directories written by the project's own writers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys

import fork_server
import numpy as np
import pytest
from scipy import stats

from mens_exp.artifacts.comparison import Comparison, Verdict
from mens_exp.artifacts.decision_ledger import EntryKind, append
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Attempt, Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.errors import DataError
from mens_exp.planning.contract import recorded_digest
from mens_exp.tasks.study_runs import read_study

WITHOUT = "quant.double_quant=false"


def primary(record):
    (contrast,) = record.contrasts
    return dict(contrast["kpis"][record.primary])


def test_arms_and_factor_are_found_in_the_manifests(study, compare):
    """The directory of a sweep is enough; the arm of the first run is the reference."""
    record = compare(study())
    assert record.factors == ["quant.double_quant"]
    assert not record.declared
    assert record.reference == "quant.double_quant=true"
    assert [(arm["name"], arm["seeds"]) for arm in record.arms] == [
        ("quant.double_quant=true", [1, 2, 3, 4, 5, 6]),
        (WITHOUT, [1, 2, 3, 4, 5, 6]),
    ]
    assert record.primary == "parse_rate"
    assert record.contrasts[0]["confounded_by"] == []


def test_difference_is_paired_by_seed_and_by_item(study, compare):
    """Expected values by hand: of four items a seed s passes s % 3, the other arm one more."""
    found = primary(compare(study(passes=lambda arm, seed: seed % 3 + arm)))
    assert found["differences"] == [0.25] * 6
    assert found["items"] == 4
    assert (found["estimate"], found["arm_mean"], found["reference_mean"]) == (0.25, 0.5, 0.25)
    assert found["p"] == pytest.approx(2 / 64)
    assert found["verdict"] == Verdict.BETTER


def test_a_worse_arm_is_called_worse(study, compare):
    """An arm that passes fewer items is called worse."""
    found = primary(compare(study(passes=lambda arm, seed: seed % 3 + 1 - arm)))
    assert found["verdict"] == Verdict.WORSE


def test_equal_arms_show_no_difference(study, compare):
    """Arms that are equal in every seed have a difference of zero."""
    found = primary(compare(study(passes=lambda _arm, seed: seed % 3)))
    assert found["verdict"] == Verdict.NO_DIFFERENCE
    assert found["estimate"] == 0


def test_five_seeds_get_no_verdict_by_signs(study, compare):
    """With five seeds the smallest p-value is 0.0625, so six are needed, as the record says."""
    path = study(seeds=range(1, 6), passes=lambda arm, seed: seed % 3 + arm)
    found = primary(compare(path, "compare.test=sign_flip"))
    assert found["verdict"] == Verdict.NOT_REACHABLE
    assert found["seeds_needed"] == 6
    assert "0.0625" in found["why"]


def test_one_seed_gets_no_verdict(study, compare):
    """One seed gives a difference but no interval."""
    found = primary(compare(study(seeds=[3], passes=lambda arm, _seed: 2 * arm)))
    assert (found["verdict"], found["estimate"]) == (Verdict.NOT_REACHABLE, 0.5)
    assert (found["low"], found["seeds_needed"]) == (None, 2)
    assert found["why"] == "1 seed gives no spread; 2 are needed"


def test_a_figure_of_one_seed_is_no_interval(study, compare, tmp_path):
    """Neither the page's opening sentence nor its tables show an interval for one seed."""
    compare(study(seeds=[3], passes=lambda arm, _seed: 2 * arm), f"out={tmp_path}/one")
    said = (tmp_path / "one" / "compare.md").read_text("utf-8")
    assert "not reachable, +0.5 in 1 seed, which gives no interval." in said
    assert "1 seeds" not in said
    assert "unknown over" not in said


@pytest.mark.parametrize(("gain", "said"), [(0, "the same"), (1, "+0.25")])
def test_differences_without_spread_have_no_interval(study, compare, tmp_path, gain, said):
    """A zero-width interval would look like certainty; the page gives the differences instead."""
    path = study(passes=lambda arm, _seed: 1 + gain * arm)
    compare(path, f"out={tmp_path}/same")
    table = (tmp_path / "same" / "compare.md").read_text("utf-8")
    assert f", {said} in all 6 seeds." in table
    assert "| no spread |" in table
    assert "[+0, +0]" not in table
    assert "[+0.25, +0.25]" not in table


def test_only_shared_seeds_are_paired(study, compare, tmp_path):
    """An arm with more seeds is paired only on the seeds that both arms have."""
    one = study("one", seeds=[1, 2, 3], arms=[[]])
    other = study("other", seeds=[2, 3, 4], arms=[[WITHOUT]])
    record = compare(f"'{one},{other}'", "compare.factors=[quant.double_quant]")
    assert primary(record)["seeds"] == [2, 3]
    assert [arm["seeds"] for arm in record.arms] == [[1, 2, 3], [2, 3, 4]]
    listed = compare(f"[{one},{other}]", "compare.factors=[quant.double_quant]")
    assert listed.contrasts == record.contrasts
    globbed = compare(tmp_path / "study" / "o*", "compare.factors=[quant.double_quant]")
    assert globbed.contrasts == record.contrasts


def test_an_undeclared_difference_confounds(study, compare):
    """Double quantization is the declared factor; as the rank differs too, it is confounded."""
    path = study(arms=[[], [WITHOUT, "lora.r=8"]])
    record = compare(path, "compare.factors=[quant.double_quant]")
    assert record.declared
    assert record.contrasts[0]["confounded_by"] == ["lora.r"]


def test_the_reference_is_named_by_its_value(study, compare):
    """The reference can be named by value or by its full name, quoted; the signs are reversed."""
    path = study(seeds=[1, 2], passes=lambda arm, _seed: 2 * arm)
    by_value = compare(path, "compare.reference=false")
    assert (by_value.reference, primary(by_value)["estimate"]) == (WITHOUT, -0.5)
    by_name = compare(path, f'compare.reference="{WITHOUT}"')
    assert by_name.contrasts == by_value.contrasts


def test_a_comparison_counts_the_other_looks_at_its_arms(study, compare, tmp_path):
    """Looks at three, five and eight seeds count; a repeated comparison or another KPI does not."""
    three, two, more = (
        study(name, seeds=seeds, passes=lambda arm, seed: (seed * seed + arm) % 4)
        for name, seeds in (("three", [1, 2, 3]), ("two", [4, 5]), ("more", [6, 7, 8]))
    )
    declared = "compare.factors=[quant.double_quant]"
    first = compare(three, declared)
    assert first.looks == {}
    assert compare(three, declared, "compare.primary=val_loss").looks == {}
    second = compare(f"[{three},{two}]", declared)
    assert [one["seeds"] for one in second.looks[WITHOUT]["others"]] == [[1, 2, 3]]
    turned = compare(f"[{three},{two}]", declared, "compare.reference=false")
    assert [len(one["others"]) for one in turned.looks.values()] == [1]
    everything = f"[{three},{two},{more}]"
    third = compare(everything, declared, f"out={tmp_path}/out")
    assert [one["seeds"] for one in third.looks[WITHOUT]["others"]] == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert third.looks[WITHOUT]["false"] == pytest.approx(0.107, abs=0.015)  # three of t, nested
    for name in ("compare.md", "compare.html"):
        text = (tmp_path / "out" / name).read_text("utf-8")
        assert "look 3 at these runs" in text
        assert "compare.sequential=always_valid" in text
    allowing = compare(everything, declared, "compare.sequential=always_valid", f"out={tmp_path}/o")
    assert (allowing.sequential, allowing.looks[WITHOUT]["false"]) == ("always_valid", None)
    assert "allows for any number of looks" in (tmp_path / "o" / "compare.md").read_text("utf-8")


def test_a_look_that_leaves_a_seed_out_states_the_rate_of_choosing(study, compare, tmp_path):
    """False-positive rate over the four subsets of three seeds: 16.1 % (scipy, 200,000 studies)."""
    runs = {
        seed: study(f"seed{seed}", seeds=[seed], passes=lambda arm, seed: (seed * seed + arm) % 4)
        for seed in (1, 2, 3, 4)
    }
    declared = "compare.factors=[quant.double_quant]"

    def look(seeds, *more):
        paths = ",".join(str(runs[seed]) for seed in seeds)
        return compare(f"[{paths}]", declared, *more)

    for seeds in ([1, 2, 3], [1, 2, 4], [1, 3, 4]):
        look(seeds)
    fourth = look([2, 3, 4], f"out={tmp_path}/out")
    assert fourth.looks[WITHOUT]["false"] == pytest.approx(0.161, abs=0.008)
    text = (tmp_path / "out" / "compare.md").read_text("utf-8")
    assert "is wrong in 16% of studies without a difference" in text
    assert "which α allows" not in text
    look([2, 3, 4], "compare.sequential=always_valid", f"out={tmp_path}/always")
    text = (tmp_path / "always" / "compare.md").read_text("utf-8")
    assert "does not hold for seeds that are chosen after a look" in text
    assert "allows for any number of looks" not in text
    look([1, 2, 3, 4], "compare.sequential=always_valid", f"out={tmp_path}/all")
    text = (tmp_path / "all" / "compare.md").read_text("utf-8")
    assert "allows for any number of looks" in text


def test_looks_at_one_arm_against_its_base_are_counted(study, compare):
    """Looks at an arm against its base are counted, although the base has no runs of its own."""
    one, two = study("one", seeds=[1, 2], arms=[[]]), study("two", seeds=[3], arms=[[]])
    compare(one)
    record = compare(f"[{one},{two}]")
    assert [looked["seeds"] for looked in record.looks["tuned"]["others"]] == [[1, 2]]


def test_a_look_at_other_runs_is_none(study, compare):
    """Fresh or retrained seeds are not a second look; a damaged record is reported."""
    compare(study("one", seeds=[1, 2]))
    assert compare(study("two", seeds=[3, 4, 5])).looks == {}
    anew = study("anew", seeds=[1, 2, 3], started="2026-11-21T06:00:00.000Z")
    (anew / "compare.json").write_text("{", encoding="utf-8")
    record = compare(anew)
    assert record.looks == {}
    assert "looks were not counted in 1 compare.json that could not be read" in record.notes


def test_a_learning_rate_sweep_is_never_blocked(study, compare):
    """Each of three rates is an arm, and none of the contrasts is confounded."""
    rates = [["optim.lr=1e-4"], ["optim.lr=2e-4"], ["optim.lr=3e-4"]]
    record = compare(study(arms=rates, seeds=[1, 2]))
    assert [arm["name"] for arm in record.arms] == [
        "optim.lr=0.0001",
        "optim.lr=0.0002",
        "optim.lr=0.0003",
    ]
    assert [one["confounded_by"] for one in record.contrasts] == [[], []]


def test_a_backend_and_all_that_it_implies_is_one_factor(study, compare):
    """QLoRA and unquantized LoRA differ by the one word that was typed, which is one factor."""
    record = compare(study(arms=[["backend=qlora"], ["backend=lora"]], seeds=[1, 2]))
    assert record.factors == ["backend"]
    assert [arm["backend"] for arm in record.arms] == ["qlora", "lora"]
    assert record.contrasts[0]["confounded_by"] == []


def test_a_metric_of_the_users_is_compared_in_the_direction_that_it_declares(study, compare, typed):
    """By hand: 0.2 more in each seed. A metric that declares no direction is not a KPI."""
    about = {"unit": "nats", "reduction": "last", "note": ""}
    declared = {
        "probe/margin": {**about, "direction": "max"},
        "probe/gap": {**about, "direction": "min"},
        "lr-AdamW": {**about, "direction": "none"},
    }

    def measured(arm, seed):
        return dict.fromkeys(declared, seed / 10 + arm / 5 + arm * seed / 1000)

    path = study(metrics=(measured, declared))
    record = compare(path, "compare.primary=probe/margin")
    kpis = record.contrasts[0]["kpis"]
    assert "lr-AdamW" not in kpis
    found = kpis["probe/margin"]
    assert found["estimate"] == pytest.approx(0.2 + 3.5 / 1000)
    assert (found["unit"], found["direction"], found["verdict"]) == ("nats", "max", Verdict.BETTER)
    assert kpis["probe/gap"]["direction"] == "min"
    asked = ("task=compare", f"path={path}", "compare.primary=lr-AdamW", "logger=none")
    said = " ".join(typed(*asked, code=2).split())
    assert "no declared direction" in said
    assert '@declares("lr-AdamW", direction="min")' in said
    turned = {"probe/margin": {**about, "direction": "min"}}
    again = compare(study("again", metrics=(measured, turned)), "compare.primary=probe/margin")
    found = again.contrasts[0]["kpis"]["probe/margin"]
    assert (found["direction"], found["verdict"]) == ("min", Verdict.WORSE)  # of these runs alone


@pytest.fixture
def probed(study):
    """Return runs whose metric follows from their telemetry, and the first run's manifest."""
    about = {"unit": "nats", "reduction": "max", "note": "", "direction": "max"}
    runs = study(metrics=(lambda arm, seed: {"probe/margin": arm + seed}, {"probe/margin": about}))
    for file in runs.glob("*/manifest.json"):
        value = json.loads(file.read_text("utf-8"))["results"]["metrics"]["probe/margin"]
        write_telemetry(file.parent, value, about)
    return runs, next(runs.glob("*/manifest.json"))


def write_telemetry(run, value, about):
    """Write two steps of which the last has the lower value."""
    events = [("metric_declared", {"name": "probe/margin", **about})]
    for step, measured in enumerate((value, value - 1), start=1):
        events.append(("logged", {"step": step, "values": {"probe/margin": measured}}))
    lines = [{"ts_ms": 0, "event": event, "payload": payload} for event, payload in events]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    RunDir(run).telemetry.write_text(text, "utf-8")


def test_a_metric_of_the_users_that_its_telemetry_shows_is_accepted(probed, compare):
    """The declared reduction, a maximum, is recomputed from the two steps and agrees."""
    runs, _ = probed
    found = primary(compare(runs, "compare.primary=probe/margin"))
    assert found["estimate"] == pytest.approx(1.0)


def test_a_metric_of_the_users_without_telemetry_is_said_to_be_unverifiable(probed, compare):
    """Without the telemetry the metric is labelled unverifiable."""
    runs, manifest = probed
    RunDir(manifest.parent).telemetry.unlink()
    record = compare(runs, "compare.primary=probe/margin")
    said = "probe/margin are taken as recorded: the run has no telemetry.jsonl"
    assert any(said in one for one in read_study([str(manifest.parent)]).unverifiable)
    assert said in json.dumps(dataclasses.asdict(record))


@pytest.mark.parametrize("file", ["manifest.json", "scorecard.json"])
def test_a_metric_of_the_users_that_its_telemetry_contradicts_is_refused(probed, typed, file):
    """A better value typed into the records, scorecard hash included, contradicts the telemetry."""
    runs, manifest = probed
    told = json.loads(manifest.read_text("utf-8"))
    card = RunDir(manifest.parent).scorecard
    value = told["results"]["metrics"]["probe/margin"] + 5
    if file == manifest.name:
        told["results"]["metrics"]["probe/margin"] = value
    else:
        forged = json.loads(card.read_text("utf-8")) | {"metrics": {"probe/margin": value}}
        card.write_text(json.dumps(forged), "utf-8")
        told["outputs"][card.name] = sha256_file(card)
    manifest.write_text(json.dumps(told), "utf-8")
    said = typed(
        *("task=compare", f"path={runs}", "logger=none", "compare.primary=probe/margin"), code=2
    )
    assert "is not what the steps in the telemetry reduce to" in said
    assert f"{file}: " in said


def test_another_suite_confounds(study, compare):
    """Items of two suites are different questions, so the contrast is confounded."""
    one = study("one", arms=[[]])
    other = study("other", arms=[[WITHOUT]], suite="cd" * 32)
    record = compare(f"'{one},{other}'", "compare.factors=[quant.double_quant]")
    assert "another suite" in record.contrasts[0]["confounded_by"][0]


def test_answers_that_were_made_otherwise_confound(study, compare):
    """Answers sampled otherwise, or more than one per item, confound the contrast of the arms."""
    told = {"engine": "vllm", "temperature": 0.8, "samples": 4, "max_retries": 2}
    record = compare(study(answering=lambda arm: told if arm else {}))
    assert record.contrasts[0]["confounded_by"] == [
        "answers were generated with other settings: eval.engine is hf and vllm",
        "answers were generated with other settings: eval.temperature is 0.0 and 0.8",
        "answers were generated with other settings: eval.samples is 1 and 4",
        "answers were generated with other settings: eval.max_retries is 0 and 2",
    ]


@pytest.mark.parametrize("earlier", [{}, {"grading": 2}])
def test_answers_that_were_graded_by_two_versions_confound(study, compare, earlier):
    """Graders of two versions confound it; scorecards before version 3 do not record theirs."""
    record = compare(study(answering=lambda arm: {"grading": 6} if arm else earlier, seeds=[1, 2]))
    assert record.contrasts[0]["confounded_by"] == [
        "answers were graded by different versions: 2 and 6"
    ]


def test_answers_drawn_with_other_numbers_confound(study, compare):
    """The best of several draws of an arm would win; an eval.seed for each seed is fair."""
    drawn = {"temperature": 0.8}
    record = compare(study(seeds=[1, 2], answering=lambda arm: {**drawn, "seed": 3 * arm}))
    (contrast,) = record.contrasts
    assert contrast["confounded_by"] == [
        f"answers of seed {seed} were drawn with other numbers: eval.seed is 0 and 3"
        for seed in (1, 2)
    ]
    own = iter((7, 7, 8, 8))  # of each seed, in both arms
    record = compare(study("own", seeds=[1, 2], answering=lambda _: {**drawn, "seed": next(own)}))
    assert record.contrasts[0]["confounded_by"] == []
    greedy = study("greedy", seeds=[1, 2], answering=lambda arm: {"seed": arm})
    assert compare(greedy).contrasts[0]["confounded_by"] == []


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_runs_that_trained_on_the_suite_are_labelled(study, compare, is_evaluated):
    """Whether the run recorded it, or the evaluation that scored it later."""
    told = {"seeds": [1, 2], "overlap": lambda arm: 3 * arm}
    runs = study(**({"seeds": [1, 2]} if is_evaluated else told))
    if is_evaluated:
        runs = study("scored", of=runs, **told)
    (contrast,) = compare(runs).contrasts
    label = "was trained on 3 of 4 items of suite=own"
    assert [label in one for one in contrast["environment"]].count(True) == 2
    assert contrast["confounded_by"] == []


def test_answers_that_were_made_otherwise_within_an_arm_confound_it(study, compare):
    """Sweeping eval.temperature alone gives one arm, and confounds its base and tuned answers."""
    values = iter([0.0, 0.8])
    path = study(arms=[[]], seeds=[1, 2], answering=lambda _: {"temperature": next(values)})
    (found,) = compare(path).contrasts[0]["confounded_by"]
    assert "eval.temperature is 0.0 and 0.8" in found


def test_losses_over_different_tokens_get_no_verdict(study, compare):
    """A loss over all tokens and one over the answers' tokens alone are not comparable."""
    record = compare(study(arms=[["objective=assistant"], ["objective=causal"]], seeds=[1, 2]))
    found = record.contrasts[0]["kpis"]["val_loss"]
    assert (found["verdict"], found["estimate"]) == (Verdict.UNKNOWN, None)
    assert "over different tokens of a text" in found["why"]
    assert found["arm_mean"] is not None
    assert record.primary == "parse_rate"


def test_losses_of_preferences_with_other_settings_get_no_verdict(study, compare):
    """Other settings of the preference loss are another function, even on the same pairs."""
    arms = [["objective=dpo", f"objective.beta={beta}"] for beta in (0.1, 0.2)]
    record = compare(study(arms=arms, seeds=[1, 2]))
    found = record.contrasts[0]["kpis"]["val_loss"]
    assert (found["verdict"], found["estimate"]) == (Verdict.UNKNOWN, None)
    assert record.factors == ["objective.beta"]


def test_losses_of_preferences_are_those_of_pairs(study, compare):
    """A hinge loss is not in nats; a likelihood is."""
    for objective, unit in (("dpo", "per pair"), ("kto", "per answer"), ("causal", "nats/token")):
        arms = [[f"objective={objective}", f"lora.r={rank}"] for rank in (8, 16)]
        record = compare(study(arms=arms, seeds=[1, 2]))
        assert record.contrasts[0]["kpis"]["val_loss"]["unit"] == unit


def test_what_changes_no_answer_confounds_nothing(study, compare):
    """Greedy answers ignore top_p and seed, and in f32 the batch size changes no answer."""
    told = {"temperature": 0.0, "top_p": 0.9, "seed": 7, "batch_size": 16}
    f32 = "quant.compute_dtype=f32"
    path = study(
        arms=[[f32], [f32, WITHOUT]], answering=lambda arm: told if arm else {"batch_size": 8}
    )
    contrast = compare(path).contrasts[0]
    assert contrast["confounded_by"] == []
    assert contrast["environment"] == ["suite.batch_size is 8 and 16"]


@pytest.mark.parametrize("engine", ["hf", "vllm", "openai"])
@pytest.mark.parametrize("name", ["batch_size", "max_new_tokens"])
def test_answers_in_batches_or_caches_of_two_sizes_confound_unless_in_f32(
    study, compare, name, engine
):
    """In bf16, the default, every tenth answer differs; a server does not state its format."""
    dtype = "quant.compute_dtype=f32" if engine == "openai" else "quant.compute_dtype=bf16"
    sizes = [{"engine": engine, name: 8}, {"engine": engine, name: 16}]
    path = study(arms=[[dtype], [dtype, WITHOUT]], seeds=[1, 2], answering=lambda arm: sizes[arm])
    (found,) = compare(path).contrasts[0]["confounded_by"]
    assert f"suite.{name} is 8 and 16" in found


def test_answers_of_two_releases_confound_unless_in_f32(study, compare):
    """Earlier releases batched answers otherwise without recording it; only f32 is unaffected."""
    for dtype, confounds in (("bf16", True), ("f32", False)):
        arms = [[f"quant.compute_dtype={dtype}"], [f"quant.compute_dtype={dtype}", WITHOUT]]
        made = [{"batch_size": 8}, {"batch_size": 8, "batching": 2}]
        path = study(dtype, arms=arms, answering=lambda arm, made=made: made[arm])
        found = compare(path).contrasts[0]["confounded_by"]
        assert any("batched by two releases" in one for one in found) is confounds
    both = [{"batch_size": 8, "batching": 2}] * 2
    path = study("both", arms=[[], [WITHOUT]], answering=lambda arm: both[arm])
    assert compare(path).contrasts[0]["confounded_by"] == []


def test_one_arm_in_bf16_confounds_batches_of_two_sizes(study, compare):
    """The compute format is the declared factor; that the other arm uses f32 does not help."""
    sizes = [{"batch_size": 8}, {"batch_size": 16}]
    arms = [["quant.compute_dtype=f32"], ["quant.compute_dtype=bf16"]]
    (contrast,) = compare(study(arms=arms, answering=lambda arm: sizes[arm])).contrasts
    assert "suite.batch_size is 8 and 16" in contrast["confounded_by"][0]


def test_losses_over_more_or_less_text_confound(study, compare):
    """A loss covers the first data.val_max_tokens tokens, which the contract does not state."""
    more = "data.val_max_tokens=1024"
    record = compare(study(arms=[[], [WITHOUT, more]], seeds=[1, 2]))
    assert record.factors == ["quant.double_quant"]
    assert record.contrasts[0]["confounded_by"] == [
        "losses are over other text: data.val_max_tokens is 1024 and 8192"
    ]
    one = study("one", arms=[[]], seeds=[1])
    other = study("other", arms=[[more]], seeds=[2])
    tuned = compare(f"'{one},{other}'").contrasts[0]  # one arm against its base
    assert "data.val_max_tokens is 1024 and 8192" in tuned["confounded_by"][0]


@pytest.mark.parametrize("declared", [[], ["compare.factors=[lora.r,quant.double_quant]"]])
def test_factors_that_never_vary_apart_confound(study, compare, declared):
    """Rank and double quantization change together, so the difference may be due to either."""
    (contrast,) = compare(study(arms=[[], ["lora.r=8", WITHOUT]]), *declared).contrasts
    assert contrast["differs_in"] == ["lora.r", "quant.double_quant"]
    (found,) = contrast["confounded_by"]
    assert found.startswith("lora.r and quant.double_quant always vary together")


def test_factors_of_a_crossed_study_confound_nothing(study, compare):
    """In a two-by-two study each factor varies while the other is fixed (checked by hand)."""
    record = compare(study(arms=[[], ["lora.r=8"], [WITHOUT], ["lora.r=8", WITHOUT]], seeds=[1, 2]))
    assert [one["confounded_by"] for one in record.contrasts] == [[], [], []]


def test_a_seed_without_the_primary_kpi_is_labelled(study, compare):
    """The difference rests on the other two seeds, and its label says so."""
    path = study(seeds=[1, 2, 3], loss=lambda arm, seed: None if (arm, seed) == (1, 3) else 2.0)
    record = compare(path, "compare.primary=val_loss")
    assert primary(record)["seeds"] == [1, 2]
    assert record.contrasts[0]["environment"] == [f"seed 3 of {WITHOUT} has no val_loss"]


def test_runs_that_are_no_jobs_are_in_the_order_of_their_start(study, compare):
    """Order is by start time: run names end in a digest or are chosen by the user."""
    path = study(seeds=[1, 2])
    for run, name in zip(sorted(path.iterdir()), ["d", "a", "c", "b"], strict=True):
        number = int(run.name[0])
        _edit(run, started_utc=f"2026-11-20T06:00:0{3 - number}.000Z")
        run.rename(path / f"20261120T0600000_{name}")
    assert compare(path).reference == WITHOUT  # written last, started first
    for run in path.iterdir():
        run.rename(path / run.name[-1])
    assert compare(path).reference == WITHOUT


def test_seeds_that_are_not_each_there_once_are_labelled(study, compare):
    """A failed, a repeated and a resumed seed are labelled beside the figure that rests on them."""
    path = study(seeds=[1, 2, 3])
    again = study("again", seeds=[2], arms=[[]])
    failed, _, _, resumed = (run for run in sorted(path.iterdir()) if run.name[0] in "0135")
    _edit(failed, status=Status.FAILED)
    _edit(resumed, attempts=[_attempt(None), _attempt(7)])
    declared = ["compare.factors=[quant.double_quant]", "compare.reference=true"]
    record = compare(f"'{path},{again}'", *declared)
    reference = "quant.double_quant=true"
    assert record.contrasts[0]["environment"] == [
        f"seed 3 of {WITHOUT} was resumed from step 7",
        f"seed 1 is missing from {reference}",
        f"seed 2 of {reference} was run 2 times",
    ]
    assert record.left_out == {str(failed): "seed 1 ended failed"}
    base = compare(f"'{again},{path / '2_runs'}'").contrasts[0]  # one arm against its base
    (found,) = base["environment"]
    assert re.fullmatch(r"seed 2 of \w+ was run 2 times", found)


EXTENSION = [{"step": 3, "total": 3}]
WORDS = "extended from 3 to 60 steps after step 3"
LABEL = f"{WORDS}, so its schedule differs from that of a run started with as many steps"


def _extend(run):
    """Record in a contract by hand that its run was extended."""
    contract = Manifest.read(RunDir(run).manifest).contract
    contract["exec"]["extensions"] = EXTENSION
    contract["digest"] = recorded_digest(contract)
    _edit(run, contract=contract, attempts=[_attempt(None), _attempt(3)])


def _extend_of_old(run):
    """Record an extension as an older release does: in the notes, not in the contract."""
    contract = Manifest.read(RunDir(run).manifest).contract
    del contract["exec"]["extensions"]
    note = "trainer.max_steps went from 3 to 60: the cosine schedule is laid over 60 steps from "
    note += "here on, so the rate of step 4 is 0.0002 instead of 0"
    _edit(run, contract=contract, attempts=[_attempt(None), _attempt(3)], notes=[note])


@pytest.mark.parametrize("extend", [_extend, _extend_of_old])
def test_an_extended_arm_confounds_and_is_labelled(study, compare, extend):
    """An extended run has another schedule; the contrast is clean only if both arms have it."""
    path = study(seeds=[1, 2])
    runs = sorted(path.iterdir())
    for run in runs[1::2]:
        extend(run)
    contrast = compare(path).contrasts[0]
    why = f"the arm was {WORDS}, the reference not extended"
    assert contrast["confounded_by"] == [f"the schedule before an extension ({why})"]
    for seed in (1, 2):
        assert f"seed {seed} of {WITHOUT} was {LABEL}" in contrast["environment"]
    assert "resumed from" not in " ".join(contrast["environment"])
    for run in runs[::2]:
        extend(run)
    contrast = compare(path).contrasts[0]
    assert contrast["confounded_by"] == []
    assert f"seed 2 of quant.double_quant=true was {LABEL}" in contrast["environment"]


@pytest.mark.parametrize("extend", [_extend, _extend_of_old])
def test_an_extended_seed_is_none_of_its_arm(study, compare, extend):
    """Seeds with different schedules are not averaged into one arm."""
    path = study(seeds=[1, 2])
    extend(max(path.iterdir()))
    record = compare(path)
    assert [arm["seeds"] for arm in record.arms] == [[1, 2], [1], [2]]
    assert [bool(one["confounded_by"]) for one in record.contrasts] == [False, True]


def _edit(run, **fields):
    manifest = Manifest.read(RunDir(run).manifest)
    for name, value in fields.items():
        setattr(manifest, name, value)
    manifest.write(RunDir(run).manifest)


def _attempt(step):
    utc = "2026-11-20T06:00:00.000Z"
    return Attempt(started_utc=utc, ended_utc=utc, status=Status.SUCCEEDED, resumed_from_step=step)


def test_another_content_of_rows_confounds(study, compare):
    """Rows with another digest confound the contrast, although the contract is the same."""
    one = study("one", arms=[[]])
    other = study("other", arms=[[WITHOUT]], rows="f" * 64)
    record = compare(f"'{one},{other}'", "compare.factors=[quant.double_quant]")
    assert record.contrasts[0]["confounded_by"] == ["another content of data.rows_sha256"]


def test_another_machine_is_labelled(study, compare):
    """Another machine is labelled but does not confound."""
    one = study("one", arms=[[]])
    other = study("other", arms=[[WITHOUT]], torch="9.9")
    (contrast,) = compare(f"'{one},{other}'", "compare.factors=[quant.double_quant]").contrasts
    assert contrast["environment"] == ["torch 9.9 and 2.6"]
    assert contrast["confounded_by"] == []


def test_reruns_tell_their_own_noise(study, compare):
    """Two runs of one configuration and seed, val_loss 1 and 3: sd sqrt(2), computed by hand."""
    first = study("first", seeds=[1, 2], loss=lambda _arm, _seed: 1.0)
    again = study("again", seeds=[1, 2], loss=lambda _arm, _seed: 3.0)
    record = compare(f"'{first},{again}'", "compare.factors=[quant.double_quant]")
    assert record.noise["val_loss"]["rerun"] == pytest.approx(2**0.5)
    assert record.noise["val_loss"]["seed"] == 0
    assert record.noise["parse_rate"]["rerun"] == 0
    assert [arm["runs"] for arm in record.arms] == [4, 4]


def test_without_reruns_their_noise_is_unknown(study, compare):
    """Without reruns the noise is null, with the reason."""
    record = compare(study())
    assert record.noise["val_loss"]["rerun"] is None
    assert record.unknown["noise.rerun"] == "no configuration was run twice with one seed"


def test_one_arm_is_held_against_its_own_base(study, compare):
    """An arm is compared with its own base, paired within each run."""
    record = compare(study(arms=[[]], passes=lambda _arm, seed: seed % 3 + 1))
    assert (record.reference, record.contrasts[0]["arm"]) == ("base", "tuned")
    assert primary(record)["estimate"] == pytest.approx(0.5)  # the base passes no item


def test_an_evaluation_stands_for_its_run_s_scorecard(study, compare, tmp_path):
    """The evaluation's outcomes replace those of the run's scorecard; the run is counted once."""
    path = study(passes=lambda _arm, _seed: 0)
    scored = study("scored", passes=lambda arm, seed: seed % 3 + arm, of=path)
    record = compare(f"'{path},{scored}'")
    assert len(record.runs) == 12
    assert primary(record)["estimate"] == 0.25
    assert all(run["scored_by"] for run in record.runs)
    assert str(tmp_path) in str(record.runs[0]["scored_by"])


def test_an_evaluation_whose_configuration_was_edited_is_refused(study):
    """The configuration names the suite by which the answers are graded again."""
    path = study(seeds=[1, 2])
    scored = study("scored", seeds=[1, 2], of=path)
    config = RunDir(min(scored.iterdir())).config
    config.write_text(config.read_text("utf-8") + "\n", "utf-8")
    with pytest.raises(DataError, match="has changed since its run wrote it") as refused:
        read_study([str(path), str(scored)])
    assert refused.value.where == str(config)


def test_an_evaluation_of_a_run_that_lay_there_before_is_left_out(study, compare):
    """After retraining in place, the adapter that was scored is no longer there."""
    path = study(passes=lambda _arm, _seed: 4)
    scored = study("scored", passes=lambda _arm, _seed: 0, of=path)
    for number, run in enumerate(sorted(scored.iterdir())):
        manifest = Manifest.read(RunDir(run).manifest)
        manifest.inputs["adapter_sha256"] = ("ad" if number else "cd") * 32
        manifest.write(RunDir(run).manifest)
    record = compare(f"'{path},{scored}'")
    (why,) = record.left_out.values()
    assert why.startswith("it scored another adapter than ")
    assert [run["scored_by"] is None for run in record.runs].count(True) == 1
    assert len(record.runs) == 12


def test_runs_that_did_not_end_well_are_left_out_by_name(study, compare):
    """A failed run is left out, and the record names it."""
    path = study(seeds=[1, 2, 3])
    run = next(iter(sorted(path.iterdir())))
    manifest = Manifest.read(RunDir(run).manifest)
    manifest.status = Status.FAILED
    manifest.write(RunDir(run).manifest)
    record = compare(path)
    assert record.left_out == {str(run): "seed 1 ended failed"}
    assert len(record.runs) == 5


def test_an_evaluation_of_a_failed_run_is_left_out_too(study):
    """The run's seed is missing, however its evaluation was given."""
    path = study(seeds=[1, 2, 3])
    scored = study("scored", seeds=[1, 2, 3], of=path)
    run = RunDir(min(path.iterdir()))
    manifest = Manifest.read(run.manifest)
    manifest.status = Status.FAILED
    manifest.write(run.manifest)
    whole, alone = (read_study([str(one) for one in given]) for given in ([path, scored], [scored]))
    assert len(whole.runs) == len(alone.runs) == 5
    assert set(alone.left_out.values()) == {"the run that it scored ended failed"}
    assert set(whole.left_out.values()) == {*alone.left_out.values(), "seed 1 ended failed"}


def test_evaluations_of_no_training_run_are_left_out_by_name(study):
    """Evaluations of a base alone, or of a suite's own models, are left out and named."""
    path = study(seeds=[1, 2])
    scored = study("scored", seeds=[1], of=path)
    for run, subject in zip(sorted(scored.iterdir()), ("base", None), strict=True):
        manifest = Manifest.read(RunDir(run).manifest)
        manifest.inputs["subject"] = subject
        manifest.write(RunDir(run).manifest)
    read = read_study([str(path), str(scored)])
    assert set(read.left_out.values()) == {"it scored no training run"}
    assert (len(read.runs), len(read.left_out)) == (4, 2)


def test_a_scorecard_file_names_its_run(study, compare):
    """A path to a scorecard file stands for the run that contains it."""
    path = study(seeds=[1])
    files = [str(RunDir(run).scorecard) for run in sorted(path.iterdir())]
    assert len(compare(f"'{','.join(files)}'").runs) == 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["compare.factors=[lora.rank]"], "lora.rank"),
        (["compare.factors=[seed]"], "paired by"),
        (["compare.primary=parse_rat"], "the nearest is parse_rate"),
        (["compare.reference=nobody"], "does not name an arm"),
        (["compare.alpha=0"], "out of range"),
        (["compare.alpha=0.9"], "out of range"),
        (["compare.alpha=1e-12"], "out of range"),
        (["compare.power=0.01"], "out of range"),
        (["compare.sequential=always_valid", "compare.test=sign_flip"], "always-valid test is"),
        (["logger=csv"], "wandb or none"),
        (["lora.r=8"], "has no effect with task=compare"),
    ],
)
def test_what_cannot_be_compared_so_is_refused(study, typed, settings, reason):
    """The command ends with exit code 2 and says why."""
    usual = [] if any("logger" in text for text in settings) else ["logger=none"]
    said = typed("task=compare", f"path={study()}", *usual, *settings, code=2)
    assert reason in " ".join(said.split())


def test_a_path_without_runs_is_refused(typed, tmp_path):
    """Refused: an empty directory, a name of no run, and a scorecard outside a run."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "scorecard.json").write_text("{}", encoding="utf-8")
    for path, reason in (
        ("empty", "a directory without a run"),
        ("absent", "nothing is there"),
        ("none*", "nothing is there"),
        ("scorecard.json", "without the manifest"),
    ):
        said = typed("task=compare", f"path={tmp_path / path}", "logger=none", code=2)
        assert reason in said


TOKENS = {"a": 10, "b": 30, "c": 60, "d": 20}  # of four validation documents


def document_losses(arm, seed):
    """Return nats per token; the second arm is better on three documents and worse on the last."""
    better = {"a": 0.3, "b": 0.35, "c": 0.25, "d": -0.5}
    return {name: 2 + seed / 50 - arm * (gain + seed / 100) for name, gain in better.items()}


def mean_loss(arm, seed):
    """Return the loss of the run: the mean over all tokens."""
    losses = document_losses(arm, seed)
    return sum(losses[name] * TOKENS[name] for name in TOKENS) / sum(TOKENS.values())


def with_documents(runs):
    """Write the losses of each run's validation documents, and their hash into its manifest."""
    for file in sorted(runs.glob("*/manifest.json")):
        told = json.loads(file.read_text("utf-8"))
        arm = int("quant.double_quant=false" in told["overrides"])
        losses = document_losses(arm, told["seed"])
        text = "".join(
            json.dumps({"item_id": n, "condition": "tuned", "loss": v * TOKENS[n], "tokens": t})
            + "\n"
            for (n, t), v in zip(TOKENS.items(), losses.values(), strict=True)
        )
        file.with_name("validation.jsonl").write_text(text, "utf-8")
        told["outputs"]["validation.jsonl"] = hashlib.sha256(text.encode()).hexdigest()
        file.write_text(json.dumps(told), "utf-8")
    return runs


LOSS = "compare.primary=val_loss"
LIKE = "compare.target=items_like_these"


def test_documents_that_disagree_decide_about_these_items_only(study, compare, typed):
    """Every seed is far better, but a quarter of the documents is worse by more."""
    runs = with_documents(study(loss=mean_loss))
    assert primary(compare(runs, LOSS))["verdict"] == "better"
    record = compare(runs, LOSS, LIKE)
    found = primary(record)
    assert (found["verdict"], found["items"]) == ("no difference found", 4)
    assert found["low"] < found["estimate"] < 0 < found["high"]
    assert record.target == "items_like_these"
    assert "val_loss on items like these" in typed(
        "task=compare", f"path={runs}", "logger=none", LOSS, LIKE
    )


def test_interval_over_documents_is_that_of_their_token_weighted_losses(study, compare):
    """The interval is Student's t over four linearised documents, as the seeds hardly differ.

    Computed with numpy from the standard error of a ratio; no seed adds to it.
    """
    found = primary(compare(with_documents(study(loss=mean_loss)), LOSS, LIKE))
    tokens = np.array([*TOKENS.values()], float)
    gains = np.array(
        [[document_losses(1, s)[n] - document_losses(0, s)[n] for n in TOKENS] for s in range(1, 7)]
    )
    of_documents = gains.mean(axis=0)
    ratio = (of_documents * tokens).sum() / tokens.sum()
    error = np.std((of_documents - ratio) * tokens / tokens.mean(), ddof=1) / np.sqrt(4)
    seeds = np.std(gains @ tokens / tokens.sum(), ddof=1) / np.sqrt(6)
    both = np.hypot(error, seeds)
    assert found["estimate"] == pytest.approx(ratio, rel=1e-6)
    assert (found["high"] - found["low"]) / 2 == pytest.approx(
        stats.t.ppf(0.975, 3 * (both / error) ** 4) * both, rel=0.02
    )


def test_a_run_without_losses_of_documents_tells_nothing_of_others(study, compare):
    """Older runs recorded no document losses, so their interval is for these documents alone."""
    found = primary(compare(study(loss=mean_loss), LOSS, LIKE))
    assert (found["verdict"], found["low"]) == ("unknown", None)
    assert "no items" in found["why"]


def test_losses_of_documents_that_were_edited_are_refused(study, typed):
    """The file is checked against its hash, as every file that a comparison reads."""
    runs = with_documents(study(loss=mean_loss))
    file = next(runs.glob("*/validation.jsonl"))
    file.write_text(file.read_text("utf-8").replace('"tokens": 10', '"tokens": 11'), "utf-8")
    said = typed("task=compare", f"path={runs}", "logger=none", LOSS, code=2)
    assert f"{file}: has changed since its run wrote it" in said


def test_a_loss_that_its_documents_contradict_is_refused(study, typed):
    """A better loss typed into the manifest is refused: the documents give another."""
    runs = with_documents(study(loss=mean_loss))
    file = next(runs.glob("*/manifest.json"))
    told = json.loads(file.read_text("utf-8"))
    told["results"]["tuned_val_loss"] -= 0.01
    file.write_text(json.dumps(told), "utf-8")
    said = typed("task=compare", f"path={runs}", "logger=none", LOSS, code=2)
    assert "results.tuned_val_loss: is not the mean over the documents' tokens" in said


@pytest.mark.parametrize("rule", ["compare.test=sign_flip", "compare.sequential=always_valid"])
def test_a_rule_about_these_items_tells_nothing_of_others(study, typed, rule):
    """Such a rule supports no claim about other items; refused before anything is read."""
    runs = study(loss=mean_loss)
    said = typed("task=compare", f"path={runs}", "logger=none", rule, LIKE, code=2)
    assert "compare.target=these_items" in said


@pytest.mark.draws
def test_page_and_table_are_written_where_asked(study, compare, tmp_path):
    """The record comes with a self-contained HTML page, drawings included, and a Markdown table."""
    out = tmp_path / "verdict"
    record = compare(study(passes=lambda arm, seed: seed % 3 + arm), f"out={out}")
    assert Comparison.read(out / "compare.json") == record
    html = (out / "compare.html").read_text("utf-8")
    assert html.count("<svg") >= 5
    assert "<script" not in html
    assert "https:" not in html
    table = (out / "compare.md").read_text("utf-8")
    assert f"| {WITHOUT} | +0.25 |" in table


def test_w_and_b_shows_the_same(study, compare, tmp_path):
    """An offline W&B run has the verdicts as a table and in its summary."""
    compare(study(seeds=[1, 2]), "logger=wandb")
    (run,) = (tmp_path / "here").glob("*/wandb/offline-run-*")
    table = next((run / "files" / "media" / "table").glob("verdicts_*.json"))
    found = json.loads(table.read_text("utf-8"))
    assert found["columns"][0] == "arm"
    assert found["data"][0][0] == WITHOUT
    names = {path.name.split("_")[0] for path in table.parent.glob("*.json")}
    assert names == {"verdicts", "kpis", "arms", "noise"}
    panels = {path.name.split("_")[0] for path in (table.parent / "plots").iterdir()}
    assert panels == {"arms", "cost"}
    arms = json.loads(next(table.parent.glob("arms_*.json")).read_text("utf-8"))
    assert {"tuned/parse_rate", "tuned/val_loss", "train_s"} <= {*arms["columns"]}
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", "--summary", str(run)]
    said = fork_server.run(command, check=True, capture_output=True, text=True).stdout
    shown = json.loads(said)
    assert shown["name"] == "compare: quant.double_quant true vs false"
    assert {shown["summary"][name]["_type"] for name in names} == {"table-file"}
    assert shown["summary"]["runs"] == 4


def test_a_ledger_tells_registered_from_exploratory(study, compare, typed, tmp_path):
    """The registered study names its cycle; any other says what was registered instead."""
    cycle = {
        "cycle": "first",
        "suite_digest": "ab" * 32,
        "seeds": [1, 2],
        "arms": ["quant.double_quant=true", WITHOUT],
        "factor": "quant.double_quant",
        "kpi": "parse_rate",
        "direction": "lower",
        "margin": 0.0,
    }
    ledger = tmp_path / "ledger.jsonl"
    append(ledger, EntryKind.CYCLE, lambda _: cycle)
    told = study("told", seeds=[1, 2], started="2126-01-01T00:00:00.000Z")
    record = compare(told, f"ledger={ledger}")
    assert (record.cycle, record.exploratory) == ("first", None)
    record = compare(study("early", seeds=[1, 2, 3]), f"ledger={ledger}")
    assert record.cycle is None
    assert "6 runs began before it was opened" in str(record.exploratory)
    assert "other seeds than were registered" in str(record.exploratory)
    absent = f"ledger={tmp_path / 'absent'}"
    assert "no such ledger" in typed("task=compare", f"path={told}", absent, "logger=none", code=2)
