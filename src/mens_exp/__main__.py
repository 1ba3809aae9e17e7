"""``python -m mens_exp``."""

from __future__ import annotations

from mens_exp.cli import entry_point

if __name__ == "__main__":
    entry_point()
