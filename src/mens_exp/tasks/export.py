"""task=export: pack a run for a colleague, or write it as another program reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mens_exp.artifacts.digest import sha256_file
from mens_exp.config.task import ExportFormat
from mens_exp.export.bundle import pack
from mens_exp.tasks.subject import subject_of

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run

__all__ = ["export"]


def export(config: RunConfig, run: Run) -> None:
    """Write what ``format`` names and record its hash."""
    if config.format is ExportFormat.bundle:
        _bundle(config, run)
    elif config.format in {ExportFormat.peft, ExportFormat.v2, ExportFormat.v3}:
        from mens_exp.tasks.export_adapter import export_adapter

        export_adapter(config, run)
    else:
        from mens_exp.tasks.export_model import export_model

        export_model(config, run)


def _bundle(config: RunConfig, run: Run) -> None:
    assert config.path is not None, "validation has asked for it"
    subject = subject_of(config.path)
    name = f"{subject.path.resolve().name}.tar.gz"
    archive = Path(config.out) if config.out else run.dir.path / name
    hashes = pack(subject, archive, checkpoints=config.export.checkpoints)
    run.manifest.inputs.update(subject=str(subject.path), files_sha256=hashes)
    run.manifest.results.update(
        bundle=name if config.out is None else config.out,
        bundle_sha256=sha256_file(archive),
        bundle_bytes=archive.stat().st_size,
        files=len(hashes),
    )
    console = Console()
    console.print(f"{len(hashes)} files, {archive.stat().st_size / 2**20:.1f} MiB")
    console.print(f"Bundle: {archive}", soft_wrap=True, markup=False)
