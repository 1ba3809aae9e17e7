"""Consistent edits are refused once the ledger has the digests of the runs."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil

import pytest
from hand_written_runs import SEEDS, Lab, Run, forge, sha256

from mens_exp import cli


@pytest.fixture
def lab(honest, tmp_path, typed, frozen):
    return Lab(honest, tmp_path, typed, frozen)


def swap(run, other):
    """Exchange the lines and figures of two runs, and rehash both."""
    for name in ("events", "card"):
        one, two = getattr(run, name), getattr(other, name)
        data = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(data)
    run.rehash()
    other.rehash()


def swapped(lab):
    run = lab.run("qlora", 2)
    swap(run, lab.run("qlora", 3))
    return run


@pytest.mark.parametrize("spoil", [forge, swapped])
def test_an_edit_that_agrees_with_itself_is_refused_once_the_ledger_has_the_runs(lab, spoil):
    """The message has run, file, both hashes and the entry's number; the ledger does not change."""
    lab.compare("one", ledger=True)
    (*_, entry) = lab.entries()
    assert (entry["number"], entry["kind"], entry["version"]) == (3, "evidence", 3)
    before = hashlib.sha256(lab.run("qlora", 2).card.read_bytes()).hexdigest()
    run = spoil(lab)
    after = hashlib.sha256(run.card.read_bytes()).hexdigest()
    assert before != after
    said = lab.compare("one", ledger=True, code=2)
    assert f"{run.card}: contradicts the ledger" in said
    assert f"found {after}" in said
    assert f"expected {before}, by entry 3" in said
    assert len(lab.entries()) == 3


def test_a_promotion_refuses_edits_of_what_a_comparison_froze(lab):
    """Compared anew without the ledger, edited runs look consistent; the promotion refuses them."""
    lab.compare("one", ledger=True)
    run = forge(lab)
    for name in SEEDS:
        lab.compare(name)
    assert "burn_production: insufficient_evidence" in lab.promote()
    assert f"{run.card}: contradicts the ledger" in lab.denied()
    assert "by entry 3" in lab.denied()


def test_a_promotion_freezes_its_evidence(lab):
    """The decision has the digests, and says that they were not frozen before."""
    for name in SEEDS:
        lab.compare(name)
    lab.promote(code=0)
    made = lab.decision()
    assert len(made["runs"]) == 12
    (one,) = (r for r in made["runs"] if (r["arm"], r["seed"]) == ("backend=burn", 6))
    run = lab.run("burn", 6)
    assert one["cycle"] == "two"
    assert one["events_sha256"] == hashlib.sha256(run.events.read_bytes()).hexdigest()
    assert any("6 runs of cycle two were not frozen before" in x for x in made["unverifiable"])
    forge(lab)
    lab.compare("one", ledger=True, code=2)
    lab.compare("one")
    lab.promote()
    assert "by entry 3" in lab.denied()


def test_evidence_that_was_frozen_before_is_not_labelled(lab):
    """The only label left is that nothing was executed again."""
    for name in SEEDS:
        lab.compare(name, ledger=True)
    said = lab.promote(code=0)
    labels = lab.decision()["unverifiable"]
    assert [one for one in labels if "frozen" in one] == []
    assert any("were not executed again" in one for one in labels)
    assert "were not executed again" in said
    assert "frozen by entry 3" in " ".join(lab.notes("one"))


def test_copies_do_not_count_a_second_time(lab):
    """Edited copies of frozen runs, with the same cycle, arm and seed, are refused."""
    lab.compare("one", ledger=True)
    lab.runs["one"] = shutil.copytree(lab.runs["one"], lab.root / "elsewhere")
    lab.compare("one", ledger=True)  # the same bytes are the same evidence
    run = forge(lab)
    assert len(lab.entries()) == 3
    said = lab.compare("one", ledger=True, code=2)
    assert f"{run.card}: contradicts the ledger" in said


def test_two_versions_of_one_cycle_never_both_count(lab):
    """Given two versions of one cycle, neither frozen, the second contradicts the first."""
    for name in SEEDS:
        lab.compare(name)
    lab.runs["one"] = shutil.copytree(lab.runs["one"], lab.root / "elsewhere")
    forge(lab)
    lab.compare("one", out=lab.out("again"))
    assert "insufficient_evidence" in lab.promote(*map(lab.out, ("one", "two", "again")))
    assert "by another comparison of this decision" in lab.denied()
    counted = {(r["cycle"], r["arm"], r["seed"]) for r in lab.decision()["runs"]}
    assert len(counted) == len(lab.decision()["runs"]) == 12


def test_a_seed_that_was_run_twice_does_not_count_twice(lab):
    """The better of two runs of one seed must not enter the mean."""
    lab.compare("two")
    run = lab.run("burn", 3)
    shutil.copytree(run.path, run.path.with_name("99_again"))
    again = Run(run.path.with_name("99_again"))
    told = json.loads(again.manifest.read_text("utf-8"))
    again.manifest.write_text(json.dumps({**told, "run_id": "99_again"}), "utf-8")
    said = lab.compare("one", ledger=True, code=2)
    assert "seed 3 of backend=burn occurs twice" in said
    lab.compare("one")
    assert "insufficient_evidence" in lab.promote()
    assert "seed 3 of backend=burn occurs twice" in lab.denied()


