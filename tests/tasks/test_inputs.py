from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.model import HfModel
from mens_exp.corpus.row_files import Rows
from mens_exp.errors import Problems, RequestError
from mens_exp.planning.contract import origin_of
from mens_exp.rows.readers import BadRow
from mens_exp.tasks.inputs import keep_bad_rows, note_origin, refuse_changed

RECORDED = {
    "base_model": "tiny_llama",
    "base_weights_sha256": "aa",
    "data": {"rows_sha256": "bb", "train_rows": 3},
}


def test_equal_hashes_pass_whatever_the_names():
    """A renamed model directory with the same weights is the same model."""
    refuse_changed(RECORDED, {**RECORDED, "base_model": "moved"})


def test_a_new_run_has_nothing_to_compare():
    """A new run has an empty record, and an input without a hash proves nothing."""
    refuse_changed({}, RECORDED)
    refuse_changed(RECORDED, {})


def test_another_hash_is_refused_by_its_dotted_name():
    """The message names the input by its dotted key and has both hashes."""
    now = {**RECORDED, "data": {"rows_sha256": "cc", "train_rows": 3}}
    with pytest.raises(RequestError, match=r"inputs\.data\.rows_sha256.*found cc.*expected bb"):
        refuse_changed(RECORDED, now)


def test_all_changes_are_reported_together():
    """Two changed hashes are reported as two problems."""
    now = {"base_weights_sha256": "xx", "data": {"rows_sha256": "yy"}}
    with pytest.raises(Problems) as caught:
        refuse_changed(RECORDED, now)
    assert [problem.where for problem in caught.value.problems] == [
        "inputs.base_weights_sha256",
        "inputs.data.rows_sha256",
    ]


def test_card_that_was_fetched_tells_the_origin(cell, tiny_base, tmp_path):
    """The origin is unknown when the run opens; the fetched card gives it and removes the note."""
    config = copy.deepcopy(cell.config)
    manifest = Manifest(
        run_id="r",
        task="train",
        started_utc="",
        config_digest="",
        seed=1,
        contract={"provenance": {}},
        unknown={"contract.provenance.license_class": "not yet", "results.x": "another"},
    )
    note_origin(config, manifest)
    assert manifest.contract == {"provenance": dataclasses.asdict(origin_of(config))}
    assert "contract.provenance.license_class" in manifest.unknown  # random weights have none

    directory = Path(shutil.copytree(tiny_base.directory, tmp_path / "base"))
    (directory / "README.md").write_text("---\nlicense: mit\n---\n", "utf-8")
    config.model = HfModel(id=str(directory))
    note_origin(config, manifest)
    assert manifest.contract["provenance"]["license_class"] == "mit"
    assert manifest.contract["provenance"]["attribution_required"] is True
    assert manifest.unknown == {"results.x": "another"}


def test_bad_rows_are_kept_in_the_run_where_there_are_any(tmp_path):
    """Only a run that met bad rows has a file of them."""
    run = RunDir(tmp_path)
    good = Rows(source="jsonl", train=[], val=[], heldout=[], sha256="aa")
    keep_bad_rows(run, good)
    assert not run.quarantine.exists()
    bad = BadRow(file="a.jsonl", line=3, raw="no", problems=("not JSON",), reasons=("not JSON",))
    keep_bad_rows(run, dataclasses.replace(good, bad=(bad,)))
    assert json.loads(run.quarantine.read_text("utf-8")) == {
        "file": "a.jsonl",
        "line": 3,
        "problems": ["not JSON"],
        "raw": "no",
    }
