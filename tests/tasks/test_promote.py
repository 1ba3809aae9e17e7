"""The command task=promote: policies on comparisons of small studies, each on its own ledger."""

from __future__ import annotations

import json
import shutil

import pytest
from hand_written_runs import Run

from mens_exp.artifacts.atomic import write_json
from mens_exp.artifacts.decision_ledger import Answer, EntryKind, append, read_ledger
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.promotion import (
    BurnProductionPolicy,
    BurnRndPolicy,
    CompareConfig,
    EvalGatePolicy,
    QloraPlateauPolicy,
)
from mens_exp.errors import RequestError
from mens_exp.evals.study import conducted
from mens_exp.planning.contract import recorded_digest
from mens_exp.tasks.promote import decided
from mens_exp.tasks.promotion_evidence import comparison_files
from mens_exp.tasks.study_runs import read_study

SUITE = "ab" * 32
ARMS = (("backend=qlora",), ("backend=burn",))
AFTER = "2126-01-01T00:00:00.000Z"


def good(arm, seed, item):
    """Return answers of which burn passes all, and qlora fails a third of the items."""
    passed = arm == 1 or (seed + item) % 3 > 0
    return {
        "compile_pass_1": True,
        "compile_pass_n": True,
        "canonical_pass": True,
        "strictness": True,
        "task_success": passed,
        "semantic_task_success": passed,
        "anti_stub_pass": True,
        "richness": 0.5,
        "trivial_placeholder_output": False,
        "placeholder_marker_hits": 0,
        "repair_depth": 1,
        "repair_stalled": False,
        "attempts": 1,
    }


def regressed(arm, seed, item):
    """Return the same answers with the success of the two arms exchanged."""
    return {**good(arm, seed, item), "task_success": good(1 - arm, seed, item)["task_success"]}


@pytest.fixture
def lab(study, tmp_path, frozen):
    return Lab(study, tmp_path, frozen)


class Lab:
    """Opens cycles, runs and compares them, and asks for decisions."""

    def __init__(self, study, root, frozen):
        """Keep everything under one directory."""
        self.study, self.root, self.frozen = study, root, frozen
        self.ledger = root / "decisions.jsonl"

    def open(self, name, seeds):
        cycle = {
            "cycle": name,
            "suite_digest": SUITE,
            "seeds": seeds,
            "arms": ["qlora", "burn"],
            "factor": "backend",
            "kpi": "task_success",
            "direction": "higher",
            "margin": 0.0,
            "frozen": self.frozen,
        }
        append(self.ledger, EntryKind.CYCLE, lambda _: cycle)

    def cycle(self, name, seeds, **how):
        told = {"kpis": good, "passes": lambda *_: 4, "suite": SUITE, "started": AFTER, **how}
        return self.compared(name, self.study(name, **{"arms": ARMS, "seeds": seeds, **told}))

    def compared(self, name, runs, *factors):
        """Compare as the task does, without composing a command line."""
        out = self.root / "verdicts" / name
        read = read_study([str(runs)])
        conducted([str(runs)], read.runs, factors, CompareConfig()).write(out / "compare.json")
        return out

    def two(self, **how):
        made = []
        for name, seeds in (("one", [1, 2, 3, 4]), ("two", [5, 6, 7, 8])):
            self.open(name, seeds)
            made.append(self.cycle(name, seeds, **how))
        return made

    def ask(self, policy, paths, parity=None):
        """Decide as the task does."""
        files = comparison_files(",".join(map(str, paths)))
        certificate = None if parity is None else str(parity)
        entry = append(
            self.ledger, EntryKind.DECISION, lambda all_: decided(policy, files, certificate, all_)
        )
        return entry["decision"]

    def burn(self, paths):
        return self.ask(BurnProductionPolicy(), paths, self.certificate())

    def certificate(self, **changes):
        """Write a passed certificate of the adapter of a burn run, as the merge that made it."""
        fields = {
            "format": "mens_exp_parity",
            "version": 1,
            "evidence": "weights",
            "reference": "r",
            "reference_nll": None,
            "probe": None,
            "judged": None,
            "comparisons": {},
            "tensors": {"l0.q": {"max_abs": 1e-6, "relative": 1e-5}},
            "budget": {"weight_error": 0.05},
            "passed": True,
            "accepted": False,
            "sources": {"adapter_sha256": "ad" * 32},
            "files": {"README.md": "0b" * 32, "model.safetensors": "5a" * 32},
            **changes,
        }
        run = RunDir(self.root / "merge")
        out = {"model/README.md": "0c" * 32, "model/model.safetensors": "5a" * 32}
        write_json(run.parity, fields)
        Manifest(
            run_id="merge",
            task="merge",
            status=Status.SUCCEEDED,
            started_utc=AFTER,
            overrides=[],
            choices={},
            config_digest="0" * 64,
            seed=42,
            provenance={},
            results={"out": "model", "out_sha256": out},
            outputs={run.parity.name: sha256_file(run.parity)},
        ).write(run.manifest)
        return run.parity

    def beside_the_model(self, **changes):
        """Copy the certificate to the model, whose card got a section after the run's copy."""
        fields = json.loads((self.root / "merge" / "parity.json").read_text("utf-8"))
        files = fields["files"] | ({"README.md": "0c" * 32} if fields["files"] else {})
        copy = self.root / "model" / "parity.json"
        write_json(copy, {**fields, "files": files, **changes})
        return copy


