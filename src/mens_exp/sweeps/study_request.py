"""Read a study from its file, plan its runs, and write the entry that registers it."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.config.compose import study_in, to_yaml
from mens_exp.config.fields import plain, range_problems, shown
from mens_exp.config.override_parsing import parsed_override
from mens_exp.config.override_values import override_of
from mens_exp.config.overrides import Checked, check
from mens_exp.config.promotion import BurnProductionPolicy, StudyConfig
from mens_exp.config.rules.task import study_problems
from mens_exp.errors import ConfigError, MensError, Problems, RequestError
from mens_exp.evals.arms import Trial, arms_of
from mens_exp.evals.promotion_rules import thresholds
from mens_exp.evals.study import reference_arm
from mens_exp.planning.checks import classes
from mens_exp.planning.contract import contract_of
from mens_exp.planning.preflight import writable_cache
from mens_exp.sweeps.multirun import PLACE
from mens_exp.sweeps.plan import plan_cells
from mens_exp.sweeps.search_request import objective_problems
from mens_exp.tasks.study_runs import leaves_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.artifacts.decision_ledger import CycleEntry
    from mens_exp.artifacts.sweep import SweepJob
    from mens_exp.config.overrides import Cell
    from mens_exp.evals.arms import Arm
    from mens_exp.sweeps.plan import PlannedSweep

_MAY_BE_GIVEN = frozenset(
    {
        *("hydra/launcher", "hydra.sweep.dir", "sweep.retries", "sweep.changes"),
        *("ledger", "study", "task"),
    }
)
_OF_LAUNCHER = "hydra.launcher."
HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A command that conducts a study.

    Attributes:
        name: the name of the study.
        study: its settings.
        root: its directory.
        ledger: the ledger that registers it.
        given: overrides of sweep and launcher.
        asked: a cell with these overrides.
        only_plans: whether the study is only planned, not run.
    """

    name: str
    study: StudyConfig
    root: Path
    ledger: Path
    given: tuple[str, ...]
    asked: Cell
    only_plans: bool

    @property
    def sha256(self) -> str:
        """The digest of the settings, which is registered."""
        return digest(settings_of(self.study, only_changed=True))


def settings_of(study: StudyConfig, *, only_changed: bool = False) -> dict[str, Any]:
    """Return the settings of a study as plain JSON values.

    Args:
        study: the study.
        only_changed: leave out defaults, so that a later setting does not change the digest.
    """
    usual = dataclasses.asdict(StudyConfig())
    values: dict[str, Any] = dataclasses.asdict(study)
    kept = {name: value for name, value in values.items() if value != usual[name]}
    return {name: plain(value) for name, value in (kept if only_changed else values).items()}


def requested(overrides: Sequence[str]) -> Request:
    """Read the study that a command names, and its other overrides.

    Raises:
        MensError: the study is missing or invalid, or an override belongs in its file.
        Problems: several of these.
    """
    given: dict[str, list[str]] = {}
    for text in overrides:
        given.setdefault(text.lstrip("+~").partition("=")[0], []).append(text)
    named = str(_value(given["study"][-1]))
    refused = [key for key in given.keys() - _MAY_BE_GIVEN if not key.startswith(_OF_LAUNCHER)]
    Problems.raise_if([_not_with_study(key) for key in sorted(refused)])
    task = str(_value(given["task"][-1])) if "task" in given else "train"
    if task not in {"train", "plan"}:
        raise ConfigError(
            "a study only trains and compares",
            where="task",
            found=task,
            remedy="drop it, or task=plan",
        )
    ours = [texts[-1] for key, texts in given.items() if key not in {"study", "ledger", "task"}]
    path = Path(named).expanduser() if named.endswith((".yaml", ".yml")) else None
    chosen = [] if path is not None else [f"study={named}"]
    checked = check([*chosen, *ours], multirun=True)
    Problems.raise_if(checked.problems)
    asked = checked.cells[0]
    name = named
    if path is not None:
        asked.config.study = study_in(path)
        found = [*range_problems(asked.config.study, "study."), *study_problems(asked.config)]
        Problems.raise_if(found)
        name = path.absolute().parent.name if path.stem == "study" else path.stem
    assert isinstance(asked.config.study, StudyConfig), "the command names it"
    has_place = "hydra.sweep.dir" in given
    root = Path(str(asked.composed.sweep_root)) if has_place else Path("outputs") / "study" / name
    ledger = _value(given["ledger"][-1]) if "ledger" in given else root / "ledger.jsonl"
    return Request(
        name=name,
        study=asked.config.study,
        root=root,
        ledger=Path(str(ledger)).expanduser(),
        given=tuple(ours),
        asked=asked,
        only_plans=task == "plan",
    )


