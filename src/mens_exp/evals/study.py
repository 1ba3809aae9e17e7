"""A study: runs grouped into arms and compared, as one record."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.comparison import (
    ArmRecord,
    Comparison,
    ContrastRecord,
    Curve,
    RunRecord,
    Verdict,
)
from mens_exp.artifacts.scorecard import UNSAFE, Condition
from mens_exp.config.compose import compose, typed
from mens_exp.config.option_files import user_directories
from mens_exp.errors import ConfigError, RequestError, expected_name
from mens_exp.evals.arms import (
    Arm,
    Trial,
    aliased,
    arms_of,
    factors_in,
    inner_differences,
    loss_unit,
    measured_otherwise,
    seed_labels,
    unlike_losses,
    unlike_sizes,
)
from mens_exp.evals.contrast import Implied, guard, implied_by
from mens_exp.evals.kpis import KPIS
from mens_exp.evals.observations import Observation, Score, scores, undirected_metrics
from mens_exp.evals.verdicts import (
    ArmScores,
    Rule,
    arm_mean,
    compared,
    incomparable,
    judge,
    noise_of,
)
from mens_exp.planning.learned_settings import learned_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from mens_exp.config.promotion import CompareConfig

BOTH = "base and tuned"
"""Condition of a comparison whose arms are the two conditions."""

_ADAPTER = "adapter"  # the factor of a comparison of base and tuned model
_OUTSIDE = "programs ran outside a sandbox (sandbox=unsafe)"
_PREFERRED = ("task_success", "parse_rate", "val_loss", "val_bits_per_byte")
_SCATTER = ("train_s", "peak_bytes", "tokens", "trainable_parameters")
_CURVES = ("train/loss", "val/loss")
_MOST_POINTS = 200
_TWO = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One run of the study.

    Attributes:
        trial: the run as a member of an arm.
        record: record of the files that its values were read from.
        items: number of items of its suite; None without a scorecard.
        observe: returns the run's measurements, given an arm's name and a condition.
        curves: metric -> (step, value), from telemetry.
    """

    trial: Trial
    record: RunRecord
    items: int | None
    observe: Callable[[str, str], list[Observation]]
    curves: Mapping[str, Sequence[tuple[int, float]]]


def conducted(
    path: Sequence[str], runs: Sequence[Scored], factors: Sequence[str], settings: CompareConfig
) -> Comparison:
    """Compare the arms of a study.

    Args:
        path: the requested path, for the record.
        runs: the runs to compare.
        factors: declared factors; if empty, they are derived from the runs' overrides.
        settings: settings of the comparison.

    Raises:
        ConfigError: these runs do not have a factor, the reference or the primary KPI.
        RequestError: there is nothing to compare.
    """
    if not runs:
        raise RequestError(
            "no run here has succeeded",
            where="path",
            found=", ".join(path),
            expected="training runs that succeeded, or evaluations of such",
            remedy="name the directory of the sweep or the runs, path=<directory>; latest looks in "
            "outputs/ alone",
        )
    trials = [run.trial for run in runs]
    named = list(factors) or factors_in(trials)
    arms = arms_of(trials, named)
    if len(arms) == 1:
        return _base_and_tuned(path, runs, arms[0], settings)
    found = reference_arm(arms, settings.reference)
    order = [found, *(arm for arm in arms if arm is not found)]
    by_arm = {
        arm.name: [run for run in runs if any(run.trial is one for one in arm.trials)]
        for arm in order
    }
    seen = {name: _scores(name, some, settings.condition) for name, some in by_arm.items()}
    made = _record(path, order, by_arm, seen, settings, named, declared=bool(factors))
    for arm, contrast in zip(order[1:], made.contrasts, strict=True):
        _hold(arm, found, named, contrast)
        contrast["confounded_by"] += aliased(arms, contrast["differs_in"])
        if UNSAFE in {run["sandbox"] for run in made.runs if run["arm"] in {arm.name, found.name}}:
            contrast["environment"].append(_OUTSIDE)
    made.curves = {name: _curves(some) for name, some in by_arm.items()}
    return made


