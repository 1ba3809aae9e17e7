"""Ways to a promotion that was not earned, each tried through the command line.

Two cycles of six seeds are honest: burn passes every task, qlora two or three of four. Each
test changes one thing, and writes ledger lines and answers without the product's code.
"""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest

from mens_exp import cli

SUITE = "ab" * 32
ARMS = (("backend=qlora",), ("backend=burn",))
SEEDS = {"one": [1, 2, 3, 4, 5, 6], "two": [7, 8, 9, 10, 11, 12]}
OPENED, STARTED = "2126-01-01T00:00:00.000Z", "2126-01-02T00:00:00.000Z"


def answers(arm, seed, item):
    """Return the answers: all of burn's pass, and some of qlora's."""
    passed = arm == 1 or (seed + item) % 3 > 0
    shares = ("compile_pass_1", "compile_pass_n", "canonical_pass", "strictness", "anti_stub_pass")
    return {
        **dict.fromkeys(shares, True),
        "task_success": passed,
        "semantic_task_success": passed,
        "richness": 0.5,
        "trivial_placeholder_output": False,
        "placeholder_marker_hits": 0,
        "repair_depth": 1,
        "repair_stalled": False,
        "attempts": 1,
    }


@pytest.fixture(scope="module")
def honest(tmp_path_factory, study_at):
    """Write the runs of both cycles, and compare them as a user would."""
    root = tmp_path_factory.mktemp("honest")
    for name, seeds in SEEDS.items():
        told = {"arms": ARMS, "seeds": seeds, "suite": SUITE, "started": STARTED}
        study_at(root / name, kpis=answers, passes=lambda *_: 4, **told)
        compare = ["task=compare", f"path={root / name}", f"out={root / 'verdicts' / name}"]
        assert cli.main([*compare, "logger=none", f"hydra.run.dir={root / 'own' / name}"]) == 0
    return root


@pytest.fixture
def lab(honest, tmp_path, typed, frozen):
    return Lab(honest, tmp_path, typed, frozen)


class Lab:
    """A ledger with both cycles open, their comparisons, and a user's commands."""

    def __init__(self, honest, root, typed, frozen):
        """Open both cycles."""
        self.honest, self.root, self.typed = honest, root, typed
        self.frozen = {**frozen, "certificate": False}
        self.ledger = root / "decisions.jsonl"
        self.verdicts = {name: honest / "verdicts" / name for name in SEEDS}
        for name, seeds in SEEDS.items():
            self.open(name, seeds)

    def open(self, name, seeds, *, version=2, frozen=None, **other):
        """Write the ledger line that opens a cycle."""
        cycle = {
            "cycle": name,
            "suite_digest": SUITE,
            "seeds": seeds,
            "arms": ["qlora", "burn"],
            "factor": "backend",
            "kpi": "task_success",
            "direction": "higher",
            "margin": 0.0,
            **({"frozen": {**self.frozen, **(frozen or {})}} if version > 1 else {}),
            **other,
        }
        self.write("cycle", cycle, version)

    def write(self, kind, body, version):
        """Add a line to the ledger, with its own digest and that of the line before."""
        lines = self.ledger.read_text("utf-8").splitlines() if self.ledger.exists() else []
        entry = {
            "format": "mens_exp_decisions",
            "version": version,
            "number": len(lines) + 1,
            "utc": OPENED,
            "kind": kind,
            "cycle": None,
            "decision": None,
            kind: body,
            "previous": json.loads(lines[-1])["sha256"] if lines else None,
        }
        text = json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        entry["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        self.ledger.write_text("".join(f"{x}\n" for x in [*lines, json.dumps(entry)]), "utf-8")

    def copied(self, name):
        """Return a copy of a cycle's runs, which a test may change."""
        return shutil.copytree(self.honest / name, self.root / "runs" / name)

    def compare(self, name, path, *overrides):
        """Make the comparison of a cycle again, from other runs or with other settings."""
        out = self.root / "verdicts" / name
        self.typed("task=compare", f"path={path}", f"out={out}", "logger=none", *overrides)
        self.verdicts[name] = out

    def promote(self, *overrides, code=4):
        """Request the promotion; return the output and the outcomes of each rule."""
        paths = ",".join(map(str, self.verdicts.values()))
        asked = ["task=promote", "policy=burn_production", "policy.parity=false"]
        said = self.typed(*asked, f"path=[{paths}]", f"ledger={self.ledger}", *overrides, code=code)
        return " ".join(said.split())

    def decision(self):
        """Return the last decision in the ledger."""
        return json.loads(self.ledger.read_text("utf-8").splitlines()[-1])["decision"]

    def notes(self):
        """Return the reasons why rules did not pass."""
        unmet = [rule for rule in self.decision()["rules"] if rule["outcome"] != "passed"]
        return "; ".join(f"{r['rule']}: {r['observed']} {r['note']}" for r in unmet)


def run_of(study, backend, seed):
    """Return the directory of one run, found by its manifest."""
    for path in study.glob("*/manifest.json"):
        told = json.loads(path.read_text("utf-8"))
        if told["seed"] == seed and f"backend={backend}" in told["overrides"]:
            return path.parent
    raise AssertionError


def answer_otherwise(run, change):
    """Replace a run's answers: its lines, and their hash in its manifest."""
    file, manifest = run / "events.jsonl", run / "manifest.json"
    lines = [change(json.loads(line)) for line in file.read_text("utf-8").splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines if line), "utf-8")
    told = json.loads(manifest.read_text("utf-8"))
    told["outputs"]["events.jsonl"] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(told), "utf-8")


