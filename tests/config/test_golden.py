from __future__ import annotations

import runpy
from pathlib import Path

REFRESH = runpy.run_path(str(Path(__file__).parents[1] / "golden" / "refresh.py"))


def test_experiments_resolve_to_their_golden_configurations():
    """No value changes unnoticed; run `make golden` after an intended change."""
    stored = {
        file.stem: file.read_text(encoding="utf-8") for file in REFRESH["DIRECTORY"].glob("*.yaml")
    }
    assert stored == REFRESH["goldens"]()
