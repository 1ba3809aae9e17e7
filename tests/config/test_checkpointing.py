"""Settings whose values YAML 1.1 would read as booleans."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from mens_exp.config.compose import from_yaml, to_yaml, typed
from mens_exp.config.model import Checkpointing
from mens_exp.config.overrides import check

KEY = "model.gradient_checkpointing"
SPELLINGS = [
    ("auto", Checkpointing.auto),
    ("on", Checkpointing.on),
    ("off", Checkpointing.off),
    ("true", Checkpointing.on),
    ("false", Checkpointing.off),
]


@pytest.mark.parametrize(("text", "meaning"), SPELLINGS)
def test_spelling_survives_the_command_line_and_the_stored_yaml(text, meaning, tmp_path):
    """In config.yaml `on` is quoted, because a bare one would be read as true."""
    checked = check(["model=tiny_llama", f"{KEY}={text}"])
    assert checked.problems == ()
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(checked.cells[0].composed.values), encoding="utf-8")
    for config in (checked.cells[0].config, typed(from_yaml(file))):
        assert Checkpointing.read(config.model.gradient_checkpointing) is meaning


@pytest.mark.parametrize(("text", "meaning"), SPELLINGS)
def test_spelling_in_a_yaml_of_one_s_own(text, meaning, tmp_path):
    """A bare `on` in an experiment's YAML is accepted, although the parser makes it a boolean."""
    checked = check(["model=tiny_llama"])
    values = checked.cells[0].composed.values
    OmegaConf.set_struct(values, value=False)
    merged = OmegaConf.merge(values, OmegaConf.create(f"model:\n  gradient_checkpointing: {text}"))
    file = tmp_path / "config.yaml"
    file.write_text(OmegaConf.to_yaml(merged), encoding="utf-8")
    assert Checkpointing.read(typed(from_yaml(file)).model.gradient_checkpointing) is meaning


def test_another_word_is_refused():
    """The message lists the accepted values."""
    (problem,) = check(["model=tiny_llama", f"{KEY}=yes_please"]).problems
    assert problem.where == KEY
    assert "auto" in (problem.expected or "")
    assert Checkpointing.read("yes_please") is None