def unmet(made):
    return {rule["rule"] for rule in made["rules"] if rule["outcome"] != "passed"}


def test_two_clean_cycles_promote(lab):
    """Superior, worse nowhere, above every floor and certified: exit code 0."""
    made = lab.burn(lab.two())
    assert made["decision"] == Answer.PROMOTE
    assert unmet(made) == set()
    rule = next(rule for rule in made["rules"] if rule["rule"] == "superiority")
    assert (rule["kpi"], rule["threshold"]) == ("task_success", 0)
    assert rule["observed"] > 0
    assert [one["cycle"] for one in made["evidence"]] == ["one", "two"]


def test_a_missing_cycle_is_insufficient(lab):
    """One cycle, however good, is not enough, even if it is given twice."""
    lab.open("one", [1, 2, 3, 4])
    path = lab.cycle("one", [1, 2, 3, 4])
    copy = shutil.copytree(path, lab.root / "copy")
    for paths in ([path], [path, copy]):
        made = lab.burn(paths)
        assert made["decision"] == Answer.INSUFFICIENT
        assert unmet(made) == {"cycles"}


def test_a_planted_regression_is_rejected(lab):
    """The challenger succeeds less often in every seed of both cycles."""
    made = lab.burn(lab.two(kpis=regressed))
    assert made["decision"] == Answer.REJECT
    assert {"superiority", "non-inferiority"} <= unmet(made)


def test_a_regression_in_repair_alone_is_rejected(lab):
    """More successes do not make up for twice as many attempts."""

    def slower(arm, seed, item):
        return {**good(arm, seed, item), "attempts": 1 + arm + (seed + item) % 2 / 10}

    made = lab.burn(lab.two(kpis=slower))
    assert made["decision"] == Answer.REJECT
    assert unmet(made) == {"non-inferiority"}
    worse = {rule["kpi"] for rule in made["rules"] if rule["outcome"] == "failed"}
    assert worse == {"attempts"}


def test_equal_differences_are_no_superiority_by_their_point_alone(lab):
    """Four seeds, each better by one item: a zero-width interval, but p = 1/8."""

    def same(arm, seed, item):
        passed = arm == 1 or item > 0
        return {
            **good(arm, seed, item),
            "task_success": passed,
            "semantic_task_success": passed,
        }

    made = lab.burn(lab.two(kpis=same))
    assert (made["decision"], unmet(made)) == (Answer.HOLD, {"superiority"})
    rule = next(rule for rule in made["rules"] if rule["rule"] == "superiority")
    assert rule["observed"] == 0.25
    assert "all differences are equal, so there is no spread" in rule["note"]


def test_no_shown_superiority_holds(lab):
    """Equal arms are neither worse nor better, so the decision is to hold."""

    def equal(_arm, seed, item):
        return good(1, seed, item)

    made = lab.burn(lab.two(kpis=equal))
    assert (made["decision"], unmet(made)) == (Answer.HOLD, {"superiority"})


