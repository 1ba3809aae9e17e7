"""Rules for rows: `data` with each of its sources, and the steps of task=corpus."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from mens_exp.config.corpus import LANGUAGES, STEPS, CorpusConfig
from mens_exp.config.data import (
    NEEDED_FIELDS,
    HubData,
    JsonlData,
    MixData,
    MixStop,
    RowFormat,
    RowsData,
    SyntheticData,
)
from mens_exp.config.data_sources import in_source, sources_of
from mens_exp.config.fields import range_problems
from mens_exp.errors import ConfigError, Problems, expected_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.data import DataConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

_FILES = "a file, a list such as [a.jsonl,b.jsonl], or a glob such as rows/*.jsonl"


def data_problems(config: RunConfig) -> Iterator[MensError]:
    """Yield the problems of `data`."""
    data = config.data
    shares = data.val_frac + data.heldout_frac
    if shares >= 1:
        yield ConfigError(
            "no rows are left to train on",
            where="data.val_frac",
            found=f"{data.val_frac} + heldout_frac {data.heldout_frac}",
            expected="a sum under 1",
        )
    elif isinstance(data, SyntheticData) and shares < 1 and not data.rows_by_side()[0]:
        yield ConfigError(
            "no rows are left to train on",
            where="data.rows",
            found=f"{data.rows} for val_frac {data.val_frac} and heldout_frac {data.heldout_frac}",
            expected="rows for all three sides, each share rounded",
            remedy="raise data.rows, or lower a share",
        )
    yield from _of_source(data)
    if isinstance(data, MixData):
        yield from _mix(data)
    if isinstance(data, RowsData) and data.streaming:
        yield from _streamed(config, data)


def _of_source(data: DataConfig) -> Iterator[ConfigError]:
    """Yield the problems specific to one source."""
    least, most = data.filter.min_chars, data.filter.max_chars
    if least is not None and most is not None and least > most:
        yield ConfigError(
            "no row can pass",
            where="data.filter.min_chars",
            found=least,
            expected=f"at most data.filter.max_chars ({most})",
        )
    if isinstance(data, JsonlData):
        yield from _files("data.path", data.path)
        if data.val_path is not None:
            yield from _files("data.val_path", data.val_path)
    if isinstance(data, HubData) and data.val_split == data.split:
        yield ConfigError(
            "training rows would be used for validation",
            where="data.val_split",
            found=data.val_split,
            expected="another split than data.split",
        )
    if isinstance(data, RowsData):
        yield from _columns(data)


def _streamed(config: RunConfig, data: RowsData) -> Iterator[ConfigError]:
    """Yield the settings that streamed rows do not support."""
    if config.task.name in {"train", "plan"}:
        if config.trainer.max_steps <= 0:
            yield ConfigError(
                "is required with data.streaming=true",
                where="trainer.max_steps",
                found=config.trainer.max_steps,
                expected="a number of steps, because the number of rows is unknown",
            )
        if config.trainer.max_epochs > 0:
            yield ConfigError(
                "cannot be computed with data.streaming=true",
                where="trainer.max_epochs",
                found=config.trainer.max_epochs,
                expected="-1, because the number of rows is unknown",
                remedy="give trainer.max_steps alone",
            )
    if isinstance(data, HubData):
        for name, split in (("split", data.split), ("val_split", data.val_split)):
            if split is not None and set(split) & set("[]+:"):
                yield ConfigError(
                    "part of a split cannot be streamed",
                    where=f"data.{name}",
                    found=split,
                    expected="the name of one split",
                )


def _mix(data: MixData) -> Iterator[MensError]:
    """Yield the problems of a mix and of each of its sources."""
    if data.stop is MixStop.budget and data.budget_tokens is None:
        yield ConfigError(
            "is required with data.stop=budget",
            where="data.budget_tokens",
            expected="a number of tokens",
        )
    try:
        sources = sources_of(data)
    except Problems as several:
        yield from several.problems
        return
    except ConfigError as problem:
        yield problem
        return
    for number, source in enumerate(sources):
        for one in (*range_problems(source.data, "data."), *_of_source(source.data)):
            yield in_source(one, number)


def _files(where: str, value: Any) -> Iterator[ConfigError]:
    names = value if isinstance(value, list) else [value]
    if not names or "" in names:
        yield ConfigError("no file given", where=where, expected=f"the path of {_FILES}")
    elif not all(isinstance(name, str) for name in names):
        yield ConfigError("wrong type", where=where, found=value, expected=f"the path of {_FILES}")


def _columns(data: RowsData) -> Iterator[ConfigError]:
    given = data.columns.given
    if data.group_column is not None and "group" in given:
        yield ConfigError(
            "two columns split the rows",
            where="data.group_column",
            found=f"{data.group_column} and data.columns.group={given['group']}",
            expected="one of the two",
        )
    for column in sorted({one for one in given.values() if list(given.values()).count(one) > 1}):
        twice = ", ".join(name for name, one in given.items() if one == column)
        yield ConfigError(
            "a column is named twice",
            where="data.columns",
            found=f"{column} for {twice}",
            expected="each column for one field",
        )
    ways = [needed for way, needed in NEEDED_FIELDS.items() if data.format in {way, RowFormat.auto}]
    if given and not any(set(needed) <= given.keys() for needed in ways):
        yield ConfigError(
            "the columns name no answer to learn from",
            where="data.columns",
            found=", ".join(f"{name}:{column}" for name, column in given.items()),
            expected=" or ".join(dict.fromkeys(" and ".join(needed) for needed in ways)),
        )


# Step -> the steps that cannot precede it, and why.
_NOT_AFTER: Final[dict[str, tuple[frozenset[str], str]]] = {
    "extract": (frozenset(STEPS), "it reads source files, and no rows of another step"),
    "generate": (
        frozenset({"mix", "split", "curriculum"}),
        "its rows would have no share, no side of the split and no place in the order",
    ),
    "canonical": (
        frozenset({"dedupe", "mix"}),
        "rows that differ in layout alone would stay",
    ),
    "dedupe": (frozenset({"mix"}), "it would remove what mix repeats, and so change the shares"),
    "decontaminate": (
        frozenset({"mix"}),
        "it would remove drawn rows, and so change the shares",
    ),
    "mix": (frozenset({"curriculum"}), "it draws rows in its own order"),
    "split": (
        frozenset({"mix"}),
        "mix repeats rows; after a split it repeats only training rows",
    ),
}


def corpus_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems that prevent task=corpus from running."""
    if config.task.name != "corpus":
        return
    corpus = config.corpus
    named = list(_step_names(corpus))
    yield from named
    if not named:
        yield from _step_order(corpus)
        yield from _input_and_output(corpus)
    yield from _step_settings(config, corpus)


