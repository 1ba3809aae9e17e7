from __future__ import annotations

import gzip
import json

import pytest
from transformers import AutoTokenizer

from mens_exp.corpus import stdlib
from mens_exp.planning import estimate, token_estimate
from mens_exp.planning.token_estimate import count_tokens


@pytest.fixture
def path(tmp_path):
    """A file of 400 rows of equal length."""
    rows = [{"prompt": f"row {i:03}", "response": "x" * 40} for i in range(400)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture
def counted(tiny_config, tmp_path):
    """Count the tokens of the rows in a file, with an empty cache."""

    def count(file, *overrides):
        config = tiny_config("data=jsonl", f"data.path={file}", "data.val_frac=0.2", *overrides)
        return count_tokens(config, tmp_path / "cache")

    return count


STREAMED = ["data.streaming=true", "data.shuffle_buffer=100"]


def test_streamed_rows_are_estimated_from_the_first_ones_and_file_sizes(counted, path):
    """The first 100 of 400 equal rows give the number of tokens to within 10%."""
    whole, streamed = counted(path), counted(path, *STREAMED)
    assert streamed["train_tokens"] == pytest.approx(whole["train_tokens"], rel=0.1)
    assert streamed["train_rows"] == pytest.approx(whole["train_rows"], rel=0.1)
    assert streamed["longest_tokens"] == whole["longest_tokens"]
    assert streamed["exact"] is False
    assert "the first 100 rows and the sizes" in str(streamed["basis"])


def test_compressed_sizes_tell_nothing_of_rows(counted, path):
    """The estimate covers only the first rows, and says so."""
    packed = path.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    found = counted(packed, *STREAMED)
    assert found["train_rows"] < 100
    assert "of the first 100 rows, estimated; the others are not read" in str(found["basis"])


def test_a_plan_of_a_stream_reads_no_more_than_the_first_rows(counted, path, monkeypatch):
    """The bad row after the first hundred is never read."""
    lines = path.read_text("utf-8").splitlines()
    path.write_text("\n".join([*lines[:100], "no row at all"]) + "\n", "utf-8")
    monkeypatch.setattr(token_estimate, "peek", None)
    assert counted(path, *STREAMED)["train_rows"] > 0


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        (["suite=heldout_syntax", "data.heldout_frac=0.00001"], True),
        (["suite=heldout_syntax", "data.heldout_frac=0.2"], False),
        (["suite=none", "data.heldout_frac=0.00001"], False),
    ],
)
def test_first_rows_that_leave_the_suite_nothing_are_told(
    tiny_config, path, tmp_path, overrides, is_told
):
    """The plan warns, since the run would end without a scorecard."""
    given = ["data=jsonl", f"data.path={path}", "data.val_frac=0.2", *STREAMED, *overrides]
    told = estimate.make_plan(tiny_config(*given), tmp_path)["warnings"]
    assert any("no row is held out of the first 100" in one for one in told) == is_told


def test_the_library_is_estimated_from_the_sizes_of_its_files(
    tiny_config, smollm2, cache, tmp_path
):
    """Without extraction, the estimate is near the count of SmolLM2's own tokenizer."""
    sides = ["data.val_frac=0.5", "data.heldout_frac=0"]
    planned = count_tokens(tiny_config("data=stdlib", *sides), tmp_path / "nothing here")
    tokenizer = AutoTokenizer.from_pretrained(smollm2.directory)
    every_twentieth = [pair.prompt + pair.response for pair in stdlib.load(cache).pairs[::20]]
    counted = 20 * sum(map(len, tokenizer(every_twentieth).input_ids))
    assert planned["train_tokens"] == pytest.approx(counted / 2, rel=0.15)
    assert planned["val_tokens"] == planned["train_tokens"]
