"""task=merge: an adapter and its base become one model, or the weights that it changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import sha256_file
from mens_exp.tasks.merge_choices import MOVED
from mens_exp.tasks.merging import decided_merge, settle_certified

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run

__all__ = ["merge"]


def merge(config: RunConfig, run: Run) -> None:
    """Write the merged weights, whole or not at all, and record what they were made of."""
    from mens_exp.export.merge import refuse_full_disk, write_tensors

    merging = decided_merge(config)
    choices = merging.choices
    merging.note(run)
    console = Console()
    console.print(f"Base: {choices.why}.", soft_wrap=True, markup=False)
    usual = run.dir.merged_tensors if choices.only_merged else run.dir.merged
    out = usual if config.out is None else Path(config.out).expanduser()
    atomic.remove_stale(out.parent)
    refuse_full_disk(out, choices.all_places, choices.dtype)
    if choices.only_merged:
        with atomic.stream(out) as file:
            write_tensors(file, choices.all_places, merging.what, of_model=False)
            file.flush()
            written = Path(file.name)
            settle_certified(run, written, out, merging.certificate(config, written), console)
    else:
        with atomic.directory(out) as written:
            merging.write_model(written)
            settle_certified(run, written, out, merging.certificate(config, written), console)
    files = {"": out} if out.is_file() else {f"/{one.name}": one for one in sorted(out.iterdir())}
    run.manifest.results.update(
        out=str(config.out or usual.name),
        out_bytes=sum(one.stat().st_size for one in files.values()),
        out_sha256={f"{out.name}{name}": sha256_file(one) for name, one in files.items()},
    )
    size = run.manifest.results["out_bytes"] / 2**20
    console.print(f"{len(choices.layers)} layers merged, {choices.dtype}, {size:.1f} MiB")
    if choices.unties:
        console.print("The head had the embedding's weight; it has one of its own now.")
    if choices.moves_embedding:
        console.print(f"merge.untie=false: {MOVED}.", soft_wrap=True, markup=False)
    console.print(f"Merged: {out}", soft_wrap=True, markup=False)
