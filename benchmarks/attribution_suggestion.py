"""A suggested quant.skip compared with its effect, on its own tokens and on held-out rows.

    python benchmarks/attribution_suggestion.py [run directory of task=attribute]

Without a run, `task=attribute` is run first (seven minutes on two cores). All other modules are
then quantized at once, with the suggested ones left as they are, and with as many of the same kinds
drawn at random, which shows what any such skip would do. The reference is to leave none out.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import record
import torch
from processes import timed

from mens_exp.artifacts.attribution import Attribution
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.backends.frozen_base import load_base
from mens_exp.config.compose import from_yaml, typed
from mens_exp.config.quant import QuantConfig, QuantType
from mens_exp.corpus.source import load_rows
from mens_exp.corpus.split import Side
from mens_exp.data.datamodule import encoded_side, sampled_stream
from mens_exp.evals.attribution import Replay, Subject, attribute_whole
from mens_exp.layout.modules import linear_modules
from mens_exp.layout.shape import shape_of
from mens_exp.model.sources import resolve
from mens_exp.quant.round_trip import variants_of
from mens_exp.rows.cache import cache_root
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.artifacts.attribution import WholeRecord

QUESTION = "How much of the KL of a 4-bit base does the suggested quant.skip take away?"
USUAL = ("task=attribute", "trainer=cpu", "logger=none")
SMALLEST = (
    *("model=tiny_llama", "data=synthetic", "data.rows=40", "data.seq_len=1024"),
    *("attribute.tokens=64", "attribute.extra_bits=4"),  # enough for a suggestion
)
SIDES = {Side.VAL: "its own tokens", Side.HELDOUT: "held-out rows"}
LOWER = record.Better.LOWER


def main() -> None:
    """Measure KL and loss with all modules quantized, and with some skipped."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("run", type=Path, nargs="?", help="finished run of task=attribute")
    given = record.begin(parser)
    with tempfile.TemporaryDirectory() as place:
        run = RunDir(given.run or Path(place) / "run")
        if given.run is None:
            overrides = [*USUAL, *(SMALLEST if given.smallest else ())]
            timed(["-m", "mens_exp", *overrides, f"hydra.run.dir={run.path}"])
        attribution = Attribution.read(run.attribution)
        found = dict(measured(run, attribution))
    suggestion = attribution.suggestion
    figures = [
        record.figure("suggested modules", len(suggestion["skip"]), "modules"),
        record.figure("their share of the summed KL", suggestion["skip_share"], "frac"),
    ]
    for side, name in SIDES.items():
        none = found[side, "none"]
        for arm in ("suggested", "random"):
            one = found[side, arm]
            which = f"{arm} ones left out, {name}"
            kl, loss = ("none left out", none["kl"]), ("none left out", none["loss_change"])
            figures += [
                record.figure(f"KL, {which}", one["kl"], "nats", LOWER, kl),
                record.figure(f"loss change, {which}", one["loss_change"], "nats", LOWER, loss),
            ]
    record.finish(QUESTION, figures, given)


def measured(
    run: RunDir, attribution: Attribution
) -> Iterator[tuple[tuple[Side, str], WholeRecord]]:
    """Yield the cost of joint quantization on each side, for each set of skipped modules."""
    config = typed(from_yaml(run.config))
    cache, shape = cache_root(), shape_of(config.model)
    base = resolve(config.model, cache)
    tokenizer = load_tokenizer(config.tokenizer, base.directory)
    rows = load_rows(config.data, cache)
    plain = dataclasses.replace(config, quant=QuantConfig(quant_type=QuantType.none))
    model = load_base(plain, base, torch.device("cpu"), dtype=torch.float32).eval()
    modules = [one for one in linear_modules(shape) if one.layer is not None]
    skip = set(attribution.suggestion["skip"])
    arms = {"none": set(), "suggested": skip, "random": set(drawn(attribution, skip))}
    for side in SIDES:
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
            yield (side, name), attribute_whole(subject)[attribution.configured]


def drawn(attribution: Attribution, skip: set[str]) -> Iterator[str]:
    """Draw a random module of the same kind for each suggested one."""
    generator = random.Random(0)  # noqa: S311  # not for secrets
    free = [one for one in attribution.modules if one["path"] not in skip]
    for kind in (one["kind"] for one in attribution.modules if one["path"] in skip):
        chosen = generator.choice([one for one in free if one["kind"] == kind] or free)
        free.remove(chosen)
        yield chosen["path"]


if __name__ == "__main__":
    main()