def fails_all(line):
    """Fail a task under the condition `tuned`."""
    if line["condition"] == "base":
        return line
    return {**line, "task_success": False, "semantic_task_success": False}


def test_two_honest_cycles_promote(lab):
    """The unchanged cycles promote; without this, no refusal below would mean anything."""
    assert "burn_production: promote" in lab.promote(code=0)
    replay = lab.typed("task=promote", "promote.replay=true", f"ledger={lab.ledger}")
    assert "1 decisions of 3 entries" in replay


def test_a_cycle_that_froze_no_target_is_about_these_items(lab):
    """Without a frozen target, as in older ledgers, a cycle is about these items alone."""
    del lab.frozen["target"]
    lab.ledger.unlink()
    for name, seeds in SEEDS.items():
        lab.open(name, seeds)
    assert "burn_production: promote" in lab.promote(code=0)


def test_an_opened_cycle_freezes_all_that_decides(lab):
    """The line in the ledger equals the one written by hand, and has everything that was typed."""
    told = [f"promote.suite_digest={SUITE}", "promote.seeds=[14,13]", "promote.factor=backend"]
    told += ["promote.arms=[qlora,burn]", "promote.margin=0.1", "promote.alpha=0.01"]
    told += ["policy=burn_production", "policy.floors={richness:0.5}", "policy.parity=false"]
    lab.typed("task=promote", "promote.open_cycle=three", f"ledger={lab.ledger}", *told)
    written = json.loads(lab.ledger.read_text("utf-8").splitlines()[-1])
    lab.ledger.unlink()
    floors = {**lab.frozen["floors"], "richness": 0.5}
    lab.open("three", [13, 14], margin=0.1, frozen={"alpha": 0.01, "floors": floors})
    expected = json.loads(lab.ledger.read_text("utf-8"))
    assert (written["version"], written["cycle"]) == (3, expected["cycle"])


def drop(study, run):
    """Leave a run out of the path."""
    del study
    shutil.rmtree(run)


def fail(study, run):
    """Mark a run as failed."""
    del study
    manifest = run / "manifest.json"
    told = json.loads(manifest.read_text("utf-8"))
    manifest.write_text(json.dumps({**told, "status": "failed"}), "utf-8")


