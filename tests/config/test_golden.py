from __future__ import annotations

import runpy
from pathlib import Path

REFRESH = runpy.run_path(str(Path(__file__).parents[1] / "golden" / "refresh.py"))


def test_experiments_resolve_to_their_golden_configurations():
    """No value of an experiment changes unseen; `make golden` after a change that is meant."""
    stored = {
        file.stem: file.read_text(encoding="utf-8") for file in REFRESH["DIRECTORY"].glob("*.yaml")
    }
    assert stored == REFRESH["goldens"]()
