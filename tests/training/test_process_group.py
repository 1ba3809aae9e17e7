"""Joining processes into a group, and errors when one is gone."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from mens_exp.planning.machine import ALONE, Rank
from mens_exp.training.distributed import (
    ShardedBase,
    all_gather,
    as_peer_failure,
    joined,
    open_store,
    publish,
    receive,
    store_at,
    strategy_of,
)

CPU = torch.device("cpu")


def test_what_is_told_reaches_who_comes_to_the_port():
    """Values can be published before any worker connects."""
    store = open_store(2)
    publish(store, {"config": "seed: 1\n", "checkpoint": None})
    assert receive(store_at(store.port, 2)) == {"config": "seed: 1\n", "checkpoint": None}


def test_a_group_ends_with_its_block():
    """The group is destroyed, also after an error, and another can be joined."""
    for _ in range(2):
        with joined(ALONE, CPU, open_store(1)):
            assert all_gather({"peak": 3}, ALONE) == [{"peak": 3}]
        assert not torch.distributed.is_initialized()
    with pytest.raises(KeyError), joined(ALONE, CPU, open_store(1)):
        raise KeyError
    assert not torch.distributed.is_initialized()


def test_one_process_needs_no_strategy(tiny_config):
    """A single process trains without a group, whatever the sharing setting."""
    for asked in ("trainer=cpu", "trainer=ddp", "trainer=fsdp"):
        assert strategy_of(tiny_config(asked, "trainer.accelerator=cpu"), ALONE) == "auto"


def test_several_have_the_strategy_that_is_asked_for(
    tiny_config,
):
    """Lightning's strategy is chosen for whole or sharded bases."""
    rank = Rank(rank=1, world_size=2, local_rank=1, local_world_size=2)
    for asked, kind in (("trainer=ddp", DDPStrategy), ("trainer=fsdp", ShardedBase)):
        assert isinstance(strategy_of(tiny_config(asked, "trainer.accelerator=cpu"), rank), kind)


@pytest.mark.parametrize(
    "error",
    [
        torch.distributed.DistNetworkError("Connection reset by peer"),
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] closed by peer"),
    ],
)
def test_a_broken_connection_is_told_as_such(error):
    """The error has the library's message and says how to continue."""
    found = as_peer_failure(error)
    assert found is not None
    assert "cannot be reached" in str(found)
    assert "by peer" in str(found)
    assert "resume=" in str(found.remedy)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("gloo")])
def test_any_other_error_is_what_it_is(error):
    """Other errors pass unchanged."""
    assert as_peer_failure(error) is None