def unscored(study, run):
    """Remove the tuned model's answers from a run."""
    del study
    answer_otherwise(run, lambda line: line if line["condition"] == "base" else None)
    file, manifest = run / "scorecard.json", run / "manifest.json"
    card = json.loads(file.read_text("utf-8"))
    del card["conditions"]["tuned"]
    file.write_text(json.dumps(card), "utf-8")
    told = json.loads(manifest.read_text("utf-8"))
    told["outputs"]["scorecard.json"] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(told), "utf-8")


@pytest.mark.parametrize("backend", ["burn", "qlora"])
@pytest.mark.parametrize("hide", [drop, fail, unscored])
def test_a_registered_seed_of_one_arm_cannot_be_hidden(lab, backend, hide):
    """The other arm has the seed, so that every registered seed is present somewhere."""
    runs = lab.copied("two")
    hide(runs, run_of(runs, backend, 12))
    lab.compare("two", runs, "compare.primary=task_success")
    assert "burn_production: insufficient_evidence" in lab.promote()
    assert "seed 12" in lab.notes()


def test_an_arm_that_lacks_a_seed_is_no_evidence_under_any_policy(lab):
    """The threshold policies, too, use means over seeds."""
    runs = lab.copied("two")
    drop(runs, run_of(runs, "burn", 12))
    lab.compare("two", runs, "compare.primary=task_success")
    for policy in ("burn_rnd", "eval_gate", "qlora_plateau"):
        path = f"path={lab.verdicts['two']}"
        ledger = f"ledger={lab.root / policy}.jsonl"
        lab.typed("task=promote", f"policy={policy}", path, ledger, code=4)
        rules = json.loads((lab.root / f"{policy}.jsonl").read_text("utf-8"))["decision"]["rules"]
        assert {"seeds"} == {r["rule"] for r in rules if "seed 12 of backend=burn" in str(r)}


def of_seed_12(study):
    """Let burn pass one task of four with one seed, so that p is 0.09 and nothing is shown."""

    def change(line):
        return line if line["item_id"] == "item0" else fails_all(line)

    answer_otherwise(run_of(study, "burn", 12), change)


def of_every_seed(study):
    """Let the tuned burn model fail everything; only the base model's answers pass."""
    for seed in SEEDS["two"]:
        answer_otherwise(run_of(study, "burn", seed), fails_all)


@pytest.mark.parametrize(
    ("spoil", "override"),
    [
        (of_seed_12, "compare.alpha=0.2"),
        (of_every_seed, "compare.condition=base"),
        (of_seed_12, "compare.sequential=always_valid"),
    ],
    ids=["alpha", "condition", "sequential"],
)
def test_a_comparison_cannot_be_made_by_other_rules_than_were_frozen(lab, spoil, override):
    """Once the answers are known, there is always a way of comparing them that promotes."""
    runs = lab.copied("two")
    spoil(runs)
    lab.compare("two", runs, "compare.primary=task_success", override)
    assert "burn_production: insufficient_evidence" in lab.promote()
    name = override.partition("=")[0].removeprefix("compare.")
    assert f"was frozen as {name}" in lab.notes()


def test_a_comparison_cannot_claim_another_condition_than_its_figures_are_of(lab):
    """The claimed condition and the settings of the figures are two fields of one file."""
    runs = lab.copied("two")
    of_every_seed(runs)
    told = ("compare.primary=task_success", "compare.condition=base")
    lab.compare("two", runs, *told)
    file = lab.verdicts["two"] / "compare.json"
    record = json.loads(file.read_text("utf-8"))
    assert record["condition"] == "base"
    file.write_text(json.dumps({**record, "condition": "tuned"}), "utf-8")
    lab.promote()
    assert "condition come out otherwise" in lab.notes()


