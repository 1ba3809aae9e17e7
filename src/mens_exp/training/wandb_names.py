"""W&B names of a run (id, group, display name, tags, notes), with the varying parts first.

All functions are pure functions of the JSON record. A display name is cut at its end, so that the
overrides that distinguish the run within its sweep survive; the job number keeps names unique. The
values that a W&B sweep agent gave its process are an input of the run and are kept in its manifest,
so that the run is always sent under the agent's id.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import SweepDir, SweepRecord
from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.errors import DataError, MensError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mens_exp.artifacts.sweep import StudyRecord, SweepJob
    from mens_exp.config.logger import WandbLogger

_INPUT = "wandb_agent"
_VERSION = "wandb_version"  # key in the agent's own file


class AgentRun(NamedTuple):
    """A W&B agent's run id, the sweep of the run, and the values drawn for it.

    ``entity`` and ``project`` are those of the sweep; None if the agent did not provide them.
    """

    run_id: str
    sweep_id: str
    entity: str | None
    project: str | None
    parameters: dict[str, Any]

    def is_of(self, entity: str | None, project: str) -> bool:
        """Return whether the sweep belongs to a project; an entity of None matches any."""
        theirs = self.entity in (None, entity) or entity is None
        return theirs and self.project in (None, project)


def agent_inputs(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that an agent passed to its process, for ``inputs``; empty without one."""
    run_id, sweep_id = environment.get("WANDB_RUN_ID"), environment.get("WANDB_SWEEP_ID")
    if not run_id or not sweep_id:
        return {}
    told = AgentRun(
        run_id,
        sweep_id,
        environment.get("WANDB_ENTITY") or None,
        environment.get("WANDB_PROJECT") or None,
        _drawn(environment.get("WANDB_SWEEP_PARAM_PATH")),
    )
    return {_INPUT: told._asdict()}


def recorded_agent(manifest: Manifest) -> AgentRun | None:
    """Return the agent's run for a run; None if no agent started it."""
    told = manifest.inputs.get(_INPUT)
    return None if told is None else AgentRun(**told)


