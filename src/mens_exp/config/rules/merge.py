"""Requirements of task=merge, in either of its two forms."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from mens_exp.config.merge import MergeMode
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems"]


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with the inputs of a merge."""
    if config.task.name != "merge":
        return
    if config.adapter.file is not None:
        yield from _files(config, config.adapter.file)
    else:
        yield from _directory(config)


def _directory(config: RunConfig) -> Iterator[ConfigError]:
    if config.path is None:
        yield ConfigError(
            "no adapter to merge",
            where="path",
            expected="a run, an adapter directory (schema v2, v3 or PEFT), or latest",
            remedy="add path=latest, or adapter=… meta=… base_shard=[…] out=…",
        )
    elif config.path == "base":
        yield ConfigError(
            "the base model alone has nothing to merge",
            where="path",
            found="base",
            expected="a run or an adapter directory, or latest",
        )


def _files(config: RunConfig, file: str) -> Iterator[ConfigError]:
    if PurePath(file).suffix == ".bin":
        yield ConfigError(
            "a Burn checkpoint is no safetensors adapter",
            where="adapter.file",
            found=file,
            expected="a .safetensors file of schema v2 or v3",
            remedy="merge it where it was made, with: vox mens merge-weights; an adapter that "
            "backend=burn trained here merges with task=merge path=<its run>",
        )
    needed: dict[str, tuple[str | list[str] | None, str, str]] = {
        "meta": (config.meta, "the adapter's JSON header, of schema v2 or v3", "<json>"),
        "base_shard": (config.base_shard, "the base's safetensors files", "[a.safetensors,…]"),
        "out": (config.out, "the file to write", "<file>"),
    }
    for name, (given, expected, form) in needed.items():
        if not given:
            yield ConfigError(
                "is needed beside adapter=<safetensors>",
                where=name,
                expected=expected,
                remedy=f"add {name}={form}",
            )
    if config.merge.mode is MergeMode.full:
        yield ConfigError(
            "shards alone are no whole model",
            where="merge.mode",
            found="full",
            expected="subset",
            remedy="merge by path= and base=<directory>",
        )
