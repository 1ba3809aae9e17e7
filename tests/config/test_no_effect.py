"""Settings without effect: the refused ones and no others."""

from __future__ import annotations

from pathlib import Path

from mens_exp.config.compose import compose, typed
from mens_exp.config.validate import ineffective_overrides, overrides_not_read, problems_of
from mens_exp.errors import NoEffectError

# A command on each line, with the keys that are refused because they have no effect in it.
# The list is from the time when each refusal was written by hand, not declared as a condition.
LINES = (Path(__file__).parent / "no_effect.txt").read_text("utf-8").splitlines()
CASES = [tuple(part.strip() for part in line.split("=>")) for line in LINES]


def test_settings_without_effect_are_refused_and_no_others():
    """Every declared condition is tried, met and not met."""
    commands = [command.split(" ") for command, _ in CASES]
    found = []
    for words, one in zip(commands, compose(commands), strict=True):
        config = typed(one.values)
        keys = [word.lstrip("+~").partition("=")[0] for word in words]
        problems = [
            *problems_of(config),
            *overrides_not_read(config.task.name, keys, path=config.path),
            *ineffective_overrides(config, keys),
        ]
        idle = {str(one.where) for one in problems if isinstance(one, NoEffectError)}
        found.append((" ".join(words), " ".join(sorted(idle))))
    assert found == CASES