def test_another_suite_digest_does_not_count(lab):
    """A cycle scored by another suite than the one it froze does not count."""
    first = lab.two()[0]
    lab.open("three", [11, 12, 13, 14])
    other = lab.cycle("three", [11, 12, 13, 14], suite="cd" * 32)
    made = lab.burn([first, other])
    assert made["decision"] == Answer.INSUFFICIENT
    assert {"cycles", "registered"} <= unmet(made)
    note = next(r["note"] for r in made["rules"] if r["rule"] == "registered" and r["note"])
    assert "another suite digest" in note
    assert note.startswith("exploratory")


def test_runs_before_the_cycle_was_opened_are_exploratory(lab):
    """Runs from before the opening are exploratory, as their results were known already."""
    made = lab.burn(lab.two(started="2020-01-01T00:00:00.000Z"))
    assert made["decision"] == Answer.INSUFFICIENT
    notes = " ".join(rule["note"] for rule in made["rules"] if rule["rule"] == "registered")
    assert "runs began before it was opened" in notes


def test_leaving_out_a_registered_seed_is_exploratory(lab):
    """Seeds must not be selected after the results are seen."""
    lab.open("one", [1, 2, 3, 4])
    made = lab.burn([lab.cycle("one", [1, 2, 3])])
    notes = " ".join(rule["note"] for rule in made["rules"] if rule["rule"] == "registered")
    assert "other seeds than were registered" in notes


def test_a_swapped_scorecard_is_told(lab):
    """With the scorecard of another run, the comparison no longer holds."""
    paths = lab.two()
    runs = sorted((lab.root / "study" / "two").iterdir())
    for name in ("scorecard", "events"):
        shutil.copy(getattr(RunDir(runs[0]), name), getattr(RunDir(runs[1]), name))
    made = lab.burn(paths)
    assert made["decision"] == Answer.INSUFFICIENT
    told = [rule for rule in made["rules"] if rule["rule"] == "evidence"]
    assert [rule["outcome"] for rule in told] == ["passed", "failed"]
    assert "events.jsonl is not what was compared" in str(told[1]["observed"])


def test_an_edited_comparison_is_told(lab):
    """Figures that do not follow from the runs do not count."""
    paths = lab.two()
    file = paths[0] / "compare.json"
    record = json.loads(file.read_text("utf-8"))
    for arm in record["arms"]:
        arm["kpis"]["task_success"] = 1.0
    file.write_text(json.dumps(record), encoding="utf-8")
    made = lab.burn(paths)
    assert made["decision"] == Answer.INSUFFICIENT
    (told, _) = [rule for rule in made["rules"] if rule["rule"] == "evidence"]
    assert told["observed"] == "arms come out otherwise from the same runs"


def test_a_missing_kpi_group_is_insufficient(lab):
    """A missing repair KPI leaves too little evidence to decide."""

    def without(arm, seed, item):
        lacking = {"repair_depth", "repair_stalled", "attempts"}
        return {k: v for k, v in good(arm, seed, item).items() if k not in lacking}

    made = lab.burn(lab.two(kpis=without))
    assert (made["decision"], unmet(made)) == (
        Answer.INSUFFICIENT,
        {"non-inferiority: repair"},
    )


def test_a_floor_is_absolute(lab):
    """The challenger beats the incumbent, but is below the floor for strictness."""

    def loose(arm, seed, item):
        return {**good(arm, seed, item), "strictness": item < 3}

    made = lab.burn(lab.two(kpis=loose))
    assert (made["decision"], unmet(made)) == (Answer.REJECT, {"floor"})


def test_without_a_certificate_there_is_no_promotion(lab):
    """No certificate, or that of another adapter, prevents promotion."""
    paths = lab.two()
    made = lab.ask(BurnProductionPolicy(), paths)
    assert (made["decision"], unmet(made)) == (Answer.INSUFFICIENT, {"parity certificate"})
    file = lab.certificate(sources={"adapter_sha256": "00" * 32})
    made = lab.ask(BurnProductionPolicy(), paths, file)
    assert unmet(made) == {"parity certificate"}