def test_an_exploratory_comparison_refuses_edited_runs_too(lab):
    """Otherwise the page of an edited run would be shown, even if nothing could be promoted."""
    lab.compare("one", ledger=True)
    run = forge(lab)
    path = f"path=[{run.path},{lab.run('burn', 2).path}]"
    said = lab.compare("one", path, ledger=True, code=2)
    assert f"{run.card}: contradicts the ledger" in said


def test_an_exploratory_comparison_freezes_nothing(lab):
    """Two of three seeds are no evidence for the cycle, so nothing is frozen."""
    shutil.rmtree(lab.run("burn", 3).path)
    shutil.rmtree(lab.run("qlora", 3).path)
    lab.compare("one", ledger=True)
    assert len(lab.entries()) == 2


@pytest.mark.parametrize("kept", [[0, 1, 3], [0, 1, 3, 2], [1, 2, 3]])
def test_an_entry_of_evidence_cannot_be_dropped_or_moved(lab, kept):
    """Two comparisons froze the cycles in entries 3 and 4, and both must stay where they are."""
    for name in SEEDS:
        lab.compare(name, ledger=True)
    lines = lab.ledger.read_text("utf-8").splitlines(keepends=True)
    lab.ledger.write_text("".join(lines[number] for number in kept), "utf-8")
    assert "does not follow" in lab.compare("one", ledger=True, code=2)
    assert "does not follow" in lab.promote(code=2)


def test_a_ledger_that_was_cut_before_its_evidence_is_found_by_the_comparison(lab):
    """The comparison has the digest of the entry that froze its runs, which the ledger lacks."""
    for name in SEEDS:
        lab.compare(name, ledger=True)
    lines = lab.ledger.read_text("utf-8").splitlines(keepends=True)
    lab.ledger.write_text("".join(lines[:3]), "utf-8")
    assert "burn_production: insufficient_evidence" in lab.promote()
    assert "the ledger lacks entry 4" in lab.denied()


@pytest.mark.parametrize(
    "change",
    [{"evidence": None}, {"kind": "cycle"}, {"version": 2}, {"decision": {}}, {"evidence": [{}]}],
    ids=["nothing", "kind", "version", "decision", "shape"],
)
def test_an_entry_says_what_its_kind_says(lab, change):
    """The last entry is rehashed, so that no later entry contradicts it."""
    lab.compare("one", ledger=True)
    *before, entry = lab.entries()
    entry |= change
    del entry["sha256"]
    entry["sha256"] = sha256(entry)
    text = "".join(json.dumps(one) + "\n" for one in [*before, entry])
    lab.ledger.write_text(text, "utf-8")
    assert f"{lab.ledger}:3" in lab.compare("one", ledger=True, code=2)


def race(overrides, start):
    """Run commands in processes of their own, all starting at the same moment."""
    start.wait()
    raise SystemExit(cli.main(overrides))


def test_of_two_promoters_at_once_one_freezes_and_the_other_is_refused(lab):
    """One has the honest runs of a cycle, the other a forged copy that would promote as well."""
    for name in SEEDS:
        lab.compare(name)
    lab.runs["one"] = shutil.copytree(lab.runs["one"], lab.root / "elsewhere")
    for item in (1, 2):
        lab.run("qlora", 2).forge(item, is_right=True)
    lab.compare("one", out=lab.out("again"))
    context = multiprocessing.get_context("fork")
    start = context.Barrier(2)
    promoters = []
    for number, first in enumerate(("one", "again")):
        path = f"path=[{lab.out(first)},{lab.out('two')}]"
        told = ["task=promote", "policy=burn_production", "policy.parity=false", path]
        told += [f"ledger={lab.ledger}", f"hydra.run.dir={lab.root / f'promoter{number}'}"]
        promoters.append(context.Process(target=race, args=(told, start)))
    for one in promoters:
        one.start()
    for one in promoters:
        one.join()
    assert sorted(one.exitcode for one in promoters) == [0, 4]
    first, second = (entry["decision"] for entry in lab.entries()[2:])
    assert (first["decision"], second["decision"]) == ("promote", "insufficient_evidence")
    assert "by entry 3" in lab.denied()
    digests = {}
    for one in [*first["runs"], *second["runs"]]:
        key = (one["cycle"], one["arm"], one["seed"])
        assert digests.setdefault(key, one["events_sha256"]) == one["events_sha256"]


def test_a_past_decision_comes_out_the_same_with_its_frozen_evidence(lab):
    """The decision is repeated exactly, unless a run is edited, even with its hashes."""
    for name in SEEDS:
        lab.compare(name, ledger=True)
    lab.promote(code=0)
    replay = ["task=promote", "promote.replay=true", f"ledger={lab.ledger}"]
    assert "1 decisions of 5 entries" in lab.typed(*replay)
    forge(lab)
    assert "comes out otherwise" in lab.typed(*replay, code=4)


def test_a_decision_of_a_ledger_of_version_2_is_made_again_and_labelled(lab):
    """Such a decision has no digests of runs; it is labelled and rests on its comparisons alone."""
    for name in SEEDS:
        lab.compare(name)
    lab.promote(code=0)
    made = lab.decision()
    lines = lab.ledger.read_text("utf-8").splitlines(keepends=True)
    lab.ledger.write_text("".join(lines[:2]), "utf-8")
    del made["runs"], made["unverifiable"]
    lab.write("decision", made)
    said = " ".join(
        lab.typed("task=promote", "promote.replay=true", f"ledger={lab.ledger}").split()
    )
    assert "1 decisions of 3 entries" in said
    assert "Entry 3 is of version 2, which froze no runs" in said
