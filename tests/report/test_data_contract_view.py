from __future__ import annotations

import copy

from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.report import plan_view, sections, terminal, write
from mens_exp.report.summary import Records

NODE = {
    "format": "mens_exp_data_contract",
    "version": 1,
    "limits": {},
    "tokens": {
        "documents": 10,
        "tokens": 2000,
        "trained_tokens": 500,
        "trained_frac": 0.25,
        "tokens_by_role": {"template": 100, "system": 0, "user": 1400, "assistant": 490}
        | {"end_marker": 10},
        "trained_by_role": {"template": 0, "system": 0, "user": 0, "assistant": 490}
        | {"end_marker": 10},
        "end_marker_trained": True,
        "ends": 9,
        "ends_trained": 9,
        "end_marker_trained_frac": 0.9,
        "answer_tokens_missed": 0,
        "trained_tokens_lost": 125,
        "trained_tokens_lost_frac": 0.2,
        "nothing_to_learn": 1,
        "nothing_to_learn_frac": 0.0909,
        "longest": 512,
        "truncated": 2,
    },
    "rows": {
        "groups_on_two_sides": [],
        "rows_on_two_sides": 0,
        "conversations": 4,
        "repeated_answers": 1,
        "prompts_checked": 16,
        "prompts_otherwise": 0,
        "mix_off": None,
    },
    "overlap": [
        {
            "against": "the held-out rows",
            "items": 163,
            "ngram_words": 13,
            "sharing": 14,
            "contained": 0,
            "contained_frac": 0.0,
            "rows_sharing": 16,
            "worst": [],
        }
    ],
    "probe": {
        "documents": 4,
        "tokens": 256,
        "packed": True,
        "dropout": "off while probing",
        "tolerance": 0.05,
        "targets_follow": True,
        "as_asked": [],
        "together_loss": 0.0,
        "together_hidden": 0.001,
        "peek": 0.0,
        "accumulation_documents": 4,
        "accumulation_loss": 1e-8,
        "accumulation_gradient": 0.002,
        "parameters_compared": 100,
        "seconds": 1.25,
    },
    "violations": [],
    "unknown": {},
}


def records(node):
    manifest = Manifest(
        run_id="r",
        task="train",
        started_utc="2026-11-20T05:58:01.123Z",
        config_digest="ab" * 32,
        seed=1,
        data_contract=node,
    )
    return Records(manifest=manifest)


def told(node):
    cells = sections.contract_cells(node)
    return {cell.label: cell.text or f"unknown: {cell.absent}" for cell in cells}


def test_figures_are_told_in_words():
    """Each figure is one line."""
    found = told(NODE)
    assert found["tokens by role"] == (
        "template 100, system 0, user 1,400, assistant 490, end marker 10"
    )
    assert found["trained share"] == "25.0% of 2,000 tokens"
    assert found["end marker trained"] == "yes, 9 of 9 within the limit, 90.0% of the documents"
    assert found["lost to truncation"] == "125 tokens (20.0%)"
    assert found["repeated answers"] == "1 of 4 conversations"
    assert found["overlap with the held-out rows"] == (
        "0 of 163 items are half or more in one row; 14 share a 13-gram of words with 16 rows"
    )
    assert found["labels shifted by one"] == "yes; moved 0.0e+00 by a last token"
    assert found["batch against micro-batches"] == "loss 1.0e-08, gradient 2.0e-03 (relative)"


def test_what_is_unknown_has_its_reason():
    """Cases are unknown roles, a disabled probe and an overlap with nothing."""
    node = copy.deepcopy(NODE)
    node["tokens"] |= {"tokens_by_role": None, "trained_by_role": None, "end_marker_trained": None}
    node["probe"], node["overlap"] = None, []
    names = ("tokens.tokens_by_role", "tokens.trained_by_role", "tokens.end_marker_trained")
    node["unknown"] = dict.fromkeys(names, "no template") | {"probe": "off", "overlap": "none"}
    found = told(node)
    for label in ("tokens by role", "trained", "end marker trained"):
        assert found[label] == "unknown: no template"
    assert (found["probe"], found["overlap"]) == ("unknown: off", "unknown: none")


def test_the_report_has_the_certificate_and_what_it_refused():
    """A run without a certificate has no such section."""
    refused = records({**NODE, "violations": ["data.seq_len: <b>"]})
    refused.manifest.status = Status.FAILED
    page = write.render_page(refused)
    assert "Data contract" in page
    assert "data.seq_len: &lt;b&gt;" in page
    assert '<h2 class="bad">Can I trust it?' in page
    assert "The <a" not in page.partition("Can I trust it?")[2].partition("What did it cost")[0]
    assert "Data contract" not in write.render_page(records(None))


def test_a_plan_tells_the_token_part_alone():
    """The plan shows it as the report does."""
    plan = {"data": {"source": "jsonl", "exact": True}}
    plan["data"]["contract"] = {"tokens": NODE["tokens"], "unknown": {}}
    shown = "\n".join(
        line.plain for line in terminal.lines(plan_view.document(plan).parts, 120, is_plain=False)
    )
    for cell in sections.token_cells(NODE["tokens"], {}):
        assert f"{cell.label}: {cell.text}" in shown
    assert "longest: 512 tokens; 2 of 11 documents over the limit" in shown
    assert "labels shifted" not in shown