def of_another_adapter(lab):
    """A certificate of another run's adapter, with the hash of this one written in."""
    file = lab.certificate(sources={"adapter_sha256": "00" * 32})
    edit(file, sources={"adapter_sha256": "ad" * 32})
    return file, f"it is not as {file.parent} wrote it: outputs.parity.json"


def of_another_adapter_elsewhere(lab):
    """The same in a copy next to the model, while the run has the original."""
    lab.certificate(sources={"adapter_sha256": "00" * 32})
    return lab.beside_the_model(sources={"adapter_sha256": "ad" * 32}), "differs in sources"


def of_no_run(lab):
    """Nothing near it wrote a model of these files."""
    lab.certificate()
    copy = lab.beside_the_model()
    (lab.root / "merge" / "manifest.json").unlink()
    return copy, "move that run next to it, or merge again"


def of_no_files(lab):
    """A certificate without files would fit every merge."""
    lab.certificate()
    return lab.beside_the_model(files={}), "no task=merge or task=export run that wrote it"


def of_nothing(lab):
    """Without a tensor or a judged comparison, it cannot exceed any budget."""
    return lab.certificate(tensors={}, budget={"weight_error": None}), "it measured nothing"


def of_an_edited_merge(lab):
    """The merge's own hash of the certificate was replaced, but not the digest of its manifest."""
    file = lab.certificate(sources={"adapter_sha256": "00" * 32})
    merge = Run(file.parent)
    merge.close()
    edit(file, sources={"adapter_sha256": "ad" * 32})
    outputs = json.loads(merge.manifest.read_text("utf-8"))["outputs"]
    merge.tell(outputs={**outputs, "parity.json": sha256_file(file)})
    return file, "manifest.json, all but its notes"


def edit(file, **changes):
    write_json(file, {**json.loads(file.read_text("utf-8")), **changes})


@pytest.mark.parametrize(
    "forged",
    [
        *(of_another_adapter, of_another_adapter_elsewhere, of_no_run, of_no_files, of_nothing),
        of_an_edited_merge,
    ],
)
def test_a_certificate_that_no_run_wrote_so_is_no_evidence(lab, forged):
    """It counts only as the merge or export wrote it that has its hash."""
    file, why = forged(lab)
    made = lab.ask(BurnProductionPolicy(), lab.two(), file)
    assert (made["decision"], unmet(made)) == (Answer.INSUFFICIENT, {"parity certificate"})
    (rule,) = [one for one in made["rules"] if one["rule"] == "parity certificate"]
    assert why in rule["note"]


def test_a_copy_of_a_certificate_counts(lab):
    """The merge wrote one into its run and one next to the model."""
    lab.certificate()
    copy = lab.beside_the_model()
    assert lab.ask(BurnProductionPolicy(), lab.two(), copy)["decision"] == Answer.PROMOTE


def test_runs_that_were_scored_again_are_no_evidence(lab):
    """Otherwise a cycle that failed could be answered again, in another way, until it passes."""
    paths = []
    for name, seeds in (("one", [1, 2, 3, 4]), ("two", [5, 6, 7, 8])):
        lab.open(name, seeds)
        told = {"arms": ARMS, "seeds": seeds, "passes": lambda *_: 4, "suite": SUITE}
        told |= {"started": AFTER, "kpis": good}
        runs = lab.study(name, **told)
        scored = lab.study(f"{name}_again", of=runs, **told)
        paths.append(lab.compared(name, scored))
    made = lab.burn(paths)
    assert (made["decision"], unmet(made)) == (Answer.INSUFFICIENT, {"first scores"})


def test_a_certificate_is_held_to_the_default_budget(lab):
    """A merge may set a looser one, within which anything passes."""
    paths = lab.two()
    for relative, decision in ((0.04, Answer.PROMOTE), (0.5, Answer.INSUFFICIENT)):
        tensors = {"l0.q": {"max_abs": 1e-3, "relative": relative}}
        file = lab.certificate(tensors=tensors, budget={"weight_error": 1000.0})
        made = lab.ask(BurnProductionPolicy(), paths, file)
        assert made["decision"] == decision
    assert unmet(made) == {"parity certificate"}
    (rule,) = [one for one in made["rules"] if one["rule"] == "parity certificate"]
    assert "relative error 0.5 > 0.05" in rule["note"]


