"""Sources of training pairs, batching, and the limits of the data contract."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from omegaconf import MISSING

from mens_exp.config.fields import TRAINING, Condition, Effect, section, setting, unless, when

_LEARNS_ENDS = dataclasses.replace(
    unless("objective.labels", "last_k", why="which learns the end of a text as it is"),
    holds=lambda config: not config.objective.spec.learns_ends,
)


_SPLIT_OFF = Condition(
    holds=lambda config: not config.data.validates_apart,
    words=lambda config: f"with data={config.data.source}, which names its rows to validate on",
    needs="a class without validation_rows",
)


@dataclass(kw_only=True, slots=True)
class ContractConfig:
    """Limits of the data-contract certificate; exceeding one ends the run with exit code 4."""

    min_supervised_frac: float = setting(
        0.01,
        "Lowest accepted share of the training tokens that are learned (a rough choice; measured: "
        "0.51 "
        "for the stdlib rows; the Vox mens trainer requires 0.1).",
        ge=0,
        lt=1,
        only_if=_LEARNS_ENDS,
    )
    max_truncation_loss_frac: float = setting(
        0.99,
        "Highest accepted share of the learned tokens that seq_len cuts off (a rough choice; "
        "measured: "
        "0.94 for the stdlib rows under experiment=smoke, 0.14 by default).",
        ge=0,
        le=1,
    )
    max_nothing_frac: float = setting(
        0.95,
        "Highest accepted share of documents with nothing left to learn (a rough choice; measured: "
        "0.47 for the stdlib rows under experiment=smoke, 0.01 by default).",
        ge=0,
        le=1,
    )
    allow_untrained_end: bool = setting(
        False,  # a model that never learns to stop is almost always a mistake
        "Accept documents in which the end marker of the answer is not learned.",
        only_if=_LEARNS_ENDS,
    )
    max_overlap_frac: float = setting(
        0.05,
        "Highest accepted share of benchmark items that have half of their 13-grams of words, or "
        "more, in one training row (a rough choice; measured: 0 for the stdlib and synthetic "
        "rows).",
        ge=0,
        le=1,
    )
    max_repeated_answer_frac: float = setting(
        0.5,
        "Highest accepted share of conversations that repeat an answer word for word "
        "(a rough choice).",
        ge=0,
        le=1,
    )
    probe: bool = setting(
        True,  # certificates are on by default
        "Try packing, the shift of labels and gradient accumulation on a few of the run's own "
        "documents before step 1 (measured: 6 s of one core for SmolLM2); nothing that is "
        "trained changes.",
    )


class RowFormat(Enum):
    """The format of a file's rows."""

    auto = "auto"
    pair = "pair"
    messages = "messages"
    alpaca = "alpaca"
    sharegpt = "sharegpt"
    text = "text"
    preference = "preference"
    unpaired = "unpaired"


# The required fields of each row format.
NEEDED_FIELDS: Final[dict[RowFormat, tuple[str, ...]]] = {
    RowFormat.pair: ("prompt", "response"),
    RowFormat.alpaca: ("prompt", "response"),
    RowFormat.messages: ("messages",),
    RowFormat.sharegpt: ("conversations",),
    RowFormat.text: ("text",),
    RowFormat.preference: ("chosen", "rejected"),
    RowFormat.unpaired: ("completion", "label"),
}


class MixStop(Enum):
    """The point at which sampling from several sources ends."""

    all_exhausted = "all_exhausted"
    first_exhausted = "first_exhausted"
    budget = "budget"


class OnBadRow(Enum):
    """The treatment of a row that cannot be used."""

    error = "error"
    quarantine = "quarantine"


class Truncation(Enum):
    """The side on which an overlong document is truncated."""

    right = "right"
    left = "left"