def _step_names(corpus: CorpusConfig) -> Iterator[ConfigError]:
    if not corpus.steps:
        yield ConfigError(
            "no step given",
            where="corpus.steps",
            expected=f"a list such as [extract,validate,split]; there are {', '.join(STEPS)}",
        )
    for name, count in Counter(corpus.steps).items():
        if name not in STEPS:
            yield ConfigError(
                "unknown step",
                where="corpus.steps",
                found=name,
                expected=expected_name(name, STEPS),
            )
        elif count > 1:
            yield ConfigError(
                f"the step {name} is listed {count} times",
                where="corpus.steps",
                found=",".join(corpus.steps),
                expected="each step once",
            )


def _step_order(corpus: CorpusConfig) -> Iterator[ConfigError]:
    if "report" in corpus.steps[:-1]:
        yield ConfigError(
            "report leaves no rows for another step",
            where="corpus.steps",
            found=",".join(corpus.steps),
            expected="report as the last step",
        )
    for place, name in enumerate(corpus.steps):
        after, why = _NOT_AFTER.get(name, (frozenset(), ""))
        wrong = [one for one in corpus.steps[:place] if one in after]
        if wrong:
            yield ConfigError(
                f"{name} cannot come after {wrong[0]}: {why}",
                where="corpus.steps",
                found=",".join(corpus.steps),
                expected="extract or generate, validate, canonical, dedupe, decontaminate, split, "
                "mix, curriculum, report in this order, without those that you do not need",
            )