def _drawn(path: str | None) -> dict[str, Any]:
    """Read the agent's file of values; ignore an unreadable file, as the run has them anyway."""
    if not path:
        return {}
    try:
        stored = parse_yaml(Path(path).read_bytes(), path)
    except (OSError, DataError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {
        str(name): one["value"]
        for name, one in stored.items()
        if name != _VERSION and isinstance(one, dict) and "value" in one
    }


_TAG_CHARACTERS = 64  # W&B refuses a longer tag
_NAME_CHARACTERS = 128  # W&B refuses a longer run name
_VALUE_CHARACTERS = 24  # of a value, if the whole name does not fit
_CUT = "…"
# Overrides that say nothing about the experiment.
_NO_TAG = frozenset({"hydra", "logger"})
# Overrides that the name shows in another form.
_SPELLED = frozenset({"experiment", "path", "resume", "seed", "task"})
# Overrides that the name of a task without training already shows, or that do not affect the task.
_IN_NAME = frozenset(
    {"compare.factors", "export.format", "factors", "format", "model", "out", "suite"}
)
_OPTIONS = ("model", "backend")  # named at the end, unless they vary
_DEPTH = 3  # directories between a job and its sweep (unverified guess)
_FINE_TUNES = frozenset({"train", "plan"})


class _Place(NamedTuple):
    """The overrides that distinguish a run within its sweep, and its mark (job number)."""

    varied: tuple[str, ...]
    mark: str


def id_of(run_dir: RunDir, manifest: Manifest) -> str:
    """Return the id of the W&B run: our run id, prefixed with the sweep's for a job.

    A job's name gives only its position in the sweep and its composition, so the same sweep,
    launched again, has jobs of the same names. A run that an agent started has the agent's id.
    """
    agent = agent_of(run_dir, manifest)
    if agent is not None:
        return agent.run_id
    sweep = _sweep_at(run_dir.path)
    if sweep is None:
        return _plain(manifest.run_id)
    above = run_dir.path.absolute().relative_to(sweep).parts[:-1]
    return _plain(f"{sweep.name}_{'-'.join([*above, manifest.run_id])}")


def agent_of(run_dir: RunDir, manifest: Manifest) -> AgentRun | None:
    """Return the agent's run for a run; jobs of a sweep that an agent launched have none."""
    return None if _sweep_at(run_dir.path) is not None else recorded_agent(manifest)


def group_of(logger: WandbLogger, run_dir: RunDir, manifest: Manifest) -> str | None:
    """Return the logger's group, else the sweep of the run or of the run it reads, else None.

    A run outside any sweep is grouped by its experiment.
    """
    subject = manifest.inputs.get("subject")
    sweep = _sweep_at(run_dir.path)
    if sweep is None and isinstance(subject, str):
        sweep = _sweep_at(Path(subject))
    return logger.group or (None if sweep is None else sweep.name) or manifest.experiment


def display_name(
    logger: WandbLogger, run_dir: RunDir, manifest: Manifest, config: Mapping[str, Any]
) -> str:
    """Return the display name: the user's, or one made from the record.

    The jobs of a sweep share the user's name, so each appends its mark.
    """
    if logger.name is None:
        return name_of(run_dir, manifest, config)
    place = _place_of(run_dir, manifest)
    return logger.name if place is None else _fitted(logger.name, [place.mark], [])


def name_of(run_dir: RunDir, manifest: Manifest, config: Mapping[str, Any]) -> str:
    """Return a name of at most 128 characters that is unique within a sweep.

    The name of a training run starts with the settings that vary in its sweep or, outside a sweep,
    with those that its command changed. Seed, job number, model and backend, and the settings that
    all jobs share follow. Other tasks start with the action: ``evaluate: <run> on <suite>``.

    Args:
        run_dir: the run directory.
        manifest: its record so far.
        config: the resolved configuration.
    """
    place = _place_of(run_dir, manifest)
    overrides = manifest.overrides
    changed = [text for text in overrides if _group(text) not in (_NO_TAG | _SPELLED)]
    marks = [] if place is None else [place.mark]
    if manifest.task not in _FINE_TUNES:
        rest = [text for text in changed if _key(text) not in _IN_NAME]
        rest.sort(key=lambda text: place is None or text not in place.varied)
        return _fitted(_deed(run_dir, manifest, config), marks, _short(rest, overrides))
    varied = _of_sweep(place) if place is not None and place.varied else changed
    front = [text for text in varied if not (place is None and _key(text) in _OPTIONS)]
    behind = [_option(name, manifest, config) for name in _OPTIONS if name not in map(_key, front)]
    shared = [text for text in changed if text not in varied and _key(text) not in _OPTIONS]
    return _fitted(
        " ".join(_short(front, overrides)),
        [_seed(manifest), *marks],
        [*filter(None, behind), *_short(shared, overrides)],
        shorter=" ".join(_short(front, overrides, most=_VALUE_CHARACTERS)),
    )


def tags_of(
    overrides: Sequence[str], added: Sequence[str], study: StudyRecord | None = None
) -> tuple[str, ...]:
    """Return ``study=<name>``, the overrides, cut to W&B's 64 characters, and the user's tags.

    A long value is elided in the middle, because two paths often differ at their end.
    """
    named = [] if study is None else [f"study={study['name']}"]
    told = [text for text in overrides if study is None or _key(text) != "study"]
    made = [_tag(text) for text in (*named, *told) if _group(text) not in _NO_TAG]
    return tuple(dict.fromkeys([*made, *added]))


def notes_of(own: str | None, study: StudyRecord | None) -> str | None:
    """Return the user's notes and the hypothesis of the study, each a paragraph; None for none."""
    parts = [own, None if study is None else str(study["settings"]["hypothesis"])]
    return "\n\n".join(filter(None, parts)) or None


def study_of(run: Path) -> StudyRecord | None:
    """Return the study that a run is part of: one of its jobs, or its comparison."""
    sweep = _sweep_at(run)
    record = None if sweep is None else _record(sweep)
    return None if record is None else record.study


def _tag(override: str) -> str:
    key, equals, value = override.partition("=")
    room = _TAG_CHARACTERS - len(key) - 1
    if not equals or room < _VALUE_CHARACTERS:
        return _elided(override, _TAG_CHARACTERS)
    return f"{key}={_elided(value, room)}"


def _fitted(front: str, kept: Sequence[str], rest: Sequence[str], *, shorter: str = "") -> str:
    """Join the parts of a name; cut the end first, then the front, and never ``kept``."""
    middle = " ".join(kept)
    room = _NAME_CHARACTERS - len(middle) - bool(middle)
    if len(front) > room:
        front = _cut(shorter or front, room)
    name = " ".join(filter(None, [front, middle]))
    left = _NAME_CHARACTERS - len(name) - 1
    return f"{name} {_cut(' '.join(rest), left)}" if rest and left > 1 else name


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}{_CUT}"