@pytest.mark.parametrize(("contained", "rules"), [(0, set()), (1, {"unseen items"})])
def test_runs_that_trained_on_the_suite_are_no_evidence(lab, contained, rules):
    """Of four items, one is more than a run accepts by default."""
    made = lab.burn(lab.two(overlap=lambda _: contained))
    assert unmet(made) == rules
    assert made["decision"] == (Answer.INSUFFICIENT if rules else Answer.PROMOTE)


def test_a_confounded_contrast_is_no_evidence(lab):
    """The rank differs with the backend in the second cycle, which confounds it."""
    lab.open("one", [1, 2, 3, 4])
    first = lab.cycle("one", [1, 2, 3, 4])
    lab.open("two", [5, 6, 7, 8])
    told = {"kpis": good, "passes": lambda *_: 4, "suite": SUITE, "started": AFTER}
    arms = [["backend=qlora"], ["backend=burn", "lora.alpha=64"]]
    runs = lab.study("two", arms=arms, seeds=[5, 6, 7, 8], **told)
    second = lab.root / "verdicts" / "two"
    lab.compared("two", runs, "backend")
    made = lab.burn([first, second])
    assert made["decision"] == Answer.INSUFFICIENT
    assert unmet(made) == {"contrast"}
    assert any("confounded by lora.alpha" in rule["note"] for rule in made["rules"])


@pytest.mark.parametrize("extended", [[5, 6, 7, 8], [8]])
def test_extended_runs_are_no_evidence(lab, extended):
    """Their schedule differs from that of the runs they are compared with."""
    lab.open("one", [1, 2, 3, 4])
    first = lab.cycle("one", [1, 2, 3, 4])
    lab.open("two", [5, 6, 7, 8])
    told = {"kpis": good, "passes": lambda *_: 4, "suite": SUITE, "started": AFTER}
    runs = lab.study("two", arms=ARMS, seeds=[5, 6, 7, 8], **told)
    for run in map(RunDir, runs.iterdir()):
        manifest = Manifest.read(run.manifest)
        if manifest.choices["backend"] == "burn" and manifest.seed in extended:
            manifest.contract["exec"]["extensions"] = [{"step": 3, "total": 3}]
            manifest.contract["digest"] = recorded_digest(manifest.contract)
            manifest.write(run.manifest)
    second = lab.root / "verdicts" / "two"
    lab.compared("two", runs, "backend")
    made = lab.burn([first, second])
    assert made["decision"] == Answer.INSUFFICIENT
    if len(extended) > 1:
        assert unmet(made) == {"contrast"}
        assert any("extended from 3 to 60 steps" in rule["note"] for rule in made["rules"])
    else:
        assert "seeds" in unmet(made)


def test_an_edited_ledger_is_refused(lab):
    """After a changed digit or a dropped line, the ledger is neither read nor added to."""
    lab.open("one", [1, 2])
    lab.open("two", [3, 4])
    lab.open("three", [5, 6])
    lines = lab.ledger.read_text("utf-8").splitlines(keepends=True)
    edited = [lines[0], lines[1].replace("[3,4]", "[3,9]"), lines[2]]
    assert edited != lines
    for tampered, reason in ((edited, "modified after it was written"), (lines[1:], "follow")):
        lab.ledger.write_text("".join(tampered), encoding="utf-8")
        before = lab.ledger.read_bytes()
        with pytest.raises(RequestError, match=reason):
            read_ledger(lab.ledger)
        with pytest.raises(RequestError, match=reason):
            lab.open("four", [7, 8])
        assert lab.ledger.read_bytes() == before


@pytest.mark.parametrize("arms", ["[attention,mlp]", '["lora=attention","lora=mlp"]'])
def test_the_command_that_runs_a_cycle_is_one(lab, typed, arms):
    """An arm is named by its value of the factor, or by its full name in comparisons."""
    told = [f"promote.suite_digest={SUITE}", f"promote.arms={arms}", "promote.factor=lora"]
    command = ["task=promote", "promote.open_cycle=one", f"ledger={lab.ledger}", *told]
    assert "mens_exp -m seed=1,2 lora=attention,mlp" in typed(*command, "promote.seeds=[1,2]")