@pytest.mark.parametrize(
    ("hypothesis", "unmet"),
    [
        ({"margin": 0.9}, "superiority"),
        ({"direction": "lower"}, "direction"),
        ({"frozen": {"test": "sign_flip"}}, "registered"),
        ({"frozen": {"target": "items_like_these"}}, "registered"),
        ({"frozen": {"floors": {"richness": 0.9}}}, "frozen"),
        ({"frozen": {"least_cycles": 3}}, "frozen"),
        ({"version": 1}, "frozen: None unverifiable"),
    ],
    ids=["margin", "direction", "test", "target", "floors", "cycles", "nothing"],
)
def test_what_a_cycle_was_opened_with_decides(lab, hypothesis, unmet):
    """The evidence is good, but the cycles were opened for something else."""
    lab.ledger.unlink()
    for name, seeds in SEEDS.items():
        lab.open(name, seeds, **hypothesis)
    lab.promote()
    assert unmet in lab.notes()


def test_a_cycle_that_froze_no_rule_for_looks_was_of_one_look(lab):
    """An older cycle knew no such rule; a comparison with a single look still promotes."""
    lab.ledger.unlink()
    del lab.frozen["sequential"]
    for name, seeds in SEEDS.items():
        lab.open(name, seeds)
    assert "burn_production: promote" in lab.promote(code=0)


def test_a_decision_on_a_comparison_of_an_older_version_is_not_made_again(lab):
    """A replay does not recompute it by today's rules; it needs the unchanged original file.

    Substituting a version 1 record for the evidence afterwards does not get past the digest.
    """
    lab.verdicts["two"] = shutil.copytree(lab.verdicts["two"], lab.root / "verdicts" / "two")
    lab.promote(code=0)
    file = lab.verdicts["two"] / "compare.json"
    record = json.loads(file.read_text("utf-8"))
    older(record)
    file.write_text(json.dumps(record), "utf-8")
    assert "comes out otherwise" in lab.typed(
        "task=promote", "promote.replay=true", f"ledger={lab.ledger}", code=4
    )
    lab.promote()
    assert "contrasts come out otherwise" in lab.notes()
    kept = lab.ledger.read_text("utf-8").splitlines()
    lab.ledger.write_text("\n".join(kept[:2]) + "\n", "utf-8")
    decision = json.loads(kept[-1])["decision"]
    lab.write("decision", decision, 2)
    said = lab.typed("task=promote", "promote.replay=true", f"ledger={lab.ledger}")
    assert "Entry 3 is unverifiable" in said
    assert "older version" in said


def older(record):
    """Make a record the one that version 1 would have written."""
    record["version"] = 1
    del record["sequential"], record["looks"], record["settings"]["sequential"]
    absent = ("level", "mde_low", "mde_high", "seeds_needed_low", "seeds_needed_high")
    for contrast in record["contrasts"]:
        for kpi in contrast["kpis"].values():
            for name in absent:
                del kpi[name]


def test_a_typed_threshold_does_not_replace_the_frozen_one(lab):
    """Otherwise a floor that was missed could be lowered after the results are known."""
    lab.promote("policy.floors={richness:0.1}")
    assert "the policy has floors" in lab.notes()


@pytest.mark.parametrize("version", [1, 2])
def test_a_decision_by_rules_that_are_no_more_is_labelled_and_not_made_again(lab, version):
    """An old ledger is still read, but its promotions are not redone by today's rules."""
    decision = {
        "policy": {"name": "burn_production", "kpi": "task_success", "margin": 0.0},
        "evidence": [{"path": "gone/compare.json", "sha256": "0" * 64, "cycle": None}],
        "parity": None,
        "rules": [],
        "decision": "promote",
        "recommendation": None,
    }
    lab.write("decision", decision, version)
    said = lab.typed("task=promote", "promote.replay=true", f"ledger={lab.ledger}")
    assert "Entry 3 is unverifiable" in said
    assert "0 decisions of 3 entries" in said


