from __future__ import annotations

import pytest
import torch

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import Telemetry
from mens_exp.training.build import build_trainer, lightning_quiet


class Record:
    """The parts of a run that building a trainer needs."""

    def __init__(self, path):
        self.dir = RunDir(path)
        self.telemetry = Telemetry(self.dir.telemetry)
        self.manifest = Manifest(
            run_id="run",
            task="train",
            started_utc="2026-11-20T05:58:01.123Z",
            config_digest="ab" * 32,
            seed=42,
        )

    def save(self):
        raise AssertionError

    def after_close(self, fn):
        """Do nothing, as nothing needs closing."""


@pytest.fixture
def built(tmp_path, tiny_config):
    """Build the trainer of a configuration with 10 steps."""
    record = Record(tmp_path)
    was_deterministic = torch.are_deterministic_algorithms_enabled()

    def make(*overrides):
        with lightning_quiet():
            return build_trainer(tiny_config(*overrides), record, max_steps=10)

    yield make
    record.telemetry.close()
    torch.use_deterministic_algorithms(was_deterministic)