def _value(text: str) -> Any:
    problems: list[MensError] = []
    override = parsed_override(text, problems)
    Problems.raise_if(problems)
    assert override is not None, "it has no problem"
    return override.value()


def _not_with_study(key: str) -> ConfigError:
    _, _, inside = key.partition("study.")
    return ConfigError(
        "is determined by the study's file",
        where=key,
        expected="hydra/launcher, hydra.launcher.…, hydra.sweep.dir, sweep.retries, "
        "sweep.changes, ledger or task=plan with study=…",
        remedy=f"write {inside or key} into a study of your own, ./conf/study/<name>.yaml"
        + ("" if inside else ", under shared"),
    )


def planned_runs(request: Request, *, is_new: bool = True) -> tuple[PlannedSweep, list[Arm]]:
    """Plan every run, seed by seed, and name the arms as the comparison will.

    Raises:
        MensError: a run cannot be made, or two arms are the same.
        Problems: several of these.
    """
    study, place = request.study, override_of(PLACE, str(request.root))
    here = [text for text in request.given if not text.startswith(PLACE)]
    checks: list[Checked] = []
    for seed in study.seeds:
        for arm in _arms(study):
            texts = [*study.shared, *arm, f"seed={seed}", *here, place]
            checks.append(check(texts, multirun=True, first=len(checks)))
    problems = [one for each in checks for one in each.problems]
    unique = tuple({str(one): one for one in problems}.values())
    Problems.raise_if(unique)
    cells = tuple(cell for each in checks for cell in each.cells)
    if is_new:
        own = any(map(_has_metrics_of_its_own, cells))
        found = objective_problems("study.primary", [study.primary], cells, may_be_own=own)
        Problems.raise_if([*found])
    planned = plan_cells(Checked(cells=cells, problems=(), general=()), is_new=is_new)
    if planned.left_out:
        one = planned.left_out[0]
        raise RequestError(
            "two arms of the study are the same",
            where="study",
            found=f"{' '.join(one['differs'])}: {one['why']}",
            expected="arms that differ in what is trained",
        )
    arms = arms_of([_trial(cell) for cell in cells], factors_of(study))
    if len(arms) != arm_count(study):
        raise RequestError(
            "the arms do not differ in what is trained",
            where="study",
            found=", ".join(arm.name for arm in arms),
            expected=f"{arm_count(study)} arms",
        )
    if is_new and study.reference not in study.arms:
        reference_arm(arms, study.reference, where="study.reference")
    return planned, arms


def _has_metrics_of_its_own(cell: Cell) -> bool:
    """Return whether a run may measure metrics that are not in our table of KPIs.

    User-defined classes may log metrics, and task files may name groups and metrics.
    """
    suite = cell.config.suite
    return classes.record(cell.config) is not None or suite.spec.reads_files(suite)


def _arms(study: StudyConfig) -> list[list[str]]:
    """Return the overrides of each arm."""
    if study.arms:
        return [list(texts) for texts in study.arms.values()]
    values = ([f"{key}={_text(one)}" for one in some] for key, some in study.grid.items())
    return [list(combination) for combination in itertools.product(*values)]


