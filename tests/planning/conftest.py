from __future__ import annotations

import json

import pytest


@pytest.fixture
def rows(tmp_path):
    """A file of ten rows with prompts `p0` … `p9`, each its own group; answers have 100 letters."""
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"p{n}", "response": "x" * 100}) for n in range(10)]
    path.write_text("\n".join(lines), "utf-8")
    return path


@pytest.fixture(autouse=True)
def no_ledger(cache):
    """Remove other tests' measurements, so that predictions come from the formula alone."""
    (cache / "ledger.jsonl").unlink(missing_ok=True)
