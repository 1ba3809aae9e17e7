from __future__ import annotations

import json

import pytest


@pytest.fixture
def rows(tmp_path):
    """Ten rows, each a group of its own: `p0` … `p9`, answered by a hundred letters."""
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"p{n}", "response": "x" * 100}) for n in range(10)]
    path.write_text("\n".join(lines), "utf-8")
    return path


@pytest.fixture(autouse=True)
def no_ledger(cache):
    """Forget what other tests' runs measured, so that a prediction is the formula's."""
    (cache / "ledger.jsonl").unlink(missing_ok=True)