def arm_count(study: StudyConfig) -> int:
    """Return the number of arms."""
    return len(_arms(study))


def _text(value: Any) -> str:
    """Format a YAML value as in an override."""
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, str):
        return override_of("", value).partition("=")[2]
    return shown(value)


def factors_of(study: StudyConfig) -> list[str]:
    """Return the settings and groups whose values the arms vary."""
    pairs = [dict(text.lstrip("+~").partition("=")[::2] for text in arm) for arm in _arms(study)]
    keys = dict.fromkeys(key for one in pairs for key in one)
    return [key for key in keys if len({one.get(key) for one in pairs}) > 1]


def _trial(cell: Cell) -> Trial:
    """Describe a planned run as a comparison will read it."""
    text = to_yaml(cell.composed.values)
    manifest = Manifest(
        run_id=str(cell.number),
        task="train",
        started_utc="",
        config_digest="",
        seed=cell.config.seed,
        overrides=list(cell.composed.overrides),
        choices=cell.composed.choices,
        contract=contract_of(cell.config).record(),
    )
    return Trial(manifest=manifest, settings=dict(leaves_of(parse_yaml(text, "a run"))), hashes={})


def refuse_over_budget(study: StudyConfig, jobs: Sequence[SweepJob]) -> None:
    """Refuse a study that is expected to cost more than its budget.

    Raises:
        RequestError: there are too many runs, or they are expected to take too long.
        Problems: both.
    """
    budget, problems = study.budget, []
    if budget.runs is not None and len(jobs) > budget.runs:
        found = f"{arm_count(study)} arms with {len(study.seeds)} seeds: {len(jobs)} runs"
        problems.append(_over("runs", found, f"at most {budget.runs}"))
    times = [job["estimate"].get("time_s") for job in jobs]
    known = sum(one for one in times if one is not None) / HOUR_S
    if budget.hours is not None and known > budget.hours:
        found = f"about {known:.2f} hours for {len(jobs)} runs"
        problems.append(_over("hours", found, f"at most {budget.hours:g}"))
    Problems.raise_if(problems)


def _over(name: str, found: str, expected: str) -> RequestError:
    return RequestError(
        "the study costs more than its budget",
        where=f"study.budget.{name}",
        found=found,
        expected=expected,
        remedy=f"take fewer seeds or arms, or raise study.budget.{name}",
    )


def cycle_for(request: Request, arms: Sequence[Arm], cells: Sequence[Cell]) -> CycleEntry:
    """Return a study's cycle for the ledger: everything that its decision depends on.

    Raises:
        RequestError: the arms would be scored by different suites.
    """
    study = request.study
    compared = study.compared(factors_of(study))
    return {
        "cycle": request.name,
        "suite_digest": _suite_digest(cells[: len(arms)]),
        "seeds": list(study.seeds),
        "arms": [arm.name for arm in arms],
        "factor": ",".join(factors_of(study)),
        "kpi": study.primary,
        "direction": study.direction.value,
        "margin": study.margin,
        "frozen": {
            "alpha": study.alpha,
            "test": study.test.value,
            "condition": compared.condition,
            "target": study.target.value,
            "sequential": compared.sequential.value,
            **thresholds(BurnProductionPolicy()),
        },
        "study": {
            "sha256": request.sha256,
            "hypothesis": study.hypothesis,
            "stopping": study.stopping.value,
        },
    }


def _suite_digest(cells: Sequence[Cell]) -> str | None:
    """Return the digest of the suite that scores every arm; None without a suite."""
    if not any(cell.config.suite.spec.scores for cell in cells):
        return None
    from mens_exp.tasks.scoring import planned_suite_digest

    found = {planned_suite_digest(cell.config, writable_cache()) for cell in cells}
    if len(found) > 1:
        raise RequestError(
            "the arms are scored by different suites, so that nothing compares them",
            where="study",
            found=", ".join(sorted(str(one)[:12] for one in found)),
            expected="one suite, over the same items",
        )
    return found.pop()