def test_the_command_line_opens_decides_and_replays(lab, typed):
    """Exit code 0 for promote, 4 for other decisions and for a replay that differs."""
    told = [f"promote.suite_digest={SUITE}", "promote.arms=[qlora,burn]", "promote.factor=backend"]
    ledger, parity = f"ledger={lab.ledger}", f"promote.parity={lab.certificate()}"
    paths = []
    for name, seeds in (("one", [1, 2, 3, 4]), ("two", [5, 6, 7, 8])):
        frozen = f"promote.seeds={seeds}".replace(" ", "")
        opening = ["task=promote", f"promote.open_cycle={name}", ledger, *told, frozen]
        assert "the nearest is val_loss" in typed(*opening, "promote.kpi=val_los", code=2)
        said = typed(*opening)
        assert f"Cycle {name} is open" in said
        paths.append(str(lab.cycle(name, seeds)))
    both = f"path=[{','.join(paths)}]"
    asked = ["task=promote", "policy=burn_production", ledger, parity]
    assert "burn_production: promote" in typed(*asked, both)
    assert "insufficient_evidence" in typed(*asked, f"path={paths[0]}", code=4)
    replay = ["task=promote", "promote.replay=true", ledger]
    assert "2 decisions of 4 entries" in typed(*replay)
    scorecard = RunDir(next((lab.root / "study" / "one").iterdir())).scorecard
    scorecard.write_text(scorecard.read_text("utf-8") + " ", encoding="utf-8")
    assert "a past decision comes out otherwise" in typed(*replay, code=4)
    lab.ledger.write_bytes(lab.ledger.read_bytes().replace(b"[5,6,7,8]", b"[5,6,7,9]", 1))
    assert "modified after it was written" in typed(*replay, code=2)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (["promote.seeds=[1]"], "promote.seeds: no verdict can be reached"),
        (["promote.test=sign_flip"], "give a sign-flip p of at least 0.125, never 0.05"),
        (["promote.seeds=[1,2,3]", "promote.sequential=always_valid"], "expected at least 4 seeds"),
        (["promote.direction=lower"], "promote.direction: no promotion can follow"),
        (["promote.margin=1"], "promote.margin: no share can exceed it"),
        (
            ["promote.arms=[qlora,burn,burn]"],
            "promote.arms: must list at least two distinct arms to open a cycle",
        ),
        (["promote.factor=lora.r"], "promote.arms: is not a value of the factor found qlora"),
        (["promote.arms=[qlora,born]"], "promote.arms: is not a value of the factor found born"),
    ],
)
def test_a_cycle_that_can_support_no_promotion_is_not_opened(lab, typed, told, said):
    """The ledger would require it of every later decision; 2 / 2^4 is the sign-flip test's p."""
    frozen = [f"promote.suite_digest={SUITE}", "promote.factor=backend", "promote.kpi=task_success"]
    frozen += ["promote.arms=[qlora,burn]", "promote.seeds=[1,2,3,4]"]
    by_key = {text.partition("=")[0]: text for text in [*frozen, *told]}
    command = ["task=promote", "promote.open_cycle=one", f"ledger={lab.ledger}"]
    assert said in " ".join(typed(*command, *by_key.values(), code=2).split())
    assert not lab.ledger.exists()


def test_a_cycle_of_other_arms_registers_a_comparison(lab, typed):
    """It cannot promote, and says so; its KPI may be expected to be worse."""
    told = [f"promote.suite_digest={SUITE}", "promote.factor=backend", "promote.direction=lower"]
    command = ["task=promote", "promote.open_cycle=one", f"ledger={lab.ledger}", *told]
    found = typed(*command, "promote.arms=[qlora,lora]", "promote.seeds=[1,2]")
    assert "burn_production is about burn and qlora alone" in found
    assert "eval.samples" not in found


def test_a_cycle_of_other_arms_blocks_no_promotion(lab, typed):
    """It was opened under the same policy, but for another question."""
    told = [f"promote.suite_digest={SUITE}", "promote.factor=backend", "promote.seeds=[11,12]"]
    typed(
        *("task=promote", "promote.open_cycle=three", f"ledger={lab.ledger}"),
        *("promote.arms=[qlora,lora]", *told),
    )
    assert lab.burn(lab.two())["decision"] == Answer.PROMOTE


