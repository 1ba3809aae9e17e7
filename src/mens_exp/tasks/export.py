"""task=export: a run packed for a colleague, or a model as another program reads it."""

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
    {ExportFormat.bundle: _bundle, ExportFormat.gguf: _gguf}[config.format](config, run)


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
    console.print(f"Bundle: {archive}", soft_wrap=True)


def _gguf(config: RunConfig, run: Run) -> None:
    from mens_exp.export.gguf_export import FILE, export_gguf
    from mens_exp.layout.cached import hash_weights

    assert config.path is not None, "validation has asked for it"
    source = Path(config.path)
    target = Path(config.out).expanduser() if config.out else run.dir.path / "gguf"
    run.manifest.inputs.update(subject=str(source), base_weights_sha256=hash_weights(source))
    export_gguf(source, target, config.gguf.dtype, base=source.resolve().name)
    file = target / FILE
    run.manifest.results.update(
        directory="gguf" if config.out is None else config.out,
        gguf_sha256=sha256_file(file),
        gguf_bytes=file.stat().st_size,
    )
    console = Console()
    console.print(f"GGUF: {file}, {file.stat().st_size / 2**20:.1f} MiB", soft_wrap=True)
    console.print(f"Run it: llama-server -m {file}", soft_wrap=True)
    console.print(f"Ollama: cd {target} && ollama create <name> -f Modelfile", soft_wrap=True)