def _base_and_tuned(
    path: Sequence[str], runs: Sequence[Scored], arm: Arm, settings: CompareConfig
) -> Comparison:
    """Compare the tuned model of one arm with its own base."""
    sides = [Condition.BASE.value, Condition.TUNED.value]
    arms = [Arm(name=side, values={_ADAPTER: side}, trials=arm.trials) for side in sides]
    by_arm = {side: list(runs) for side in sides}
    seen = {side: _scores(side, runs, side) for side in sides}
    made = _record(path, arms, by_arm, seen, settings, [_ADAPTER], declared=False)
    made.condition = BOTH
    made.runs = [{**run.record, "arm": Condition.TUNED.value} for run in runs]
    made.contrasts[0]["confounded_by"] = inner_differences(arm)
    made.contrasts[0]["environment"] = seed_labels(arm)
    if UNSAFE in {run["sandbox"] for run in made.runs}:
        made.contrasts[0]["environment"].append(_OUTSIDE)
    made.curves = {Condition.TUNED.value: _curves(runs)}
    return made


def _record(
    path: Sequence[str],
    arms: Sequence[Arm],
    runs: Mapping[str, Sequence[Scored]],
    seen: Mapping[str, ArmScores],
    settings: CompareConfig,
    factors: list[str],
    *,
    declared: bool,
) -> Comparison:
    """Build the record, without the contrast guard's findings."""
    names = _kpis(seen)
    unlike = {arm.name: unlike_losses(arm, arms[0]) for arm in arms[1:]}
    others = {name for one in unlike.values() for name in one}
    manifests = [run.trial.manifest for arm in runs.values() for run in arm]
    undirected = {name for one in manifests for name in undirected_metrics(one)}
    primary = _primary(settings.primary, names, seen, others, undirected - {*names})
    rule = Rule(
        primary=primary,
        alpha=settings.alpha,
        test=settings.test.value,
        target=settings.target.value,
        power=settings.power,
        arms=len(arms) - 1,
        sequential=settings.sequential.value,
    )
    noise = {name: noise_of(name, list(seen.values())) for name in names}
    reference = arms[0]
    contrasts: list[ContrastRecord] = [
        {
            "arm": arm.name,
            "reference": reference.name,
            "differs_in": [f for f in factors if arm.values.get(f) != reference.values.get(f)],
            "confounded_by": [],
            "environment": [
                *_unmeasured(primary, arm, seen),
                *_unmeasured(primary, reference, seen),
            ],
            "moved_inputs": [],
            "kpis": {
                name: incomparable(name, seen[arm.name], seen[reference.name], why)
                if (why := unlike[arm.name].get(name)) is not None
                else compared(name, seen[arm.name], seen[reference.name], noise[name], rule)
                for name in names
            },
        }
        for arm in arms[1:]
    ]
    if (unit := loss_unit(reference)) is not None:
        for one in contrasts:
            if "val_loss" in one["kpis"]:
                one["kpis"]["val_loss"]["unit"] = unit
    judge([one["kpis"][primary] for one in contrasts], rule)
    scatter = {
        run.record["run_id"]: _scatter(run, seen[name], primary)
        for name, some in runs.items()
        for run in some
    }
    made = Comparison(
        path=list(path),
        settings={"factors": factors if declared else [], **settings.record()},
        factors=factors,
        declared=declared,
        reference=reference.name,
        primary=primary,
        alpha=settings.alpha,
        test=rule.test,
        target=rule.target,
        sequential=rule.sequential,
        power=settings.power,
        condition=settings.condition,
        arms=[_arm_record(arm, runs[arm.name], seen[arm.name], names) for arm in arms],
        runs=[{**run.record, "arm": name} for name, some in runs.items() for run in some],
        contrasts=contrasts,
        noise=noise,
        scatter=scatter,
    )
    _say_unknown(made)
    return made