def test_the_command_that_runs_a_cycle_measures_what_the_policy_needs(lab, typed):
    """With one sample and no repair, pass_at_k and every repair KPI are unknown."""
    told = [f"promote.suite_digest={SUITE}", "promote.factor=backend", "promote.seeds=[1,2]"]
    command = ["task=promote", "promote.open_cycle=one", f"ledger={lab.ledger}", *told]
    found = typed(*command, "promote.arms=[qlora,burn]")
    more = "eval.samples=2 eval.temperature=0.8 eval.max_retries=1"
    assert f"-m seed=1,2 backend=qlora,burn {more}" in " ".join(found.split())


def test_seeds_of_an_earlier_cycle_open_no_other(lab, typed):
    """Neither the seeds nor the name of an earlier cycle may be used again."""
    lab.open("one", [1, 2])
    told = [f"promote.suite_digest={SUITE}", "promote.arms=[qlora,burn]", "promote.factor=backend"]
    command = ["task=promote", f"ledger={lab.ledger}", *told]
    said = typed(*command, "promote.open_cycle=two", "promote.seeds=[2,3]", code=2)
    assert "the seeds belong to an earlier cycle" in said
    said = typed(*command, "promote.open_cycle=one", "promote.seeds=[4,5]", code=2)
    assert "is already registered" in said
    assert "next      run its arms, or open a cycle of another name" in said
    assert len(read_ledger(lab.ledger)) == 1


def test_research_into_burn_is_recommended_when_it_is_ahead(lab):
    """By the reference's own wording either way; without a burn arm, one is requested."""
    one = lab.cycle("one", [1, 2])
    assert lab.ask(BurnRndPolicy(), [one])["recommendation"] == "expand_burn_rnd"
    made = lab.ask(BurnRndPolicy(margin=0.9), [one])
    assert (made["decision"], made["recommendation"]) == (Answer.HOLD, "keep_burn_experimental")
    made = lab.ask(BurnRndPolicy(challenger="full"), [one])
    assert made["recommendation"] == "collect_burn_baseline"
    assert made["decision"] == Answer.INSUFFICIENT


def test_a_plateau_under_a_floor_recommends_research(lab):
    """Two QLoRA arms within 0.05 and an unmet floor recommend research; with all met, going on."""
    told = {"kpis": good, "passes": lambda *_: 4, "suite": SUITE}
    rates = [["optim.lr=1e-4"], ["optim.lr=2e-4"]]

    def flat(_arm, seed, item):
        return good(0, seed, item)

    def all_met(_arm, seed, item):
        return good(1, seed, item)

    for name, kpis, words, answer in (
        ("under", flat, "invest_in_custom_model_rnd", Answer.PROMOTE),
        ("over", all_met, "continue_qlora_first", Answer.HOLD),
    ):
        runs = lab.study(name, arms=rates, seeds=[1, 2], **{**told, "kpis": kpis})
        made = lab.ask(QloraPlateauPolicy(), [lab.compared(name, runs)])
        assert made["decision"] == answer
        assert made["recommendation"] == words


def test_arms_that_no_comparison_has_together_are_not_compared(lab):
    """They may have other suites and seeds; a plateau needs two arms, and a base is none."""
    told = {"kpis": good, "passes": lambda *_: 4}
    alone = {
        name: lab.compared(name, lab.study(name, arms=arms, seeds=seeds, suite=suite, **told))
        for name, arms, seeds, suite in (
            ("burn", [["backend=burn"]], [7, 8], "cd" * 32),
            ("qlora", [["backend=qlora"]], [1, 2], SUITE),
            ("another", [["backend=qlora", "lora.r=4"]], [3, 4], "cd" * 32),
        )
    }
    made = lab.ask(BurnRndPolicy(), [alone["qlora"], alone["burn"]])
    assert made["decision"] == Answer.INSUFFICIENT
    (rule,) = [rule for rule in made["rules"] if rule["rule"] == "arms"]
    assert rule["note"] == "no comparison has both"
    one = lab.cycle("one", [5, 6])
    for several in ([alone["qlora"]], [alone["qlora"], alone["another"]], [one, alone["qlora"]]):
        made = lab.ask(QloraPlateauPolicy(spread=1.0), several)
        assert made["decision"] == Answer.INSUFFICIENT
        (rule,) = [rule for rule in made["rules"] if rule["rule"] == "plateau"]
        assert rule["note"] == "known for at most 1 arms of qlora in one comparison; 2 are needed"


