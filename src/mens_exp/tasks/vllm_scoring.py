"""task=evaluate by vLLM: base and tuned from one engine, no graph of ours built."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.scorecard import Condition
from mens_exp.errors import RequestError
from mens_exp.evals.vllm_engine import Served, VllmEngine, open_vllm
from mens_exp.layout.shape import shape_of
from mens_exp.tasks.scoring import generation_of, score_by, suite_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.config.root import RunConfig
    from mens_exp.model.resolve import BaseModel
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tasks.evaluated import Subject
    from mens_exp.tasks.run import Run
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["peft_directory", "score_by_vllm"]

_UNQUANTIZED = (
    "vLLM answered with the published base weights, not with the quantized ones of training"
)


def peft_directory(subject: Subject) -> Path | None:
    """Return the PEFT directory of what is scored; None where that is the base.

    Raises:
        RequestError: it has none.
    """
    if subject.is_base:
        return None
    directory = Path(subject.path) if subject.run is None else subject.run.peft
    if not (directory / "adapter_config.json").is_file():
        raise RequestError(
            "vLLM loads PEFT adapters, and this has none",
            where="path",
            found=subject.path,
            expected="a run of backend=qlora or lora, or a PEFT directory",
            remedy="write one by task=export format=peft, or choose eval.engine=hf",
        )
    return directory


def score_by_vllm(
    config: RunConfig,
    theirs: RunConfig,
    run: Run,
    base: BaseModel,
    subject: Subject,
    tokenizer: Tokenizer,
    heldout: Sequence[TrainingPair],
) -> None:
    """Ask the suite of vLLM, and write the same records as any engine.

    Args:
        config: the command's own.
        theirs: of the model: its run's, or the command's.
        run: the open run.
        base: the resolved base model.
        subject: what is scored.
        tokenizer: with the chat template of training.
        heldout: rows that were held out, for a suite made of them.

    Raises:
        SetupError: vLLM cannot load the model.
    """
    from mens_exp.export.vllm import rank_of, room_for

    positions = shape_of(theirs.model).max_position_embeddings
    suite = suite_of(config, heldout, tokenizer, positions)
    if isinstance(suite, str):
        run.unknown("scorecard", suite)
        return
    adapter = peft_directory(subject)
    run.manifest.notes.append(_UNQUANTIZED)
    engine = open_vllm(
        Served(
            base=base.directory,
            max_lora_rank=None if adapter is None else room_for(rank_of(adapter)),
            dtype=theirs.quant.compute_dtype,
            max_positions=positions,
            trust_remote_code=getattr(theirs.model, "trust_remote_code", False),
        )
    )
    generation = generation_of(config.suite, config.eval)
    by = {Condition.BASE: VllmEngine(engine, tokenizer, generation, positions, None)}
    if adapter is not None:
        by[Condition.TUNED] = VllmEngine(engine, tokenizer, generation, positions, adapter)
    score_by(config, run, suite, by)