@dataclass(kw_only=True, slots=True)
class FilterConfig:
    """Filters on rows; null disables a filter."""

    min_rating: int | None = setting(None, "Lowest rating, 1 to 5; unrated rows pass.", ge=1, le=5)
    category: str | None = setting(
        None,
        "Text that a row's category must contain, ignoring case; rows without a category fail.",
        example="python",
    )
    exclude_category: str | None = setting(
        None,
        "Text of categories to leave out, ignoring case; rows without a category pass.",
        example="chat",
    )
    min_chars: int | None = setting(
        None, "Lowest number of characters in a row, prompts and answers together.", ge=1
    )
    max_chars: int | None = setting(
        None, "Highest number of characters in a row, prompts and answers together.", ge=1
    )
    language: str | None = setting(
        None,
        "Language of the row, ignoring case: the row's field, or else the name after a code fence "
        "(```python) in its answers; rows with neither fail.",
        example="rust",
    )


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Settings common to all sources of rows."""

    source: str = setting(
        MISSING, "Where rows come from; set by the option.", contract=("data.train_file",)
    )
    seq_len: int = setting(
        512,
        "Longest sequence, in tokens (measured: matmul attention is fastest to here).",
        ge=8,
        contract=("exec.seq_len",),
        read_by={"corpus"},
        aliases={
            "cutoff_len": "LLaMA-Factory",
            "max_seq_length": "Unsloth, older TRL and LitGPT",
            "max_seq_len": "torchtune",
            "max_length": "TRL",
            "sequence_len": "Axolotl",
        },
        label="sequence length",
    )
    micro_batch_size: int = setting(
        1,
        "Sequences in one forward pass (measured: 1 × 4 is as fast as 4 × 1, in less memory).",
        ge=1,
        contract=("exec.batch_size",),
        aliases={
            "per_device_train_batch_size": "Transformers and TRL and LLaMA-Factory",
            "micro_batch_size": "Axolotl and LitGPT",
            "batch_size": "torchtune and H2O LLM Studio",
        },
        label="micro-batch size",
    )
    packing: bool = setting(
        True,  # the value of the setting, named by its position in the schema
        "Pack several documents into one sequence, with attention inside each document only; "
        "false pads.",
        aliases={"packing": "TRL, LLaMA-Factory and Unsloth", "sample_packing": "Axolotl"},
    )
    val_frac: float = setting(
        0.05,
        "Share of the groups kept for validation.",
        gt=0,
        lt=1,
        only_if=(
            when("data.val_path", None),
            when("data.val_split", None),
            _SPLIT_OFF,
        ),
        aliases={"val_size": "LLaMA-Factory", "val_set_size": "Axolotl"},
    )
    heldout_frac: float = setting(0.05, "Share of the groups kept for the suite.", gt=0, lt=1)
    val_max_tokens: int = setting(
        8192,
        "Approximate number of tokens after which validation stops (about 7 s on two cores).",
        ge=1,
        changes=Effect.NOTHING,
        only_if=unless(
            "task.name",
            "attribute",
            needs="another task; attribute.tokens says how many tokens it measures on",
        ),
    )
    truncation: Truncation | None = setting(
        None,
        "Side on which a document longer than seq_len loses tokens; left keeps the newest turns, "
        "and a begin-of-sequence token before them. null: left under objective=last_k, whose "
        "tokens are the last ones, else right.",
        read_by={"corpus"},
    )
    show: int = setting(
        0,
        "Training rows that task=plan shows token by token; 0 shows none (plan).",
        ge=0,
        changes=Effect.NOTHING,
        only_if=when(
            "task.name",
            "plan",
            needs="task=plan, which shows rows",
            remedy="add task=plan, or drop data.show",
        ),
    )
    filter: FilterConfig = section(FilterConfig, "Filter of the rows, before the split.")
    contract: ContractConfig = section(
        ContractConfig,
        "Checks of the rows before step 1.",
        changes=Effect.NOTHING,  # its limits refuse a run
        only_if=when("task.name", *sorted(TRAINING)),
    )

    @property
    def validates_apart(self) -> bool:
        """Whether a user's class provides separate validation rows."""
        return False


@dataclass(kw_only=True, slots=True)
class StdlibData(DataConfig):
    """Documented functions of the standard library of the running interpreter."""

    source: str = "stdlib"


