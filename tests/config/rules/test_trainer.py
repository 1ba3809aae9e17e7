"""Requirements of several processes on the numbers that they share."""

from __future__ import annotations

import pytest

from mens_exp.config.rules.training import trainer_problems

DDP = ("trainer=ddp", "trainer.accelerator=cpu")


def test_two_processes_share_four_micro_batches(tiny_config):
    """The defaults of trainer=ddp are valid, and so are eight processes for eight micro-batches."""
    two = tiny_config(*DDP)
    assert list(trainer_problems(two)) == []
    assert two.trainer.world_size == 2
    eight = ("trainer.devices=4", "trainer.num_nodes=2", "trainer.accumulate_grad_batches=8")
    assert list(trainer_problems(tiny_config(*DDP, *eight))) == []


def test_one_process_of_ddp_is_accepted(tiny_config):
    """A run of two processes can be resumed with one."""
    assert list(trainer_problems(tiny_config(*DDP, "trainer.devices=1"))) == []


@pytest.mark.parametrize(
    ("overrides", "where", "expected"),
    [
        (["trainer.devices=3"], "trainer.accumulate_grad_batches", "a multiple of 3"),
        (
            ["trainer.num_nodes=2", "trainer.accumulate_grad_batches=6"],
            "trainer.accumulate_grad_batches",
            "a multiple of 4",
        ),
        (["trainer.val_check_interval=7"], "trainer.val_check_interval", "a multiple of 2"),
    ],
)
def test_what_cannot_be_shared_evenly_is_refused(tiny_config, overrides, where, expected):
    """In every step, some process would wait for the others."""
    (found,) = trainer_problems(tiny_config(*DDP, *overrides))
    assert found.where == where
    assert expected in str(found.expected)


@pytest.mark.parametrize("name", ["devices", "num_nodes"])
def test_one_process_has_no_others(tiny_config, name):
    """The number has no effect without a strategy."""
    (found,) = trainer_problems(tiny_config(f"trainer.{name}=2"))
    assert found.where == f"trainer.{name}"
    assert "trainer=ddp" in str(found.remedy)
