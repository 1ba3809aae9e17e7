"""Check the processes that were started against the settings."""

from __future__ import annotations

import pytest

from mens_exp.planning import machine
from mens_exp.planning.checks.machine import check_processes
from mens_exp.planning.machine import Rank, of_torchrun

DDP = ("trainer=ddp", "trainer.accelerator=cpu")
SAID = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def torchrun(monkeypatch):
    """Set the environment variables of torchrun."""

    def said(**changed):
        for name, value in (SAID | changed).items():
            monkeypatch.setenv(name, value)

    return said


def test_torchrun_says_who_is_who(torchrun):
    """The second process of the second machine."""
    torchrun()
    rank = of_torchrun()
    assert rank == Rank(rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert not rank.is_first


@pytest.mark.parametrize("changed", [{"MASTER_PORT": ""}, {"RANK": "x"}, {"WORLD_SIZE": "1"}])
def test_anything_less_is_one_process(torchrun, changed):
    """A single variable may belong to another program."""
    torchrun(**changed)
    assert of_torchrun() is None


def test_what_torchrun_started_is_accepted(torchrun, tiny_config):
    """Two processes on each of two machines, as configured."""
    torchrun()
    assert list(check_processes(tiny_config(*DDP, "trainer.num_nodes=2"))) == []


def test_other_numbers_than_torchruns_are_refused(torchrun, tiny_config):
    """Each message gives the number that torchrun used."""
    torchrun()
    found = list(check_processes(tiny_config(*DDP, "trainer.devices=4")))
    assert [(one.where, one.expected) for one in found] == [
        ("trainer.devices", "2"),
        ("trainer.num_nodes", "2"),
    ]


@pytest.mark.parametrize(
    ("overrides", "where"),
    [(("trainer=cpu",), "trainer.strategy"), ((*DDP, "task=plan"), "task")],
)
def test_torchrun_starts_no_command_of_one_process(
    torchrun,
    tiny_config,
    overrides,
    where,
):
    """The other processes would wait forever."""
    torchrun()
    (found,) = check_processes(tiny_config(*overrides))
    assert found.where == where


def test_several_machines_need_torchrun(tiny_config):
    """The message has the torchrun command."""
    (found,) = check_processes(tiny_config(*DDP, "trainer.num_nodes=2"))
    assert found.where == "trainer.num_nodes"
    assert "torchrun --nnodes=2 --nproc-per-node=2" in str(found.remedy)


def test_slurm_starts_several_machines_too(tiny_config, monkeypatch):
    """The nodes may have GPUs that the submitting machine lacks."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = tiny_config("trainer=ddp", "trainer.accelerator=gpu", "trainer.num_nodes=2")
    assert list(check_processes(config, by_slurm=True)) == []


def test_more_processes_than_gpus_are_refused(tiny_config, monkeypatch):
    """Each process needs its own GPU; on the CPU there is no limit."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (found,) = check_processes(tiny_config("trainer=ddp", "trainer.accelerator=gpu"))
    assert (found.where, found.expected) == ("trainer.devices", "at most 1")
    assert list(check_processes(tiny_config(*DDP))) == []


FSDP = ("trainer=fsdp", "trainer.accelerator=cpu", "quant.storage_dtype=bf16")


@pytest.mark.parametrize(
    ("version", "problems"), [("2.6.0+cpu", 1), ("2.7.0", 0), ("2.13.0+cpu", 0)]
)
def test_parts_need_a_torch_that_leaves_the_adapter_whole(
    tiny_config,
    monkeypatch,
    version,
    problems,
):
    """`fully_shard` has the argument `ignored_params` since torch 2.7."""
    monkeypatch.setattr(machine, "_torch", lambda: (version, None))
    found = list(check_processes(tiny_config(*FSDP)))
    assert len(found) == problems
    for one in found:
        assert one.where == "trainer.strategy"
        assert version in str(one.found)
    assert list(check_processes(tiny_config(*FSDP, "trainer.devices=1"))) == []
