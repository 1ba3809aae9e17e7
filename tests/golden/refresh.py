"""Write every experiment's resolved configuration: ``python tests/golden/refresh.py``.

A change of a default shows up in the diff of these files, experiment by experiment.
"""

from __future__ import annotations

from pathlib import Path

from mens_exp.config.compose import compose, group_options, to_yaml

DIRECTORY = Path(__file__).parent / "experiments"


def goldens() -> dict[str, str]:
    """Return the resolved configuration of each experiment and preset, and of neither, by name."""
    commands: dict[str, list[str]] = {"default": []}
    for group in ("experiment", "preset"):
        commands |= {name: [f"{group}={name}"] for name in group_options()[group]}
    composed = compose(list(commands.values()))
    return {name: to_yaml(one.values) for name, one in zip(commands, composed, strict=True)}


def refresh() -> None:
    """Replace the files by what the configuration tree says now."""
    DIRECTORY.mkdir(exist_ok=True)
    for stale in DIRECTORY.glob("*.yaml"):
        stale.unlink()
    for name, text in goldens().items():
        (DIRECTORY / f"{name}.yaml").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    refresh()