def _input_and_output(corpus: CorpusConfig) -> Iterator[ConfigError]:
    begins_itself = corpus.steps[0] == "generate"
    if corpus.input is None and not begins_itself:
        yield ConfigError(
            f"nothing for the step {corpus.steps[0]} to read",
            where="corpus.input",
            expected="a directory, a file or a git checkout"
            if corpus.steps[0] == "extract"
            else "files of rows: one, a list of them, or a glob",
            remedy="add corpus.input=<path>",
        )
    named = corpus.input if isinstance(corpus.input, list) else [corpus.input]
    if corpus.input is not None and not (named and all(isinstance(one, str) for one in named)):
        yield ConfigError(
            "does not name any files",
            where="corpus.input",
            found=corpus.input,
            expected="a path, a glob, or a list of them",
        )
    if corpus.output is None:
        yield ConfigError(
            "no output directory given",
            where="corpus.output",
            expected="a directory; a second run of the same command finds there what is done",
            remedy="add corpus.output=<directory>",
        )


def _step_settings(config: RunConfig, corpus: CorpusConfig) -> Iterator[ConfigError]:
    if "extract" in corpus.steps:
        yield from _extraction(corpus)
    if "validate" in corpus.steps and corpus.validate.compile and config.sandbox.name == "none":
        yield ConfigError(
            "nothing is compiled without a sandbox",
            where="sandbox",
            found="none",
            expected="bubblewrap, because corpus.validate.compile=true",
            remedy="drop sandbox=none, or corpus.validate.compile",
        )
    if "canonical" in corpus.steps and config.sandbox.name == "none":
        yield ConfigError(
            "nothing is formatted without a sandbox",
            where="sandbox",
            found="none",
            expected="bubblewrap, because rustfmt opens the files that a source names",
            remedy="drop sandbox=none, or the step canonical",
        )
    if "mix" in corpus.steps:
        yield from _mix_step(corpus)
    split = corpus.split
    if "split" in corpus.steps and split.val_frac + split.heldout_frac >= 1:
        yield ConfigError(
            "no rows are left to train on",
            where="corpus.split.val_frac",
            found=f"val_frac {split.val_frac:g} + heldout_frac {split.heldout_frac:g}",
            expected="a sum below 1",
        )


def _extraction(corpus: CorpusConfig) -> Iterator[ConfigError]:
    languages = corpus.extract.languages
    if not languages:
        yield ConfigError(
            "nothing to extract", where="corpus.extract.languages", expected=", ".join(LANGUAGES)
        )
    for name in languages:
        if name not in LANGUAGES:
            yield ConfigError(
                "unknown language",
                where="corpus.extract.languages",
                found=name,
                expected=expected_name(name, LANGUAGES),
            )
    several = isinstance(corpus.input, list) and len(corpus.input) > 1
    if several and corpus.extract.project is not None:
        yield ConfigError(
            "one name for several projects",
            where="corpus.extract.project",
            found=f"{len(corpus.input)} inputs",
            expected="null, so that each is named by its directory",
        )


def _mix_step(corpus: CorpusConfig) -> Iterator[ConfigError]:
    mix = corpus.mix
    if not mix.weights:
        yield ConfigError(
            "no weights",
            where="corpus.mix.weights",
            expected="the weight of each source, such as {stdlib:0.7,strings:0.3}",
        )
    for name, weight in mix.weights.items():
        if not 0 < weight < float("inf"):  # false for NaN too
            yield ConfigError(
                "not a weight",
                where=f"corpus.mix.weights.{name}",
                found=weight,
                expected="a finite number above 0",
            )
    if mix.stop is MixStop.budget and mix.budget_tokens is None:
        yield ConfigError(
            "no budget to stop at",
            where="corpus.mix.budget_tokens",
            expected="a number of tokens, because corpus.mix.stop=budget",
        )
    if mix.by.value == "file" and corpus.steps[0] != "mix":
        yield ConfigError(
            "only the first step knows the files of its rows",
            where="corpus.mix.by",
            found=f"file, and mix after {corpus.steps[0]}",
            expected="category, language or project, or mix as the first step",
        )
