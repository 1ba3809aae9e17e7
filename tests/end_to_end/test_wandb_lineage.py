"""Lineage of real runs in the W&B stand-in: base → adapter → merged → scorecard → comparison."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mens_exp import cli
from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.manifest import Manifest

SUITE = ["suite=heldout_syntax", "suite.items=2", "suite.max_new_tokens=40"]
RANKS = (4, 8)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train_in):
    """Two arms trained and merged, their merged models scored, and the scores compared."""
    root = tmp_path_factory.mktemp("runs")

    def typed(name, *command):
        assert cli.main([*command, f"hydra.run.dir={root}/{name}"]) == 0

    for rank in RANKS:
        train_in(root / f"train{rank}", f"lora.r={rank}", "optim.lr=0.1", "seed=1")
        typed(
            f"merge{rank}",
            "task=merge",
            "parity.tokens=64",
            "logger=none",
            f"path={root}/train{rank}",
        )
        typed(f"score{rank}", "task=evaluate", "logger=none", f"path={root}/merge{rank}", *SUITE)
    scored = ",".join(f"{root}/score{rank}" for rank in RANKS)
    typed("compare", "task=compare", f"path=[{scored}]", "logger=none")
    return root


def test_each_run_reads_what_an_earlier_one_made(runs, wandb_service):
    """Artifacts are found by digest, so none is uploaded twice."""
    synced = ["task=sync", f"path={runs}", f"hydra.run.dir={runs}/sync"]
    assert cli.main(synced) == 0
    assert wandb_service.unknown == []
    base = Manifest.read(runs / "train8" / "manifest.json").inputs["base_weights_sha256"]
    for rank in RANKS:
        line = [
            *(f"base-{base[:12]}", f"train{rank}", f"adapter-train{rank}", f"merge{rank}"),
            *(f"merged-merge{rank}", f"score{rank}", f"scorecard-score{rank}"),
            *("compare", "comparison-compare"),
        ]
        assert set(pairwise(line)) <= wandb_service.lineage
    order = list(wandb_service.runs)
    assert [name.rstrip("48") for name in order] == [
        *("train", "train", "merge", "merge", "score", "score", "compare")
    ]
    for user, artifact in wandb_service.used:
        assert artifact.state == "COMMITTED"
        assert len(wandb_service.versions(artifact.name)) == 1
        if artifact.type != "base":
            assert order.index(artifact.made_by) < order.index(user)
    used = {(user, artifact.type) for user, artifact in wandb_service.used}
    assert used == {
        *((f"train{rank}", "base") for rank in RANKS),
        *((f"merge{rank}", kind) for rank in RANKS for kind in ("base", "adapter")),
        *((f"score{rank}", "merged") for rank in RANKS),
        ("compare", "scorecard"),
    }


def test_a_comparison_of_merged_models_is_of_the_runs_that_were_trained(runs):
    """The arms are those runs; the scorecards belong to the merged models."""
    record = Comparison.read(runs / "compare" / "compare.json")
    assert sorted(one["run_id"] for one in record.runs) == ["train4", "train8"]
    assert sorted(str(one["scored_by"]) for one in record.runs) == [
        str((runs / f"score{rank}").resolve()) for rank in RANKS
    ]
    (contrast,) = record.contrasts
    assert contrast["confounded_by"] == []
