from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import Any

import pytest

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import Telemetry
from mens_exp.corpus.source import load_rows
from mens_exp.tokenizer.implementations import HfTokenizer


class Record:
    """A RunRecord with the real directory, event log and manifest, without a task."""

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
        self.save()
        self.after = []

    def save(self):
        self.manifest.write(self.dir.manifest)

    def after_close(self, fn):
        self.after.append(fn)

    def close(self):
        self.telemetry.close()
        self.save()
        while self.after:
            self.after.pop()(self.manifest)


@dataclass
class Fit:
    """A module over tiny_llama and its data, for fitting with any callbacks."""

    config: Any
    module: Any
    data: Any
    record: Record
    options: dict[str, Any] = field(default_factory=dict)

    def trainer(self, *callbacks, max_steps=2, **options):
        from lightning import Trainer
        from lightning.pytorch.callbacks import Checkpoint

        from mens_exp.training.build import AtomicCheckpointIO

        defaults = {
            "val_check_interval": 1000,
            "check_val_every_n_epoch": None,
            "accumulate_grad_batches": 2,
            "deterministic": True,
        }
        return Trainer(
            accelerator="cpu",
            max_steps=max_steps,
            max_epochs=-1,
            callbacks=list(callbacks),
            plugins=[AtomicCheckpointIO()],
            logger=False,
            enable_checkpointing=any(isinstance(one, Checkpoint) for one in callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=self.record.dir.path,
            **{**defaults, **options},
        )

    def validate(self, trainer):
        from mens_exp.training.build import lightning_quiet

        with lightning_quiet():
            trainer.validate(self.module, self.data, verbose=False)

    def run(self, trainer, **options):
        from mens_exp.training.build import lightning_quiet

        with lightning_quiet():
            trainer.fit(self.module, self.data, **options)


@pytest.fixture
def record(tmp_path):
    """Open a record; it is closed after the test."""
    made = Record(tmp_path / "run")
    yield made
    made.close()
    shutil.rmtree(tmp_path / "run" / "wandb", ignore_errors=True)


@pytest.fixture
def fit(
    record,
    rows_file,
    cache,
    tiny_base,
    tiny_config,
    tiny_backend,
):
    """Return a fresh graph and module with two micro-batches per step."""
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.training.build import build_module

    config = tiny_config(
        "data=jsonl",
        f"data.path={rows_file}",
        "data.seq_len=192",
        "trainer.max_steps=6",  # a stream longer than most fits
        "trainer.accumulate_grad_batches=2",
        "optim.lr=1e-3",
        "schedule=constant",
        "schedule.warmup_steps=0",
    )
    rows = load_rows(config.data, cache)
    data = RowsDataModule(config, rows, HfTokenizer.from_directory(tiny_base.directory), cache)
    return Fit(config, build_module(config, tiny_backend(), data), data, record)
