"""Rules for the steps of task=corpus: their order and their settings."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from mens_exp.config.corpus import LANGUAGES, STEPS, CorpusConfig
from mens_exp.config.data import MixStop
from mens_exp.errors import ConfigError, expected_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

# Step -> the steps that cannot precede it, and why.
_NOT_AFTER: Final[dict[str, tuple[frozenset[str], str]]] = {
    "extract": (frozenset(STEPS), "it reads source files, and no rows of another step"),
    "generate": (
        frozenset({"mix", "split", "curriculum"}),
        "its rows would be of no share, no side and no place in the order",
    ),
    "canonical": (
        frozenset({"dedupe", "mix"}),
        "rows that differ in layout alone would stay",
    ),
    "dedupe": (frozenset({"mix"}), "it would take away what mix repeats, and the shares with it"),
    "decontaminate": (
        frozenset({"mix"}),
        "it would take away drawn rows, and the shares with them",
    ),
    "mix": (frozenset({"curriculum"}), "it draws rows in an order of its own"),
    "split": (
        frozenset({"mix"}),
        "mix repeats rows; after a split it repeats rows to train on alone",
    ),
}


def corpus_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems that prevent task=corpus from running."""
    if config.task.name != "corpus":
        return
    corpus = config.corpus
    named = list(_names(corpus))
    yield from named
    if not named:
        yield from _order(corpus)
        yield from _places(corpus)
    yield from _settings(config, corpus)


def _names(corpus: CorpusConfig) -> Iterator[ConfigError]:
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


def _order(corpus: CorpusConfig) -> Iterator[ConfigError]:
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
                "mix, curriculum, report in this order, less those that are not wanted",
            )


def _places(corpus: CorpusConfig) -> Iterator[ConfigError]:
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


def _settings(config: RunConfig, corpus: CorpusConfig) -> Iterator[ConfigError]:
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
        yield from _mix(corpus)
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


def _mix(corpus: CorpusConfig) -> Iterator[ConfigError]:
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
