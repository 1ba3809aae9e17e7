"""task=corpus: build rows from source files or other rows, in steps that each run once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.errors import MensError
from mens_exp.report import terminal, wording
from mens_exp.report.document import Step

if TYPE_CHECKING:
    from mens_exp.artifacts.corpus_record import CorpusRecord
    from mens_exp.config.corpus import CorpusConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.steps.pipeline import Done
    from mens_exp.tasks.run import Run


def corpus(config: RunConfig, run: Run) -> None:
    """Run the steps that are not done yet, show each, and record the results."""
    from mens_exp.corpus.steps.pipeline import CORPUS_PAGE, hashes, input_files, run_steps

    if "report" in config.corpus.steps:
        _prepare_tokenizer(config)
    files = input_files(config.corpus)
    inputs = hashes(files, config.corpus)
    run.manifest.inputs["corpus"] = inputs
    run.save()
    steps: list[dict[str, Any]] = []

    def report_step(done: Done) -> None:
        steps.append(_fact(done))
        run.manifest.facts["steps"] = steps
        run.save()
        terminal.say(_line(done))

    assert config.corpus.output is not None, "the rules ask for it"
    output = Path(config.corpus.output)
    (output / CORPUS_PAGE).unlink(missing_ok=True)  # valid again when all steps are done
    made = run_steps(config, files, inputs, report_step)
    run.manifest.results.update(_results(made, output))
    for name, file in made.files.items():
        terminal.say(f"{output / name}: {file['rows']} rows")
    if "report" in config.corpus.steps:
        terminal.say(f"Report: {_page(made, output)}")
    steps_after = _next(made, output)
    if not steps_after:
        terminal.say("No step left rows to train on.")
    terminal.say_next(steps_after)


def _prepare_tokenizer(config: RunConfig) -> None:
    """Fetch or build the base model for the report's tokenizer before any step.

    Raises:
        MensError: it is not available.
    """
    from mens_exp.layout.model_cache import ready_directory
    from mens_exp.rows.cache import cache_root

    if config.tokenizer.name != "vox" and ready_directory(config.model, cache_root()) is None:
        from mens_exp.model.sources import resolve

        resolve(config.model, cache_root())


def _page(made: CorpusRecord, output: Path) -> Path:
    """Render the report next to the steps, and return its location."""
    from mens_exp.artifacts.atomic import write_text
    from mens_exp.artifacts.corpus_record import CorpusReport
    from mens_exp.corpus.steps.pipeline import CORPUS_PAGE
    from mens_exp.corpus.steps.report import RECORD
    from mens_exp.report import corpus_view, html

    page = output / CORPUS_PAGE
    report = CorpusReport.read(output / made.steps[-1]["directory"] / RECORD)
    write_text(page, html.page(corpus_view.document(report, _next(made, output))))
    return page


def pinned_places(config: CorpusConfig) -> CorpusConfig:
    """Return the settings with absolute paths, and with a checkout's revision as a commit.

    Settings that cannot be resolved stay unchanged; the checks of the paths report why.
    """
    from mens_exp.corpus.steps.extract import resolved_commit

    named = config.input
    if named is not None:
        named = [_whole(one) for one in (named if isinstance(named, list) else [named])]
        named = named if isinstance(config.input, list) else named[0]
    commit = config.extract.commit
    if commit is not None and isinstance(named, str) and Path(named).is_dir():
        try:
            commit = resolved_commit(Path(named), commit)
        except MensError:
            commit = config.extract.commit
    return dataclasses.replace(
        config,
        input=named,
        output=None if config.output is None else _whole(config.output),
        extract=dataclasses.replace(config.extract, commit=commit),
    )


def _whole(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _fact(done: Done) -> dict[str, Any]:
    record = done.record
    return {
        "step": record.step,
        "directory": str(done.directory),
        "key": record.key,
        "was_done_already": done.why is None,
        "why": done.why,
        "rows_in": record.rows_in,
        "rows_out": record.rows_out,
        "dropped": record.dropped,
        "seconds": record.seconds,
        "peak_bytes": record.peak_bytes,
    }


def _line(done: Done) -> str:
    """Describe the result of a step in one line."""
    record = done.record
    state = "already done" if done.why is None else f"{record.seconds:.1f} s ({done.why})"
    dropped = ", ".join(f"{reason} {count}" for reason, count in record.dropped.items())
    rows = f"{record.rows_in} in, {record.rows_out} out"
    return f"{done.directory.name}: {rows}{f'; dropped: {dropped}' if dropped else ''} · {state}"


def _results(made: CorpusRecord, output: Path) -> dict[str, Any]:
    return {
        "out": str(output),
        "rows": {name: file["rows"] for name, file in made.files.items()},
        "out_sha256": {name: file["sha256"] for name, file in made.files.items()},
    }


def _next(made: CorpusRecord, output: Path) -> list[Step]:
    """Return the command that trains on the corpus."""
    files = {Path(name).stem: wording.path(output / name) for name in made.files}
    train = files.get("train") or files.get("rows")
    if train is None:
        return []
    val = [("data.val_path", files["val"])] if "val" in files else []
    return [Step(wording.command("data=jsonl", ("data.path", train), *val), "train on it")]
