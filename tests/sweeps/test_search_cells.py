"""Cells of a search, really composed."""

from __future__ import annotations

import pytest

from mens_exp.config.override_parsing import read_space
from mens_exp.sweeps.search_request import Cells, probe


@pytest.fixture
def cells(tiny_run, tmp_path, monkeypatch):
    """A search over `tiny_run` in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def made(*overrides):
        by_key = {text.partition("=")[0]: text for text in [*tiny_run, *overrides]}
        space = read_space(list(by_key.values()))
        assert space.problems == ()
        return Cells(space=space.dimensions, fixed=space.fixed)

    return made


def chosen(**values):
    """Draw the given values; any other key must not be drawn."""
    return lambda dimension: values[dimension["key"].replace(".", "_")]


def test_what_does_nothing_beside_the_options_is_not_drawn(cells):
    """backend=full has no adapter and no rank, so the sampler is not asked for one."""
    made = cells("backend=full,qlora", "lora.r=4,8", "optim.lr=interval(0.001,0.01)")
    drawn = made.draw(3, chosen(backend="full", optim_lr=0.002))
    assert drawn.problems == ()
    assert list(drawn.params.values()) == ["backend=full", "optim.lr=0.002"]
    assert drawn.cell is not None
    assert (drawn.cell.number, drawn.cell.config.optim.lr) == (3, 0.002)
    drawn = made.draw(4, chosen(backend="qlora", lora_r="8", optim_lr=0.002))
    assert drawn.params["lora.r"] == "lora.r=8"
    assert drawn.cell is not None
    assert drawn.cell.config.lora.r == 8


def test_a_key_that_one_option_alone_has_is_drawn_beside_it(cells):
    """Lion has no eps, but the command is valid."""
    made = cells("optim=adamw,lion", "optim.eps=1e-8,1e-6")
    assert "optim.eps" not in made.draw(0, chosen(optim="lion")).params
    drawn = made.draw(1, chosen(optim="adamw", optim_eps="1e-6"))
    assert drawn.problems == ()
    assert drawn.params["optim.eps"] == "optim.eps=1e-6"


def test_a_draw_that_cannot_run_has_its_reason(cells):
    """The range comes from the schema of the key, not from the command."""
    drawn = cells("lora.dropout=interval(0,2)").draw(0, chosen(lora_dropout=1.5))
    assert drawn.cell is None
    assert "lora.dropout: out of range" in str(drawn.problems[0])


def probed(cells):
    found = probe(cells)
    return found, [str(problem) for problem in found.general]


def test_both_ends_are_composed_before_the_first_draw(cells):
    """The upper end of this interval can never run."""
    found, general = probed(cells("lora.dropout=interval(0,2)", "lora.r=4,8"))
    assert general == []
    assert len(found.cells) == 1
    ((number, problems),) = found.bad.items()
    assert found.names[number] == ("lora.dropout=2",)
    assert "out of range" in str(problems[0])


def test_options_that_do_not_go_together_are_told(cells):
    """The other options can be searched."""
    found, general = probed(cells("model=tiny_llama,hf", "lora.r=4,8"))
    assert general == []
    assert len(found.cells) == 1
    assert [found.names[number] for number in found.bad] == [("model=hf",)]
    assert "model.id: a required value is missing" in str(next(iter(found.bad.values()))[0])


def test_a_wrong_command_is_wrong_as_a_whole(cells):
    """An unknown key, or a key that no trial reads."""
    assert "lora.rr: unknown key" in probed(cells("lora.rr=4,8"))[1][0]
    assert "nonsense: unknown key" in probed(cells("lora.r=4,8", "nonsense=1"))[1][0]
    (said,) = probed(cells("backend=full", "lora.r=4,8"))[1]
    assert "lora.r: has no effect in any trial" in said
