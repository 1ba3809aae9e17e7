"""format=peft|v2|v3: an adapter in another form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import sha256_file
from mens_exp.config.task import ExportFormat
from mens_exp.export.adapter import find, read, write
from mens_exp.tasks.conversion import conversion_of
from mens_exp.tasks.export_certificate import certify_adapter
from mens_exp.tasks.merging import settle_certified

if TYPE_CHECKING:
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run

__all__ = ["export_adapter"]


def export_adapter(config: RunConfig, run: Run) -> None:
    """Write an adapter in another form, with its certificate, and record its hash."""
    asked = conversion_of(config)
    console = Console()
    out = Path(config.out).expanduser() if config.out else run.dir.adapter
    manifest, tensors = read(asked.place, asked.base, asked.quant)
    with atomic.directory(out) as temporary:
        write(manifest, tensors, config.format, temporary, asked.base)
        _add_template(config, asked.place.run, temporary)
        settle_certified(run, temporary, out, certify_adapter(config, asked, temporary), console)
    written = find(out)
    after, _ = read(written, asked.base, asked.quant)
    run.manifest.inputs.update(
        subject=str(asked.place.directory),
        subject_form=asked.place.form,
        tensors_sha256=sha256_file(asked.place.tensors),
        base_model=manifest.base_model,
    )
    run.manifest.results.update(
        adapter="adapter" if config.out is None else config.out,
        form=written.form,
        layers=len(after.layer_order),
        parameters=sum(values.size for values in tensors.values()),
        tensors_sha256=sha256_file(written.tensors),
        tensors_bytes=written.tensors.stat().st_size,
    )
    if asked.place.form == "peft" and asked.quant is None:
        run.manifest.notes.append(
            "PEFT's form does not tell how the base was quantized while the adapter was trained: "
            "recorded as none, unless export.base_quant says otherwise"
        )
    if asked.base is not None and manifest.base_model != asked.base.name:
        run.manifest.notes.append(
            f"the adapter names its base {manifest.base_model}; names and shapes are those of "
            f"{asked.base.name}"
        )
    size = written.tensors.stat().st_size / 2**20
    console.print(
        f"{asked.place.form} to {written.form}: {len(after.layer_order)} layers, {size:.1f} MiB"
    )
    console.print(f"Adapter: {out}", soft_wrap=True, markup=False)


def _add_template(config: RunConfig, subject: RunDir | None, out: Path) -> None:
    """Put the chat template beside a PEFT adapter: whoever loads it needs its prompts' form."""
    if config.format is not ExportFormat.peft or subject is None:
        return
    template = subject.chat_template
    if template.is_file():
        atomic.write_text(out / template.name, template.read_text("utf-8"))
