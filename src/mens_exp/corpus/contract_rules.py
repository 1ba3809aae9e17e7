"""The limits of the data contract; each violation states the value and the remedy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mens_exp.errors import GateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.artifacts.data_contract import (
        OverlapPart,
        ProbePart,
        ReferencePart,
        RowsPart,
        TokenPart,
    )
    from mens_exp.config.data import ContractConfig
    from mens_exp.rows.documents import Labelling

_SETTINGS = "data.contract"
_MOST_OFF = 2  # rows a source may miss its share by; a token budget ends between two rows
_SHOW = "look at task=plan data.show=3"


def of_tokens(part: TokenPart, limits: ContractConfig, labelling: Labelling) -> Iterator[GateError]:
    """Yield violations in the training documents."""
    rows = labelling.rows
    ends = rows.as_rendered  # supervises few tokens by design and adds no end marker
    if part["trained_frac"] < limits.min_supervised_frac and not ends:
        yield GateError(
            "too few tokens are learned",
            where=f"{_SETTINGS}.min_supervised_frac",
            found=f"{part['trained_tokens']} of {part['tokens']} tokens "
            f"({part['trained_frac']:.2%})",
            expected=f"at least {limits.min_supervised_frac:.2%}",
            remedy=f"{_SHOW}; shorten the prompts, or lower the limit",
        )
    if part["trained_tokens_lost_frac"] > limits.max_truncation_loss_frac:
        yield GateError(
            "the sequence length cuts off what is to be learned",
            where=f"{_SETTINGS}.max_truncation_loss_frac",
            found=f"{part['trained_tokens_lost']} learned tokens lost "
            f"({part['trained_tokens_lost_frac']:.2%})",
            expected=f"at most {limits.max_truncation_loss_frac:.2%}",
            remedy="raise data.seq_len, or the limit",
        )
    if part["nothing_to_learn_frac"] > limits.max_nothing_frac:
        yield GateError(
            "too many documents have nothing to learn",
            where=f"{_SETTINGS}.max_nothing_frac",
            found=f"{part['nothing_to_learn']} ({part['nothing_to_learn_frac']:.2%})",
            expected=f"at most {limits.max_nothing_frac:.2%}",
            remedy="raise data.seq_len, or the limit",
        )
    if part["longest"] > labelling.seq_len:
        yield GateError(
            "a document is longer than was asked for",
            where="data.seq_len",
            found=part["longest"],
            expected=f"at most {labelling.seq_len} tokens",
            remedy="report this: the sequence length has not reached the encoding",
        )
    untrained = (part["ends"] or 0) - (part["ends_trained"] or 0)
    if untrained and not limits.allow_untrained_end and not ends:
        yield GateError(
            "the end of an answer is not learned, so the model would not stop",
            where=f"{_SETTINGS}.allow_untrained_end",
            found=f"{part['ends_trained']} of {part['ends']} end markers within the limit",
            expected="every one",
            remedy=f"{_SHOW}, and report it; or allow it",
        )
    if part["answer_tokens_missed"] and not ends:
        yield GateError(
            "parts of answers are not learned",
            where="objective.labels",
            found=f"{part['answer_tokens_missed']} tokens of the documents' last answers",
            expected="every token of an answer that is within the limit",
            remedy=f"{_SHOW}, and report it: the masks do not match the answers",
        )
    foreign = _foreign(part)
    if rows.only_answers and foreign:
        yield GateError(
            "text of the user or the system is learned as an answer",
            where="objective.labels",
            found=f"{foreign} tokens",
            expected="assistant texts and their end markers alone",
            remedy="report this: the masks do not match the answers",
        )


def notes_of_tokens(part: TokenPart, labelling: Labelling) -> Iterator[str]:
    """Yield notes, which do not refuse the run."""
    if not labelling.rows.as_rendered and part["ends"] == 0:
        yield (
            f"no document's answer ends within data.seq_len={labelling.seq_len}: "
            "no end marker is learned, and the model will not learn to stop"
        )


def _foreign(part: TokenPart) -> int:
    trained = part["trained_by_role"] or {}
    return trained.get("user", 0) + trained.get("system", 0)


def of_rows(part: RowsPart, limits: ContractConfig) -> Iterator[GateError]:
    """Yield violations in the rows."""
    if part["groups_on_two_sides"]:
        yield GateError(
            "rows of one group are in both training and evaluation",
            where="data",
            found=", ".join(part["groups_on_two_sides"]),
            expected="each source on one side of the split",
            remedy="report this, or take the rows out of one of the two files",
        )
    if part["rows_on_two_sides"]:
        yield GateError(
            "rows are in both training and evaluation",
            where="data",
            found=part["rows_on_two_sides"],
            expected="none",
            remedy="drop duplicates, or data.group_column if it puts equal rows into groups",
        )
    many, again = part["conversations"], part["repeated_answers"]
    if many and again / many > limits.max_repeated_answer_frac:
        yield GateError(
            "conversations repeat the same answer",
            where=f"{_SETTINGS}.max_repeated_answer_frac",
            found=f"{again} of {many} conversations ({again / many:.2%})",
            expected=f"at most {limits.max_repeated_answer_frac:.2%}",
            remedy="fix the source of the rows, or raise the limit",
        )
    if part["prompts_otherwise"]:
        yield GateError(
            "evaluation would use another prompt than training",
            where="tokenizer.chat_template",
            found=f"{part['prompts_otherwise']} of {part['prompts_checked']} prompts differ",
            expected="the same ids before an answer",
            remedy="report this with the chat template: training and evaluation share one",
        )
    off = part["mix_off"]
    if off is not None and off > _MOST_OFF:
        yield GateError(
            "a source of the mix does not have its share",
            where="data.sources",
            found=f"{off:g} rows off",
            expected="each source's exact share, to the row",
            remedy="report this with the sources and their weights",
        )


def notes_of_overlap(part: OverlapPart, limits: ContractConfig) -> Iterator[str]:
    """Yield a note on an overlap with rows that the run does not score."""
    if part["contained_frac"] > limits.max_overlap_frac:
        yield (
            f"{part['contained']} of {part['items']} items of {part['against']} have half of their "
            "text or more in a training row: a suite that scores by them would measure memory too"
        )


def of_overlap(part: OverlapPart, limits: ContractConfig) -> Iterator[GateError]:
    """Yield violations of the limit on overlap with scored items."""
    if part["contained_frac"] > limits.max_overlap_frac:
        worst = part["worst"][0]
        yield GateError(
            "training rows contain items of the suite",
            where=f"{_SETTINGS}.max_overlap_frac",
            found=f"{part['contained']} of {part['items']} items of {part['against']}, row "
            f"{worst['row']} has {worst['share']:.0%} of item {worst['item']}",
            expected=f"at most {limits.max_overlap_frac:.2%} of the items",
            remedy="drop the rows (the corpus step decontaminate does), or allow it: "
            f"{_SETTINGS}.max_overlap_frac={_ceiled(part['contained_frac'])}",
        )


def _ceiled(frac: float) -> float:
    """Return a fraction rounded up to a full percent, as a limit that admits it."""
    return math.ceil(frac * 100) / 100


def of_probe(part: ProbePart) -> Iterator[GateError]:
    """Yield failures of the probes that run before step 1."""
    limit = part["tolerance"]
    expected = f"at most {limit:g}"
    report = "report this with the model and the backend"
    for what in part["as_asked"]:
        yield GateError(
            "the first batch does not match the settings",
            where="data",
            found=what,
            remedy="report this: a setting has not reached the batches",
        )
    if not part["targets_follow"]:
        yield GateError(
            "labels are not the tokens that follow",
            where="the first batch",
            expected="at each position the next token of the same document",
            remedy=report,
        )
    if (part["peek"] or 0.0) > limit:
        yield GateError(
            "the loss depends on the token that it predicts",
            where="objective",
            found=f"another last token moves it, or what it is made of, by {part['peek']:.2%}",
            expected=expected,
            remedy=f"{report}: labels are not shifted by one",
        )
    yield from _of_reference(part["reference"])
    together = max(
        part[name] or 0.0 for name in ("together_loss", "together_hidden", "together_gradient")
    )
    if together > limit:
        yield GateError(
            "documents of one batch are not kept apart",
            where="data.packing",
            found=f"alone they differ by {together:.2%}",
            expected=expected,
            remedy="set data.packing=false" if part["packed"] else report,
        )
    uneven = max(part["accumulation_loss"] or 0.0, part["accumulation_gradient"] or 0.0)
    if uneven > limit:
        yield GateError(
            "accumulated micro-batches do not equal one batch",
            where="trainer.accumulate_grad_batches",
            found=f"loss or gradients differ by {uneven:.2%}",
            expected=expected,
            remedy=f"set trainer.accumulate_grad_batches=1; {report}",
        )


def _of_reference(part: ReferencePart | None) -> Iterator[GateError]:
    if part is None:
        return
    for name, found, limit in (
        ("loss", part["loss"], part["loss_tolerance"]),
        ("gradient", part["gradient"], part["gradient_tolerance"]),
    ):
        if not found <= limit:
            yield GateError(
                f"the {name} is not the one that transformers computes for this model",
                where="model",
                found=f"it differs by {found:.2g}, relative, in f32",
                expected=f"at most {limit:g}",
                remedy="report this with the model's config.json; nothing was trained",
            )