def _hold(arm: Arm, reference: Arm, factors: Sequence[str], contrast: ContrastRecord) -> None:
    """Add the guard's findings: confounders of a contrast, and machine differences."""
    implied = _implied(arm, reference, factors)
    first = reference.trials[0]
    held = guard(arm.trials[0].side(), first.side(), factors, implied)
    found = [*held.confounded_by, *inner_differences(arm), *inner_differences(reference)]
    suites = {one.suite_digest for side in (arm, reference) for one in side.trials}
    if len(suites) > 1:
        found.append("another suite: its digest, or that there is a scorecard at all")
    found += measured_otherwise([*arm.trials, *reference.trials])
    contrast["confounded_by"] = list(dict.fromkeys(found))
    contrast["moved_inputs"] = list(held.moved_inputs)
    others = [*arm.trials, *reference.trials[1:]]
    labels = [
        label
        for trial in others
        for label in guard(trial.side(), first.side(), factors, implied).environment
    ]
    if all(one.answers_in_f32 for one in (first, *others)):  # otherwise they are confounders
        labels += unlike_sizes([first, *others])
    labels += [*seed_labels(arm, reference.seeds), *seed_labels(reference, arm.seeds)]
    contrast["environment"] = list(dict.fromkeys([*contrast["environment"], *labels]))


def _unmeasured(kpi: str, arm: Arm, seen: Mapping[str, ArmScores]) -> list[str]:
    """List seeds of an arm without a value of a KPI that other seeds of the arm have."""
    known = {seed: arm_mean(kpi, {seed: runs}) for seed, runs in seen[arm.name].items()}
    lacking = [seed for seed, value in known.items() if value is None]
    if len(lacking) == len(known):  # the verdict states why the arm has none
        return []
    return [f"seed {seed} of {arm.name} has no {kpi}" for seed in lacking]


def _implied(arm: Arm, reference: Arm, factors: Sequence[str]) -> Implied | None:
    """Return the differing settings that two arms' backends imply, if the backend is a factor."""
    ours, theirs = arm.backend, reference.backend
    if "backend" not in factors or ours is None or theirs is None or ours == theirs:
        return None
    own = user_directories()
    source = reference.trials[0].settings.get("model.source")
    return implied_by(lambda name: _learned_of(name, source == "random", own), ours, theirs)


@functools.cache  # a composition takes a third of a second, and a policy reads many studies
def _learned_of(backend: str, is_random: bool, own: tuple[Path, ...]) -> dict[str, Any]:
    """Return the learned settings of a run with only its backend given.

    Args:
        backend: an option.
        is_random: whether the model has random weights, for which burn implies another tokenizer.
        own: directories of the user's options, which may add backends.
    """
    del own  # only part of the cache key
    model = ["model=random"] if is_random else []
    return learned_settings(typed(compose([[f"backend={backend}", *model]])[0].values))


def reference_arm(arms: Sequence[Arm], wanted: str | None, where: str = "compare.reference") -> Arm:
    """Return the arm with that name or that value of a factor; by default the first.

    Values are compared ignoring case, since the command line changes the spelling of booleans.

    Args:
        arms: the arms, in their order.
        wanted: a name or a value.
        where: the setting that names it.

    Raises:
        ConfigError: no arm matches, or several do.
    """
    if wanted is None:
        return arms[0]
    matching = [
        arm
        for arm in arms
        if wanted in {arm.name, *(f"{factor}={value}" for factor, value in arm.values.items())}
        or wanted.lower() in {value.lower() for value in arm.values.values()}
    ]
    if len(matching) == 1:
        return matching[0]
    raise ConfigError(
        "does not name an arm" if not matching else "names several arms",
        where=where,
        found=wanted,
        expected=expected_name(wanted, [arm.name for arm in arms]),
    )


def _scores(arm: str, runs: Sequence[Scored], condition: str) -> ArmScores:
    found: dict[int, list[dict[str, Score]]] = {}
    for run in runs:
        seed = run.trial.manifest.seed
        found.setdefault(seed, []).append(scores(run.observe(arm, condition), run.items))
    return dict(sorted(found.items()))