def test_a_missing_metric_fails_the_gate(lab):
    """Coverage was never measured, and no default is assumed for it."""
    one = lab.cycle("one", [1, 2])
    made = lab.ask(EvalGatePolicy(), [one])
    assert made["decision"] == Answer.REJECT
    missing = {rule["kpi"] for rule in made["rules"] if rule["outcome"] == "unknown"}
    assert missing == {"coverage", "pass_at_1", "pass_at_k"}


def test_the_gate_passes_what_keeps_every_threshold(lab):
    """The gate passes if all thresholds are met, those of the three added KPIs included."""

    def measured(arm, seed, item):
        return {**good(arm, seed, item), "coverage": 1.0, "pass_at_1": True, "pass_at_k": True}

    one = lab.cycle("one", [1, 2], kpis=measured)
    made = lab.ask(EvalGatePolicy(), [one])
    assert made["decision"] == Answer.PROMOTE
    made = lab.ask(EvalGatePolicy(tokens_per_s=500), [one])
    assert {rule["kpi"] for rule in made["rules"] if rule["outcome"] == "failed"} == {
        "tokens_per_s"
    }


def test_one_arm_against_its_own_base_has_every_seed(lab):
    """The base answers in the runs of the tuned arm, and has no runs of its own."""
    one = lab.compared("alone", lab.study("alone", arms=[()], seeds=[1, 2], kpis=good))
    (rule,) = (r for r in lab.ask(EvalGatePolicy(), [one])["rules"] if r["rule"] == "seeds")
    assert rule["outcome"] == "passed"


def test_the_ledger_carries_the_digests_of_its_evidence(lab):
    """Each entry has the digests of its comparisons, certificate and previous entry."""
    paths = lab.two()
    made = lab.burn(paths)
    assert [one["sha256"] for one in made["evidence"]] == [
        sha256_file(path / "compare.json") for path in paths
    ]
    assert made["parity"] is not None
    assert made["parity"]["sha256"] == sha256_file(lab.root / "merge" / "parity.json")
    entries = read_ledger(lab.ledger)
    assert [one["previous"] for one in entries] == [None, *(e["sha256"] for e in entries[:-1])]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (["policy=eval_gate", "path=."], "no ledger"),
        (["ledger=l"], "next add policy=<name> and path=<compare.json>"),
        (["path=."], "next add policy=<name> and ledger=<file>"),
        (["ledger=l", "promote.replay=true", "path=."], "has no effect with promote.replay"),
        (["ledger=l", "promote.replay=true", "promote.open_cycle=c"], "several things at once"),
        (["ledger=l", "policy=eval_gate"], "no evidence given"),
        (["ledger=l", "policy=eval_gat", "path=."], "the nearest is eval_gate"),
        (["ledger=l", "policy=eval_gate", "path=absent"], "no comparison found"),
        (["ledger=l", "promote.open_cycle=c"], "must list distinct seeds"),
        (
            ["ledger=l", "promote.open_cycle=c", "policy=eval_gate"],
            "this policy does not use cycles",
        ),
        (
            ["ledger=l", "promote.open_cycle=c", "policy=burn_production", "path=."],
            "has no effect with promote.open_cycle",
        ),
        (
            ["ledger=l", "promote.replay=true", "promote.seeds=[1]"],
            "has no effect with promote.open_cycle=null",
        ),
        (["ledger=l", "promote.replay=true", "promote.parity=p"], "has no effect without policy"),
        (["ledger=l", "promote.replay=true", "lora.r=8"], "has no effect with task=promote"),
    ],
)
def test_what_cannot_be_decided_so_is_refused(typed, told, reason):
    """The command ends with exit code 2 and says why."""
    said = typed("task=promote", *told, code=2)
    assert reason in " ".join(said.split())