@dataclass(kw_only=True, slots=True)
class SyntheticData(DataConfig):
    """Python programming tasks with verified solutions, generated from a seed."""

    source: str = "synthetic"
    rows: int = setting(
        2000, "Rows of all three sides together, all different (about a thousand a second).", ge=10
    )
    repair_frac: float = setting(
        0.25,
        "Share of rows that ask to repair a broken program (a rough choice).",
        ge=0,
        le=1,
    )
    generator_seed: int = setting(
        0, "Seed of the rows, apart from the run's seed, so that runs of any seed share them.", ge=0
    )
    val_frac: float = setting(
        0.05, "Share of the rows that come from validation families.", gt=0, lt=1
    )
    heldout_frac: float = setting(
        0.05, "Share of the rows that come from benchmark families.", gt=0, lt=1
    )

    def rows_by_side(self) -> tuple[int, int, int]:
        """Return the number of training, validation and held-out rows.

        Each share is rounded and is at least one row; train gets the rest, which may be zero.
        """
        val, heldout = (
            max(1, round(self.rows * share)) for share in (self.val_frac, self.heldout_frac)
        )
        return max(self.rows - val - heldout, 0), val, heldout


@dataclass(kw_only=True, slots=True)
class ColumnsConfig:
    """The file's column for each field; null omits the field."""

    prompt: str | None = setting(None, "Column of the user's turn.", example="question")
    input: str | None = setting(
        None, "Column of the input of an instruction, as in Alpaca.", example="context"
    )
    response: str | None = setting(None, "Column of the assistant's turn.", example="answer")
    messages: str | None = setting(
        None, "Column of a list of turns with role and content.", example="turns"
    )
    conversations: str | None = setting(
        None, "Column of a list of turns with from and value.", example="dialogue"
    )
    text: str | None = setting(
        None, "Column of a plain text, trained on as a whole.", example="content"
    )
    chosen: str | None = setting(
        None, "Column of the better of two answers, or its conversation.", example="preferred"
    )
    rejected: str | None = setting(
        None, "Column of the worse of two answers, or its conversation.", example="dispreferred"
    )
    completion: str | None = setting(
        None, "Column of an answer that has a label, or its turns.", example="answer"
    )
    label: str | None = setting(
        None,
        "Column of the label of an answer: true if it is wanted, else false.",
        example="thumbs_up",
    )
    tools: str | None = setting(
        None, "Column of the available tools: a list of functions.", example="functions"
    )
    system: str | None = setting(None, "Column of the system prompt.", example="system_prompt")
    rating: str | None = setting(None, "Column of a rating from 1 to 5.", example="score")
    category: str | None = setting(None, "Column of a free tag.", example="topic")
    language: str | None = setting(
        None, "Column of the language that an answer is written in.", example="lang"
    )
    group: str | None = setting(
        None, "Column of the group that must stay on one side of the split.", example="source_id"
    )
    difficulty: str | None = setting(None, "Column of a difficulty from 1 to 10.", example="level")
    fields: dict[str, str] = setting(
        {},
        "Columns of further fields that the objective reads, by the fields' names.",
        example="{score:quality}",
    )

    @property
    def given(self) -> dict[str, str]:
        """The configured columns by field; keys of additional fields begin with `fields.`."""
        fields = [one.name for one in dataclasses.fields(self) if one.name != "fields"]
        own = {name: column for name in fields if (column := getattr(self, name)) is not None}
        return own | {f"fields.{name}": column for name, column in self.fields.items()}


@dataclass(kw_only=True, slots=True)
class WrittenData(DataConfig):
    """Rows from an external source, some of which may be malformed."""

    on_bad_row: OnBadRow = setting(
        OnBadRow.error,
        "Handling of rows that cannot be used. error: stop; quarantine: write them to the run's "
        "quarantine.jsonl with their place and the reason, and continue.",
    )
    max_bad_frac: float = setting(
        0.01,
        "Share of bad rows above which quarantine is an error too (a rough choice).",
        gt=0,
        lt=1,
        changes=Effect.NOTHING,
        only_if=when("data.on_bad_row", "quarantine"),
    )