def _kpis(seen: Mapping[str, ArmScores]) -> list[str]:
    """List every KPI that a run has: those of the table in its order, then the suites' own."""
    names = {name for arm in seen.values() for runs in arm.values() for run in runs for name in run}
    return [*(name for name in KPIS if name in names), *sorted(names - KPIS.keys())]


def _primary(
    wanted: str | None,
    names: Sequence[str],
    seen: Mapping[str, ArmScores],
    unlike: set[str],
    undirected: set[str],
) -> str:
    if wanted is not None and wanted in undirected:
        raise ConfigError(
            "no arm can be better by this metric, because it has no declared direction",
            where="compare.primary",
            found=wanted,
            expected="a KPI, or a metric with a direction",
            remedy=f'put @declares("{wanted}", direction="min") or "max", from '
            "mens_exp.artifacts.metrics, on the class that logs it, and train again",
        )
    if wanted is not None and wanted not in names:
        raise ConfigError(
            "no run has this KPI",
            where="compare.primary",
            found=wanted,
            expected=expected_name(wanted, names),
        )
    if wanted is not None:
        return wanted
    known = [n for n in names if all(arm_mean(n, arm) is not None for arm in seen.values())]
    usual = next((name for name in _PREFERRED if name in known and name not in unlike), None)
    if usual is None:
        raise ConfigError(
            "the primary KPI must be named",
            where="compare.primary",
            expected=f"one of {', '.join(known or names)}",
        )
    return usual


def _arm_record(
    arm: Arm, runs: Sequence[Scored], seen: ArmScores, names: Sequence[str]
) -> ArmRecord:
    return {
        "name": arm.name,
        "backend": arm.backend,
        "values": arm.values,
        "seeds": arm.seeds,
        "runs": len(runs),
        "kpis": {name: arm_mean(name, seen) for name in names},
    }


def _scatter(run: Scored, seen: ArmScores, primary: str) -> dict[str, float | None]:
    """Return a run's point in the scatter plot: its costs, and its seed's mean primary KPI."""
    values = scores(run.observe("", Condition.TUNED.value), run.items)
    mean = arm_mean(primary, {0: seen[run.trial.manifest.seed]})
    costs = {name: values[name].mean for name in _SCATTER if name in values}
    own = values.get(primary)
    return {**costs, primary: mean if own is None else own.mean}


def _curves(runs: Sequence[Scored]) -> dict[str, Curve]:
    """Return the curves of an arm over the steps that all of its runs have."""
    found = {}
    for metric in _CURVES:
        series = [dict(run.curves.get(metric) or ()) for run in runs]
        shared = sorted(set.intersection(*(set(one) for one in series))) if series else []
        steps = shared[:: max(1, math.ceil(len(shared) / _MOST_POINTS))]
        if len(steps) < _TWO:
            continue
        columns = [[one[step] for one in series] for step in steps]
        found[metric] = Curve(
            steps=steps,
            mean=[math.fsum(column) / len(column) for column in columns],
            low=[min(column) for column in columns],
            high=[max(column) for column in columns],
        )
    return found


def _say_unknown(made: Comparison) -> None:
    """Record the reasons for null figures."""
    for contrast in made.contrasts:
        for name, kpi in contrast["kpis"].items():
            if kpi["verdict"] == Verdict.UNKNOWN and kpi["estimate"] is None:
                made.unknown[f"contrasts.{contrast['arm']}.{name}"] = kpi["why"]
    if all(one["rerun"] is None for one in made.noise.values()):
        made.unknown["noise.rerun"] = "no configuration was run twice with one seed"
    if all(one["seed"] is None for one in made.noise.values()):
        made.unknown["noise.seed"] = "no arm has two seeds"
    many: list[Any] = [arm["name"] for arm in made.arms if len(arm["seeds"]) == 1]
    if many and "noise.seed" not in made.unknown:
        made.notes.append(f"one seed alone: {', '.join(many)}")
