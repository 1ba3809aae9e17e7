"""Every message of planner and preflight about the files of a model or an adapter, in one place.

Each says what is wrong, what was found, what is accepted and what to do next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.errors import ConfigError, ModelFileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_OF_ONE_MODEL = "take config.json and weights of one model, or download it again"


def embedding_of_wrong_shape(
    where: str, found: Sequence[int], expected: tuple[int, int]
) -> ModelFileError:
    """The embedding table is no matrix of vocabulary by width."""
    if len(found) != 2:  # noqa: PLR2004  # a matrix
        what, wanted = f"the embedding is of rank {len(found)}", "rank 2"
    elif found[0] != expected[0]:
        what, wanted = "the embedding has another vocabulary than config.json", "vocab_size"
    else:
        what, wanted = "the embedding has another width than config.json", "hidden_size"
    return ModelFileError(
        what,
        where=where,
        found=str(list(found)),
        expected=f"{list(expected)} ({wanted})",
        remedy=_OF_ONE_MODEL,
    )


def embedding_absent(where: str, tried: Sequence[str]) -> ModelFileError:
    """No shard has the table."""
    return ModelFileError(
        "no shard has the embedding",
        where=where,
        found="none of the keys",
        expected=" or ".join(tried),
        remedy="download the model again",
    )


def heads_do_not_divide(where: str, heads: int, groups: int) -> ModelFileError:
    """Grouped-query attention shares each key head among a whole number of query heads."""
    return ModelFileError(
        "query heads do not divide evenly over key and value heads",
        where=where,
        found=f"{heads} query heads, {groups} key and value heads",
        expected="num_key_value_heads that divides num_attention_heads",
        remedy=_OF_ONE_MODEL,
    )


def sequence_past_positions(found: int, most: int, model: str) -> ConfigError:
    """The model has no positions for so many tokens."""
    return ConfigError(
        "longer than the model's positions reach",
        where="data.seq_len",
        found=found,
        expected=f"at most {most} for {model}",
        remedy=f"choose data.seq_len={most} or less",
    )


def ids_without_embedding(where: str, last: int, vocabulary: int) -> ModelFileError:
    """The tokenizer reaches past the table."""
    return ModelFileError(
        "the tokenizer has ids that the model has no embedding for",
        where=where,
        found=f"id {last}",
        expected=f"less than vocab_size ({vocabulary})",
        remedy="take tokenizer.json of the same model, or resize its embedding and save it again",
    )


def quantized_already(where: str, found: str, formats: Iterable[str]) -> ModelFileError:
    """Somebody's 4-bit weights would be rounded twice, or misread."""
    return ModelFileError(
        "the weights are quantized already",
        where=where,
        found=found,
        expected=f"weights in {', '.join(sorted(formats))}",
        remedy="take the model that these weights were made from",
    )


def blocks_straddle(where: str, found: str, expected: str) -> ConfigError:
    """Blocks that no width divides give wrong sums in silence (bitsandbytes on CPU)."""
    return ConfigError(
        "4-bit blocks would straddle the rows of layers",
        where=where,
        found=found,
        expected=expected,
        remedy="choose a smaller quant.block_size, leave those layers out with quant.skip, or "
        "choose backend=lora",
    )


def another_in_the_adapter(where: str, found: object, theirs: object, adapter: Path) -> ConfigError:
    """A setting is not that of the adapter that training starts from."""
    return ConfigError(
        "is not that of the adapter to start from",
        where=where,
        found=found,
        expected=f"{theirs}, as {adapter} has",
        remedy=f"add {where}={theirs}, or start from another adapter",
    )