@pytest.mark.parametrize(
    "other",
    [{}, {"kpi": "parse_rate"}, {"margin": 0.5}, {"frozen": {"alpha": 0.01}}, {"version": 1}],
    ids=["same", "kpi", "margin", "alpha", "version 1"],
)
def test_a_cycle_that_went_badly_cannot_stay_in_the_drawer(lab, other):
    """A cycle opened for the same question, whatever its values, counts even if it is left out."""
    lab.open("three", [13, 14, 15], **other)
    assert "burn_production: insufficient_evidence" in lab.promote()
    assert "cycle: None" in lab.notes()
    told = [rule["threshold"] for rule in lab.decision()["rules"] if rule["rule"] == "cycle"]
    assert told == [f"a comparison of cycle {name}" for name in ("one", "two", "three")]


def test_a_cycle_of_another_question_does_not_count(lab):
    """Whether full fine-tuning may replace qlora says nothing about burn."""
    lab.open("three", [13, 14, 15], arms=["qlora", "full"], frozen={"challenger": "full"})
    lab.open("old", [16, 17], arms=["4", "8"], factor="lora.r", version=1)
    assert "burn_production: promote" in lab.promote(code=0)


def test_one_cycle_is_too_few_whatever_is_typed(lab):
    """Neither a cycle that froze one as enough nor a command that asks for one is accepted."""
    lab.ledger.unlink()
    lab.open("one", SEEDS["one"], frozen={"least_cycles": 1})
    del lab.verdicts["two"]
    assert "policy.min_cycles" in lab.promote("policy.min_cycles=1", code=2)


def test_an_empty_mapping_of_floors_is_refused_and_says_why(lab):
    """An empty mapping looks as if it removed every floor, but would change nothing."""
    said = lab.promote("policy.floors={}", code=2)
    assert "policy.floors: an empty mapping changes nothing" in said
    assert "strictness" in said


def test_a_comparison_refuses_answers_that_were_edited(lab):
    """One verdict is changed from true to false, and no longer matches the hash."""
    runs = lab.copied("two")
    file = run_of(runs, "burn", 12) / "events.jsonl"
    text = file.read_text("utf-8")
    file.write_text(text.replace('"task_success":true', '"task_success":false'), "utf-8")
    assert file.read_text("utf-8") != text
    said = lab.typed("task=compare", f"path={runs}", "logger=none", code=2)
    assert f"{file}: has changed since its run wrote it" in said


@pytest.mark.parametrize("name", ["scorecard.json", "config.yaml"])
def test_a_comparison_refuses_an_edited(lab, name):
    """A comment is enough: the hash is of the whole file."""
    runs = lab.copied("two")
    file = run_of(runs, "qlora", 7) / name
    file.write_text(file.read_text("utf-8") + "\n", "utf-8")
    said = lab.typed("task=compare", f"path={runs}", "logger=none", code=2)
    assert f"{file}: has changed since its run wrote it" in said


def test_a_comparison_refuses_a_manifest_with_another_contract(lab):
    """Else two arms with different ranks would look like a clean contrast."""
    runs = lab.copied("two")
    file = run_of(runs, "burn", 12) / "manifest.json"
    told = json.loads(file.read_text("utf-8"))
    told["contract"]["settings"]["lora.r"] = 4
    file.write_text(json.dumps(told), "utf-8")
    said = lab.typed("task=compare", f"path={runs}", "logger=none", code=2)
    assert f"{file}: has changed since its run wrote it" in said


def test_a_comparison_labels_what_has_no_hash(lab):
    """A run without hashes of its answers can be compared, but is labelled."""
    runs = lab.copied("two")
    run = run_of(runs, "burn", 12)
    told = json.loads((run / "manifest.json").read_text("utf-8"))
    del told["outputs"]["events.jsonl"]
    (run / "manifest.json").write_text(json.dumps(told), "utf-8")
    lab.compare("two", runs)
    page = (lab.verdicts["two"] / "compare.md").read_text("utf-8")
    assert f"unverifiable: the run of {run / 'events.jsonl'}" in page
    assert "burn_production: insufficient_evidence" in lab.promote()
