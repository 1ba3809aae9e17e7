from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest

from mens_exp.artifacts import atomic
from mens_exp.artifacts.data_contract import StoredReference
from mens_exp.config.data import ContractConfig
from mens_exp.corpus import contract_rules
from mens_exp.rows.documents import Labelling

LIMITS = ContractConfig()
LABELLING = Labelling(objective="assistant", seq_len=512)
ROLES = {"system": 0, "user": 30, "assistant": 50, "end_marker": 10, "template": 10}
TOKENS = {
    "documents": 10,
    "tokens": 100,
    "trained_tokens": 60,
    "trained_frac": 0.6,
    "tokens_by_role": ROLES,
    "trained_by_role": {**ROLES, "user": 0, "template": 0},
    "end_marker_trained": True,
    "ends": 10,
    "ends_trained": 10,
    "end_marker_trained_frac": 1.0,
    "answer_tokens_missed": 0,
    "trained_tokens_lost": 0,
    "trained_tokens_lost_frac": 0.0,
    "nothing_to_learn": 0,
    "nothing_to_learn_frac": 0.0,
    "longest": 512,
    "truncated": 0,
}
ROWS = {
    "groups_on_two_sides": [],
    "rows_on_two_sides": 0,
    "conversations": 10,
    "repeated_answers": 5,
    "prompts_checked": 16,
    "prompts_otherwise": 0,
    "mix_off": 2.0,
}
OVERLAP = {
    "against": "the held-out rows",
    "items": 100,
    "ngram_words": 13,
    "sharing": 20,
    "contained": 5,
    "contained_frac": 0.05,
    "rows_sharing": 40,
    "worst": [{"row": "r", "item": "i", "shared": 9, "share": 0.9}],
}
PROBE = {
    "documents": 4,
    "tokens": 256,
    "packed": True,
    "dropout": "off while probing",
    "tolerance": 0.05,
    "targets_follow": True,
    "as_asked": [],
    "together_loss": 0.05,
    "together_hidden": 0.05,
    "together_gradient": 0.05,
    "peek": 0.05,
    "accumulation_documents": 4,
    "accumulation_loss": 0.05,
    "accumulation_gradient": 0.05,
    "parameters_compared": 100,
    "reference": {
        "loss": 1e-4,
        "gradient": 1e-3,
        "parameters": 100,
        "loss_tolerance": 1e-4,
        "gradient_tolerance": 1e-3,
        "seconds": 0.1,
        "from_cache": False,
    },
    "reference_unknown": None,
    "seconds": 1.0,
}


@pytest.mark.parametrize("limits", [LIMITS, ContractConfig(min_supervised_frac=0.6)])
def test_what_is_at_its_limit_passes(limits):
    """Only values beyond a limit are refused."""
    assert not list(contract_rules.of_tokens(TOKENS, limits, LABELLING))
    assert not list(contract_rules.of_rows(ROWS, limits))
    assert not list(contract_rules.of_overlap(OVERLAP, limits))
    assert not list(contract_rules.of_probe(PROBE))


@pytest.mark.parametrize(
    ("change", "where", "setting"),
    [
        ({"trained_frac": 0.009}, "data.contract.min_supervised_frac", {"min_supervised_frac": 0}),
        (
            {"trained_tokens_lost_frac": 0.991},
            "data.contract.max_truncation_loss_frac",
            {"max_truncation_loss_frac": 1},
        ),
        (
            {"nothing_to_learn_frac": 0.951},
            "data.contract.max_nothing_frac",
            {"max_nothing_frac": 1},
        ),
        ({"ends_trained": 9}, "data.contract.allow_untrained_end", {"allow_untrained_end": True}),
        ({"longest": 513}, "data.seq_len", {}),
        ({"answer_tokens_missed": 1}, "objective.labels", {}),
        ({"trained_by_role": {**ROLES, "user": 1}}, "objective.labels", {}),
    ],
)
def test_each_fault_of_the_tokens_is_refused_and_its_setting_allows_it(change, where, setting):
    """The exit code is 4, with a remedy; a fault that no setting allows is a bug."""
    part = {**TOKENS, **change}
    (error,) = contract_rules.of_tokens(part, LIMITS, LABELLING)
    assert (error.where, error.exit_code) == (where, 4)
    assert error.remedy
    if setting:
        allowed = dataclasses.replace(LIMITS, **setting)
        assert not list(contract_rules.of_tokens(part, allowed, LABELLING))


