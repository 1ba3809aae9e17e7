from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from mens_exp.artifacts.manifest import Manifest
from mens_exp.config.objective import AssistantObjective, ObjectiveConfig
from mens_exp.tasks.train import note_bits_per_byte

NAMES = ("base_val_bits_per_byte", "tuned_val_bits_per_byte")


@pytest.fixture
def noted():
    """Note bits a byte of four tokens, of 2 and 1 times ln 2 nats each."""

    def made(objective, found):
        manifest = Manifest(run_id="r", task="train", started_utc="", config_digest="", seed=1)
        manifest.results |= {"base_val_loss": 2 * math.log(2), "tuned_val_loss": math.log(2)}

        def unknown(field, reason):
            manifest.unknown[field] = reason

        run = SimpleNamespace(manifest=manifest, unknown=unknown)
        data = SimpleNamespace(validated_bytes=found, validated_ids=np.arange(4))
        note_bits_per_byte(objective, run, data)
        return manifest

    return made


def test_loss_over_the_text_is_noted(noted):
    """Eight and four bits over sixteen bytes are noted as bits per byte."""
    manifest = noted(AssistantObjective(_target_="ours"), (16, None))
    assert [manifest.results[name] for name in NAMES] == pytest.approx([0.5, 0.25])
    assert (manifest.results["val_text_bytes"], manifest.unknown) == (16, {})


@pytest.mark.parametrize(
    ("objective", "found", "reason"),
    [
        (AssistantObjective(_target_="ours"), (None, "nobody tells"), "nobody tells"),
        (
            ObjectiveConfig(_target_="theirs", name="x", labels="causal"),
            (16, None),
            "the loss of this objective may be no likelihood",
        ),
    ],
)
def test_what_cannot_be_told_is_null_with_the_reason(
    noted,
    objective,
    found,
    reason,
):
    """Null and a reason, where the tokenizer tells no bytes or the loss is of another kind."""
    manifest = noted(objective, found)
    names = (*NAMES, "val_text_bytes")
    assert [manifest.results[name] for name in names] == [None] * 3
    assert manifest.unknown == {f"results.{name}": reason for name in names}