@dataclass(kw_only=True, slots=True)
class RowsData(WrittenData):
    """Rows of any supported format from a single source."""

    format: RowFormat = setting(
        RowFormat.auto,
        "How rows are written: pair (prompt, response), messages, alpaca, sharegpt; text, which is "
        "learned as a whole; preference (prompt, chosen, rejected); or unpaired (prompt, "
        "completion, label); auto: detected for each file.",
    )
    group_column: str | None = setting(
        None,
        "Column to split by: rows with the same value stay on one side of the split. null: the "
        "row's group, or else its prompt or plain text.",
        example="source_id",
    )
    columns: ColumnsConfig = section(
        ColumnsConfig,
        "Columns of files with other names, such as {prompt:question,response:answer}; columns "
        "that are not named are ignored, and a note lists them.",
    )
    streaming: bool = setting(
        False,  # the value of the setting, named by its position in the schema
        "Read rows while training, for corpora larger than memory and disk. Rows to validate on "
        "and to hold out are those of the first shuffle_buffer rows. Later rows of these sides, a "
        "share of val_frac + heldout_frac, are left out, so that no group is on two sides; with "
        "rows to validate on of their own (val_path, val_split), only heldout_frac counts. Needs "
        "trainer.max_steps; bad rows behind the first ones are only counted.",
    )
    shuffle_buffer: int = setting(
        10_000,
        "Rows that are in memory together under streaming=true: they are shuffled and packed among "
        "themselves, in the order of the files (measured: 10,000 fill 0.04 % less of the room than "
        "all at once).",
        ge=1,
        only_if=when(
            "data.streaming",
            True,
            needs="data.streaming=true; otherwise all rows are shuffled and packed together",
        ),
    )


@dataclass(kw_only=True, slots=True)
class JsonlData(RowsData):
    """Rows from files: JSON lines, JSON arrays or tables, optionally compressed."""

    source: str = "jsonl"
    path: Any = setting(
        MISSING,
        "Files of rows: one file, a list of them, or a glob (rows/*.jsonl). By their names: "
        ".jsonl, .json and .csv, also with .gz or .zst, .parquet and .arrow. A line holds at most "
        "64 MiB.",
        contract=("data.train_file",),
        example="rows.jsonl",
    )
    val_path: Any = setting(
        None,
        "Files of validation rows, written like path; then no row of path is used for validation, "
        "and heldout_frac still holds out rows of path. null: val_frac of path.",
        example="validation.jsonl",
    )


@dataclass(kw_only=True, slots=True)
class HubData(RowsData):
    """Rows from a Hub dataset; unless streamed, it is downloaded in full, also by task=plan."""

    source: str = "hub"
    id: str = setting(
        MISSING,
        "Id of the dataset, such as HuggingFaceH4/no_robots.",
        example="HuggingFaceH4/no_robots",
    )
    revision: str | None = setting(
        None,
        "Branch, tag or commit; recorded as a commit when the run starts. null: main.",
        example="main",
    )
    subset: str | None = setting(
        None, "Subset (configuration) of the dataset, if it has any.", example="default"
    )
    split: str = setting(
        "train", "Split to read, also a part of one: train[:1000].", example="'train[:1000]'"
    )
    val_split: str | None = setting(
        None,
        "Validation split; then no row of split is used for validation. null: val_frac of split.",
        example="test",
    )


@dataclass(kw_only=True, slots=True)
class MixData(WrittenData):
    """Weighted mix of several sources: training rows are sampled, the other sides unchanged."""

    source: str = "mix"
    sources: Any = setting(
        MISSING,
        "List of sources: {path:a.jsonl,weight:0.7}, {id:lab/rows,weight:0.2} or "
        "{source:stdlib,weight:0.1}, with format, columns, filter and other settings of that "
        "option. Weights are shares of the rows; only their ratios count. name appears in the "
        "record.",
        example="'[{path:a.jsonl,weight:0.7},{source:stdlib,weight:0.3}]'",
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
        only_if=when("data.stop", "budget"),
        idle=None,
    )
    mix_seed: int = setting(
        0,
        "Seed of the order in which rows of a source are drawn; not the run's seed, so that arms "
        "share rows.",
        ge=0,
    )