def _of_sweep(place: _Place) -> list[str]:
    """Return the varying overrides without the seed, which every name has."""
    return [text for text in place.varied if _key(text) != "seed"]


def _place_of(run_dir: RunDir, manifest: Manifest) -> _Place | None:
    """Return the place of a run in its sweep, ours or an agent's; None outside a sweep."""
    agent = agent_of(run_dir, manifest)
    if agent is not None:
        drawn = [text for text in manifest.overrides if _key(text) in agent.parameters]
        return _Place(tuple(drawn), f"#{agent.run_id}")
    sweep = _sweep_at(run_dir.path)
    if sweep is None:
        return None
    name = run_dir.path.absolute().relative_to(sweep).as_posix()
    found = next((job for job in _jobs(sweep) if job["directory"] == name), None)
    if found is None:
        return _Place((), f"#{name}")
    return _Place(tuple(found["differs"]), f"#{found['number']}")


def _deed(run_dir: RunDir, manifest: Manifest, config: Mapping[str, Any]) -> str:
    """Describe a task's action and its subject."""
    task = manifest.task
    if task == "compare":
        return f"compare: {_compared(run_dir, config)}"
    subject = _subject(manifest, config)
    section = config.get(task) or {}
    match task:
        case "evaluate":
            suite = (config.get("suite") or {}).get("name") or manifest.choices.get("suite")
            return f"evaluate: {subject or 'models'} on {suite}"
        case "export" if form := section.get("format") or config.get(
            "format"
        ):  # in earlier releases
            return f"export: {subject} to {form}"
        case _:
            return f"{task}: {subject}" if subject else task


def _compared(run_dir: RunDir, config: Mapping[str, Any]) -> str:
    """Name the factors and arms of a study; before it has run, the requested ones."""
    if not run_dir.comparison.is_file():
        names = [Path(path).name for path in str(config.get("path") or "").split(",")]
        section = config.get("compare") or {}
        factors = section.get("factors") or config.get("factors")  # as earlier releases have it
        return " ".join([*(factors or []), " vs ".join(names)])
    record = Comparison.read(run_dir.comparison)
    factors = [name for name in record.factors if all(name in a["values"] for a in record.arms)]
    if not factors:
        return " vs ".join(arm["name"] for arm in record.arms)
    arms = [
        " ".join(_elided(str(arm["values"][name]), _VALUE_CHARACTERS) for name in factors)
        for arm in record.arms
    ]
    return f"{', '.join(factors)} {' vs '.join(arms)}"


