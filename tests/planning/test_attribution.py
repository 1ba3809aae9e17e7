from __future__ import annotations

import dataclasses

import pytest

from mens_exp.layout.shape import shape_of
from mens_exp.planning import machine
from mens_exp.planning.checks.machine import check_machine
from mens_exp.planning.forecast import attribution_memory


@pytest.fixture
def config(tiny_config):
    return tiny_config("task=attribute", "quant.double_quant=false")


def test_memory_is_two_bases_and_what_layers_gave(config):
    """By hand: 4 bytes a weight; again 4.5 bits if linear or 2 bytes if not; 4 bytes an output."""
    shape = shape_of(config.model)
    linear, table = shape.linear_parameters, shape.embedding_parameters
    found = attribution_memory(config, shape).components
    assert found["base in f32"] == 4 * (linear + table)
    assert found["base in 4 bits"] == round(linear * 4.5 / 8) + 2 * table
    assert found["layer outputs"] == 4 * 1024 * shape.num_hidden_layers * shape.hidden_size


@pytest.mark.parametrize(("free_bytes", "problems"), [(10**12, 0), (10**8, 1)])
def test_machine_without_room_for_the_base_in_f32_is_refused(
    config, monkeypatch, free_bytes, problems
):
    """The message suggests a lower attribute.tokens."""
    here = dataclasses.replace(machine.look("cpu"), free_bytes=free_bytes)
    monkeypatch.setattr(machine, "look", lambda _: here)
    found = list(check_machine(config))
    assert len(found) == problems
    assert all("lower attribute.tokens" in str(one) for one in found)
