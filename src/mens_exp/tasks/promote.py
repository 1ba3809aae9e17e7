"""task=promote: open a cycle, decide by policy on an append-only ledger, or replay decisions."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.decision_ledger import (
    Answer,
    CycleEntry,
    DecisionEntry,
    EntryKind,
    EvidenceEntry,
    LedgerEntry,
    append,
    cycles_of,
    froze_runs,
    read_ledger,
)
from mens_exp.artifacts.digest import sha256_file
from mens_exp.config.override_values import override_of
from mens_exp.config.overrides import check
from mens_exp.config.promotion import BurnProductionPolicy
from mens_exp.config.schemas import SCHEMAS
from mens_exp.errors import GateError, Problems, RequestError
from mens_exp.evals.kpis import KPIS, Direction, misspelt
from mens_exp.evals.promotion import decide
from mens_exp.evals.promotion_rules import is_about, thresholds
from mens_exp.evals.verdicts import Rule, least_seeds, unreachable
from mens_exp.report import terminal, wording
from mens_exp.report.document import Note, Step, Tone
from mens_exp.report.evidence_views import decision_document
from mens_exp.tasks.checks import compared, refuse_differences
from mens_exp.tasks.promotion_evidence import (
    certificate_of,
    comparison_files,
    gathered,
    is_of_older_version,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.artifacts.certificate import Check
    from mens_exp.config.promotion import PolicyConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run

_MADE = ("decision", "recommendation", "evidence", "parity")


def promote(config: RunConfig, run: Run) -> None:
    """Run the requested one of the three actions.

    Raises:
        GateError: the decision is not to promote, or a past decision is not reproduced.
    """
    assert config.ledger is not None, "validation has asked for it"
    ledger = Path(config.ledger).expanduser()
    if config.promote.open_cycle is not None:
        _open(config, ledger, run)
    elif config.promote.replay:
        _replay(ledger, run)
    else:
        _decide(config, ledger, run)


def _open(config: RunConfig, ledger: Path, run: Run) -> None:
    """Register a cycle (suite, seeds, arms, hypothesis and rules) before any of its runs."""
    told, policy = config.promote, config.policy or BurnProductionPolicy()
    meant = misspelt(told.kpi)
    if meant is not None:
        raise RequestError(
            "unknown KPI",
            where="promote.kpi",
            found=told.kpi,
            expected=f"a known name; the nearest is {meant}",
            remedy=f"write promote.kpi={meant}",
        )
    assert isinstance(policy, BurnProductionPolicy), "validation refuses others"
    Problems.raise_if(list(_arm_problems(told.factor, told.arms)))
    cycle: CycleEntry = {
        "cycle": str(told.open_cycle),
        "suite_digest": str(told.suite_digest),
        "seeds": sorted(told.seeds),
        "arms": list(told.arms),
        "factor": str(told.factor),
        "kpi": told.kpi,
        "direction": told.direction.value,
        "margin": told.margin,
        "frozen": {
            "alpha": told.alpha,
            "test": told.test.value,
            "condition": told.condition,
            "target": told.target.value,
            "sequential": told.sequential.value,
            **thresholds(policy),
        },
    }
    may_promote = is_about(policy, cycle)
    if may_promote:
        Problems.raise_if(list(_hopeless(cycle)))
    entry = open_cycle(ledger, cycle, "promote.")
    run.manifest.results.update(cycle=cycle["cycle"], entry_sha256=entry["sha256"])
    terminal.say(f"Cycle {cycle['cycle']} is open. Ledger head: {entry['sha256']}")
    seeds = ",".join(map(str, cycle["seeds"]))
    named = (arm.removeprefix(f"{cycle['factor']}=") for arm in cycle["arms"])
    arms = f"{cycle['factor']}={','.join(named)}"
    # Without several samples and a repair, KPIs that the policy needs are unknown.
    more = _MEASURED if may_promote else ()
    terminal.say_next([Step(wording.command("-m", f"seed={seeds}", arms, *more), "run its arms")])
    if not may_promote:
        pair = f"{policy.challenger} and {policy.incumbent}"
        terminal.say(f"The cycle registers a comparison; {policy.name} is about {pair} alone.")


_MEASURED = ("eval.samples=2", "eval.temperature=0.8", "eval.max_retries=1")


def _arm_problems(factor: str | None, arms: Sequence[str]) -> Iterator[RequestError]:
    """Yield arms that are no values of their factor, where it is a single setting."""
    if not re.fullmatch(r"[\w./]+", factor or ""):
        return
    for arm in arms:
        value = arm.removeprefix(f"{factor}=")
        if re.search(r"[=, ]", value):
            continue  # an arm of several settings
        for problem in check([override_of(str(factor), value)]).general:
            if problem.where == factor:
                yield RequestError(
                    "is not a value of the factor",
                    where="promote.arms",
                    found=arm,
                    expected=f"values of promote.factor={factor}",
                )


def _hopeless(cycle: CycleEntry) -> Iterator[RequestError]:
    """Yield what keeps a cycle of the policy from ever supporting a promotion."""
    kpi = KPIS.get(cycle["kpi"])
    if kpi is None:
        return
    better = {Direction.MAX: "higher", Direction.MIN: "lower"}.get(kpi.direction)
    if cycle["direction"] != better:
        yield RequestError(
            "no promotion can follow" if better else "neither direction of this KPI is better",
            where="promote.direction",
            found=f"{cycle['direction']}, for {cycle['kpi']}",
            expected=better,
            remedy=f"write promote.direction={better}" if better else "choose another promote.kpi",
        )
    if kpi.unit == "1" and cycle["margin"] >= 1:
        yield RequestError(
            "no share can exceed it",
            where="promote.margin",
            found=cycle["margin"],
            expected="a difference below 1",
        )


def open_cycle(ledger: Path, cycle: CycleEntry, prefix: str) -> LedgerEntry:
    """Register a cycle in a ledger.

    Args:
        ledger: the file; created if missing.
        cycle: the cycle.
        prefix: prefix of its settings, for messages.

    Raises:
        RequestError: there is a cycle of this name, or one with the same seeds, or it has too few
            seeds for a verdict.
    """
    rule = _rule_of(cycle)
    seeds, least = len(cycle["seeds"]), least_seeds(rule)
    if seeds < least:
        raise RequestError(
            "no verdict can be reached",
            where=f"{prefix}seeds",
            found=unreachable(seeds, least, rule),
            expected=f"at least {least} seeds",
            remedy=f"add seeds to {prefix}seeds",
        )

    def made(entries: list[LedgerEntry]) -> CycleEntry:
        earlier = cycles_of(entries)
        if cycle["cycle"] in earlier:
            raise RequestError(
                "is already registered",
                where=f"{prefix}open_cycle",
                found=cycle["cycle"],
                remedy="run its arms, or open a cycle of another name and other seeds",
            )
        for name, (_, one) in earlier.items():
            shared = sorted(set(one["seeds"]) & set(cycle["seeds"]))
            if shared:
                raise RequestError(
                    "the seeds belong to an earlier cycle",
                    where=f"{prefix}seeds",
                    found=", ".join(map(str, shared)),
                    expected=f"none that cycle {name} has",
                )
        return cycle

    return append(ledger, EntryKind.CYCLE, made)


def _rule_of(cycle: CycleEntry) -> Rule:
    frozen = cycle["frozen"]
    return Rule(
        primary=cycle["kpi"],
        alpha=frozen["alpha"],
        test=frozen["test"],
        target=frozen["target"],
        power=0.8,  # has no part in the number of seeds that a verdict needs
        arms=len(cycle["arms"]) - 1,
        sequential=frozen["sequential"],
    )


def _decide(config: RunConfig, ledger: Path, run: Run) -> None:
    assert config.path is not None, "validation has asked for it"
    assert config.policy is not None, "validation has asked for it"
    files, policy = comparison_files(config.path), config.policy
    entry = append(
        ledger,
        EntryKind.DECISION,
        lambda entries: decided(policy, files, config.promote.parity, entries),
    )
    made = entry["decision"]
    assert made is not None, "that is what was added"
    run.manifest.inputs.update(evidence={one["path"]: one["sha256"] for one in made["evidence"]})
    run.manifest.results.update(
        decision=made["decision"],
        recommendation=made["recommendation"],
        entry_sha256=entry["sha256"],
    )
    terminal.show(*decision_document(policy.name, made).parts)
    terminal.say(f"Ledger head: {entry['sha256']}")
    if made["decision"] != Answer.PROMOTE:
        unmet = [rule["rule"] for rule in made["rules"] if rule["outcome"] != "passed"]
        raise GateError(
            f"the answer is {made['decision']}",
            where=f"policy {policy.name}",
            found=f"not passed: {', '.join(dict.fromkeys(unmet))}",
            expected="every rule passed",
            remedy=f"read entry {entry['number']} of {ledger}",
        )
    again = wording.command("task=promote", "promote.replay=true", ("ledger", str(config.ledger)))
    terminal.say_next([Step(again, "check that every decision still comes out as it did")])


def decided(
    policy: PolicyConfig,
    files: Sequence[Path],
    parity: str | None,
    entries: list[LedgerEntry],
    *,
    freezes: bool = True,
) -> DecisionEntry:
    """Make a decision from its evidence and the ledger before it.

    Args:
        policy: the rules and their thresholds.
        files: paths of compare.json.
        parity: path of a certificate; None if none was given.
        entries: ledger entries up to the decision.
        freezes: see `gathered`.
    """
    evidence = gathered(files, entries, freezes=freezes)
    certificate = certificate_of(parity, evidence, str(getattr(policy, "challenger", "")))
    opened = [cycle for _, cycle in cycles_of(entries).values()]
    made = decide(policy, evidence, certificate, opened)
    place = None if certificate is None else Path(certificate.name)
    listed: list[EvidenceEntry] = [
        {
            "path": one.name,
            "sha256": sha256_file(Path(one.name)),
            "cycle": None if one.cycle is None else one.cycle["cycle"],
        }
        for one in evidence
    ]
    return {
        "policy": dataclasses.asdict(policy),
        "evidence": listed,
        "parity": None
        if place is None
        else {"path": str(place), "sha256": sha256_file(place) if place.is_file() else "absent"},
        "rules": made.rules,
        "decision": made.decision,
        "recommendation": made.recommendation,
        "runs": [run for one in evidence for run in one.runs],
        "unverifiable": list(dict.fromkeys(text for one in evidence for text in one.unverifiable)),
    }


def _replay(ledger: Path, run: Run) -> None:
    """Replay every past decision from its evidence, and refuse decisions that differ."""
    entries = read_ledger(ledger)
    checks, unverifiable, unfrozen = [], [], []
    for number, entry in enumerate(entries):
        if entry["decision"] is None:
            continue
        made, why = decision_checks(entries, number)
        if why:
            unverifiable.append(f"Entry {entry['number']} is unverifiable: {why}.")
            continue
        if not froze_runs(entry):
            unfrozen.append(
                f"Entry {entry['number']} is of version {entry['version']}, which froze no runs: "
                "its decision is recomputed from the hashes of its comparisons."
            )
        checks += made
    decisions = sum(entry["decision"] is not None for entry in entries) - len(unverifiable)
    run.manifest.results.update(
        decisions=decisions, entries=len(entries), unverifiable=len(unverifiable)
    )
    terminal.show(*(Note(text, Tone.WARN) for text in [*unverifiable, *unfrozen]))
    remedy = "find what of the evidence has changed since"
    refuse_differences("a past decision comes out otherwise", str(ledger), checks, remedy)
    terminal.say(f"{decisions} decisions of {len(entries)} entries, each as it was made.")


def decision_checks(entries: list[LedgerEntry], number: int) -> tuple[list[Check], str]:
    """Replay one past decision from its evidence and the ledger before it.

    Args:
        entries: the ledger entries.
        number: index of the decision among them, from 0.

    Returns:
        The checks of the decision and its rules against the replay, and the reason why it cannot be
        replayed under the current rules. There are no checks if there is a reason.

    Raises:
        GateError: its evidence is gone.
        DataError: its evidence cannot be read.
    """
    entry = entries[number]
    made = entry["decision"]
    assert made is not None, "the entry is a decision"
    why = _not_of_today(entry["version"], made)
    if why:
        return [], why
    again = _again(made, entries[:number], freezes=froze_runs(entry))
    return _differences(f"entry {entry['number']}", made, again), ""


def _not_of_today(version: int, made: DecisionEntry) -> str:
    """Return the reason why the current rules cannot replay a decision; empty if they can."""
    if version == 1:
        return "version 1 of the ledger froze no rules, and its own were others"
    policy: Any = SCHEMAS["policy"].get(made["policy"]["name"])
    known = set() if policy is None else {field.name for field in dataclasses.fields(policy)}
    if made["policy"].keys() != known:
        return "the settings of its policy have changed since"
    files = [(Path(one["path"]), one["sha256"]) for one in made["evidence"]]
    older = [path for path, sha in files if is_of_older_version(path, sha)]
    return f"{older[0]} is a comparison of an older version" if older else ""


def _differences(what: str, made: DecisionEntry, again: DecisionEntry) -> list[Check]:
    """Compare a decision with its replay: first the outcome, then rule by rule."""
    was, now = dict(made), dict(again)
    checks = [compared(f"{what}: {name}", was[name], now[name]) for name in _MADE]
    counts = [len(one["rules"]) for one in (made, again)]
    checks.append(compared(f"{what}: rules", *counts))
    for one, other in zip(made["rules"], again["rules"], strict=False):
        name = f"{what}: {one['rule']} {one['kpi'] or ''}".rstrip()
        checks.append(compared(name, *(f"{r['observed']}, {r['outcome']}" for r in (one, other))))
    return checks


def _again(made: DecisionEntry, before: list[LedgerEntry], *, freezes: bool) -> DecisionEntry:
    policy: Any = SCHEMAS["policy"][made["policy"]["name"]]
    files = [Path(one["path"]) for one in made["evidence"]]
    parity = made["parity"]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise GateError(
            "evidence of a past decision is missing",
            where="promote.replay",
            found=", ".join(missing),
            expected="every comparison where it was",
        )
    return decided(
        policy(**made["policy"]),
        files,
        None if parity is None else parity["path"],
        before,
        freezes=freezes,
    )