def _subject(manifest: Manifest, config: Mapping[str, Any]) -> str:
    """Name a task's subject: a run by its place in its sweep or its directory, else a file."""
    inputs = manifest.inputs
    named = (inputs.get(name) for name in ("subject", "adapter", "specification"))
    found = next((one for one in named if isinstance(one, str)), None) or config.get("path")
    if manifest.task == "attribute":
        return _option("model", manifest, config) or ""
    if not isinstance(found, str) or not found:
        return ""
    if found == "base":
        return f"base {_option('model', manifest, config) or ''}".rstrip()
    path = Path(found).absolute()
    for place in (path, *path.parents)[:3]:  # also from <run>/adapter/peft
        run = RunDir(place)
        if run.manifest.is_file():
            return _run_label(run)
    return path.name


def _run_label(run: RunDir) -> str:
    """Return the varying overrides, seed and mark of a sweep's run; else its directory name."""
    name = run.path.name
    try:
        manifest = Manifest.read(run.manifest)
    except MensError:  # a damaged record is reported elsewhere
        return name
    place = _place_of(run, manifest)
    if place is None or not place.varied:
        return name
    varied = _short(_of_sweep(place), manifest.overrides, most=_VALUE_CHARACTERS)
    return _fitted(_cut(" ".join(varied), _NAME_CHARACTERS // 2), [_seed(manifest), place.mark], [])


def _seed(manifest: Manifest) -> str:
    return f"seed{manifest.seed}"


def _option(name: str, manifest: Manifest, config: Mapping[str, Any]) -> str | None:
    """Return the model's name if it has one; otherwise the chosen option of the group."""
    own = (config.get(name) or {}).get("name") if name == "model" else None
    return own or manifest.choices.get(name)


def _sweep_at(run: Path) -> Path | None:
    """Return the sweep directory of a run that is a job."""
    # Hydra writes the first file to the sweep directory, wherever hydra.sweep.dir is.
    parent = run.absolute().parent
    marks = (parent / "multirun.yaml", SweepDir(parent).record)
    if any(mark.is_file() for mark in marks):
        return parent
    for sweep in list(parent.parents)[:_DEPTH]:  # hydra.sweep.subdir may be nested
        name = run.absolute().relative_to(sweep).as_posix()
        if any(job["directory"] == name for job in _jobs(sweep)):
            return sweep
    return None


def _jobs(sweep: Path) -> list[SweepJob]:
    """Return a sweep's jobs; empty if its record is missing, Hydra's own, or damaged."""
    record = _record(sweep)
    return [] if record is None else record.jobs


def _record(sweep: Path) -> SweepRecord | None:
    """Return the record of a sweep; None if it is missing, Hydra's own, or damaged."""
    record = SweepDir(sweep).record
    try:
        return SweepRecord.read(record) if record.is_file() else None
    except MensError:
        return None


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def _key(override: str) -> str:
    """Return the setting or group that an override names."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def _group(override: str) -> str:
    return re.split(r"[.=/@]", override.lstrip("+~"), maxsplit=1)[0]


def _short(overrides: Iterable[str], every: Iterable[str], *, most: int | None = None) -> list[str]:
    """Abbreviate overrides to the last part of their keys, unless that would be ambiguous."""
    ends = Counter(_key(text).rpartition(".")[2] for text in dict.fromkeys(every))
    return [_spelled(text, ends, most) for text in overrides]


def _spelled(override: str, ends: Mapping[str, int], most: int | None) -> str:
    _, equals, value = override.partition("=")
    if not equals:
        return override
    key = _key(override)
    last = key.rpartition(".")[2]
    shown = value if most is None else _elided(value, most)
    return f"{key if ends.get(last, 0) > 1 else last}={shown}"


def _elided(value: str, most: int) -> str:
    """Elide the middle of a long value, because paths differ at their ends."""
    if len(value) <= most:
        return value
    head = (most - 1) // 3
    return f"{value[:head]}{_CUT}{value[head + 1 - most :]}"