def test_a_few_last_tokens_are_no_fault_of_last_k():
    """last_k supervises few tokens by design and adds no end marker."""
    part = {**TOKENS, "trained_frac": 0.001, "ends_trained": 0, "answer_tokens_missed": 40}
    last = dataclasses.replace(LABELLING, objective="last_k")
    assert not list(contract_rules.of_tokens(part, LIMITS, last))
    assert not list(contract_rules.notes_of_tokens({**part, "ends": 0}, last))


def test_unknown_roles_refuse_nothing():
    """An unknown value is null with a reason, and is not compared."""
    names = ("tokens_by_role", "trained_by_role", "ends", "ends_trained", "answer_tokens_missed")
    part = {**TOKENS, **dict.fromkeys(names), "end_marker_trained": None}
    assert not list(contract_rules.of_tokens(part, LIMITS, LABELLING))
    assert not list(contract_rules.notes_of_tokens(part, LABELLING))


def test_documents_that_are_all_cut_are_noted():
    """Such documents have no end marker to learn."""
    part = {**TOKENS, "ends": 0, "ends_trained": 0, "end_marker_trained": False}
    assert not list(contract_rules.of_tokens(part, LIMITS, LABELLING))
    (note,) = contract_rules.notes_of_tokens(part, LABELLING)
    assert "will not learn to stop" in note


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"groups_on_two_sides": ["a.py"]}, "rows of one group"),
        ({"rows_on_two_sides": 1}, "rows are in both training and evaluation"),
        ({"repeated_answers": 6}, "repeat the same answer"),
        ({"prompts_otherwise": 1}, "evaluation would use another prompt"),
        ({"mix_off": 2.1}, "does not have its share"),
    ],
)
def test_each_fault_of_the_rows_is_refused(change, what):
    """Each fault gives exactly one error."""
    part = {**ROWS, **change}
    (error,) = contract_rules.of_rows(part, LIMITS)
    assert what in error.what


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"as_asked": ["packed: True"]}, "does not match the settings"),
        ({"targets_follow": False}, "not the tokens that follow"),
        ({"peek": 0.051}, "depends on the token"),
        ({"together_loss": 0.051}, "not kept apart"),
        ({"together_hidden": 0.051}, "not kept apart"),
        ({"together_gradient": 0.051}, "not kept apart"),
        ({"accumulation_loss": 0.051}, "not equal one batch"),
        ({"accumulation_gradient": 0.051}, "not equal one batch"),
        ({"reference": PROBE["reference"] | {"loss": 1.1e-4}}, "the loss is not the one"),
        ({"reference": PROBE["reference"] | {"loss": math.nan}}, "the loss is not the one"),
        ({"reference": PROBE["reference"] | {"gradient": 1.1e-3}}, "the gradient is not the one"),
    ],
)
def test_each_fault_of_the_probe_is_refused(change, what):
    """A difference above the tolerance is refused; one at the tolerance is rounding."""
    part = {**PROBE, **change}
    (error,) = contract_rules.of_probe(part)
    assert what in error.what


@pytest.mark.parametrize(
    ("packed", "remedy"), [(True, "set data.packing=false"), (False, "report this")]
)
def test_no_setting_is_advised_that_is_set(packed, remedy):
    """Without packing, documents that interact are a bug in the model's code."""
    (error,) = contract_rules.of_probe({**PROBE, "packed": packed, "together_loss": 0.06})
    assert (error.remedy or "").startswith(remedy)


def test_an_overlap_names_the_worst_row():
    """The message gives the row with the largest share."""
    part = {**OVERLAP, "contained_frac": 0.06}
    (error,) = contract_rules.of_overlap(part, LIMITS)
    assert "row r has 90% of item i" in str(error.found)


def test_a_cached_comparison_takes_the_place_of_what_a_killed_writer_left(tmp_path):
    """Writing an entry removes temporary files of dead writers, also those of other entries."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    left = tmp_path / f".other.json.{atomic._machine()}-{gone.pid}-00000000.tmp"
    left.write_text("{")
    part = {"loss": 0.0, "gradient": 0.0, "parameters": 1, "loss_tolerance": 1e-4}
    part |= {"gradient_tolerance": 1e-3, "seconds": 0.1, "from_cache": False}
    assert StoredReference(part=part).keep(tmp_path / "mine.json") is None
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]
    assert StoredReference.read(tmp_path / "mine.json").part == part
