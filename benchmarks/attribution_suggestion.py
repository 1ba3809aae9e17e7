"""Hold a suggested quant.skip against what it does: on its own tokens, and on held-out rows.

    python benchmarks/attribution_suggestion.py <run directory of task=attribute>

As many modules of the same kinds, drawn at random, show what any such skip would do.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mens_exp.artifacts.attribution import Attribution
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.backends.frozen_base import load_base
from mens_exp.config.compose import from_yaml, typed
from mens_exp.config.quant import QuantConfig, QuantType
from mens_exp.corpus.source import load_rows
from mens_exp.corpus.split import Side
from mens_exp.data.datamodule import encoded_side, sampled_stream
from mens_exp.evals.attribution import Subject, attribute_whole
from mens_exp.evals.replay import Replay
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import linear_modules
from mens_exp.model.resolve import resolve
from mens_exp.quant.stored_as import variants_of
from mens_exp.rows.cache import cache_root
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator


def main(run: RunDir) -> None:
    """Print KL and loss of all modules at once, with and without what is left out."""
    record, config = Attribution.read(run.attribution), typed(from_yaml(run.config))
    skip = set(record.suggestion["skip"])
    print(f"{len(skip)} modules, {record.suggestion['skip_share']:.1%} of the summed KL")
    cache, shape = cache_root(), shape_of(config.model)
    base = resolve(config.model, cache)
    tokenizer, rows = (
        load_tokenizer(config.tokenizer, base.directory),
        load_rows(config.data, cache),
    )
    plain = dataclasses.replace(config, quant=QuantConfig(quant_type=QuantType.none))
    model = load_base(plain, base, torch.device("cpu"), dtype=torch.float32).eval()
    modules = [one for one in linear_modules(shape) if one.layer is not None]
    arms = {"none": set(), "suggested": skip, "random": set(_drawn(record, skip))}
    for side in (Side.HELDOUT, Side.VAL):
        documents, _ = encoded_side(config, rows, side, tokenizer, cache)
        stream = sampled_stream(config.data, documents, config.attribute.tokens, pad_id=0)
        replay = Replay(model, shape.family.layers, list(stream), chunk_tokens=64)
        for name, left_out in arms.items():
            subject = Subject(
                replay=replay,
                modules=[one for one in modules if one.path not in left_out],
                variants=variants_of(config.quant)[:1],
                transposed=shape.family.transposed,
            )
            print(side.value, name, attribute_whole(subject)[record.configured], flush=True)


def _drawn(record: Attribution, skip: set[str]) -> Iterator[str]:
    """Draw a module of the same kind for each one of the suggestion."""
    generator = random.Random(0)  # noqa: S311  # nothing secret
    free = [one for one in record.modules if one["path"] not in skip]
    for kind in (one["kind"] for one in record.modules if one["path"] in skip):
        chosen = generator.choice([one for one in free if one["kind"] == kind] or free)
        free.remove(chosen)
        yield chosen["path"]


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1])))
