"""Continuation of many prompts at once: greedy, or drawn.

Shapes: B prompts, T tokens of the longest.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.backends.sampling import Draw, StopWatch
from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.backends.sampling import Sampling, Stops

__all__ = ["evaluating", "greedy"]


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode inside the block, then each module back into its own."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def greedy(
    model: Any,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    end_ids: set[int],
    pad_id: int,
    sampling: Sampling | None = None,
    stops: Stops | None = None,
) -> list[list[int]]:
    """Continue prompts, padded on the left, until an end id, a stop text or the limit.

    Dropout is off whatever mode the model is in, and the sampling settings that its files may
    carry (a repetition penalty, say) play no part.

    Args:
        model: a transformers model.
        prompts: ids of each.
        max_new_tokens: the longest answer.
        end_ids: ids that end one.
        pad_id: fills what stands before shorter prompts.
        sampling: how tokens are drawn; None takes the likeliest.
        stops: texts that end an answer.

    Returns:
        The new ids of each prompt, its end id or stop text included where it ended.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    width = max(map(len, prompts))
    ids_BT = torch.full((len(prompts), width), pad_id, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt) :] = torch.tensor(prompt)
        mask_BT[row, width - len(prompt) :] = 1
    watch = StopWatch(stops) if stops is not None else None
    processors: Any = LogitsProcessorList([Draw(sampling).as_processor] if sampling else [])
    criteria: Any = StoppingCriteriaList([_criterion(watch, width)] if watch else [])
    model.generation_config = GenerationConfig()  # what it holds would fill in what we leave open
    with torch.inference_mode(), evaluating(model), quiet():
        output = model.generate(
            input_ids=ids_BT.to(model.device),
            attention_mask=mask_BT.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(end_ids),
            pad_token_id=pad_id,
            logits_processor=processors,
            stopping_criteria=criteria,
            past_key_values=_cache(model, width + max_new_tokens),
            disable_compile=True,  # which a static cache would start on a GPU, for minutes
        )
    lengths = watch.lengths if watch is not None else {}
    return [
        _until(ids[: lengths.get(row)], end_ids)
        for row, ids in enumerate(output[:, width:].tolist())
    ]


def _cache(model: Any, tokens: int) -> Any:
    """Return a cache of that many positions; one that grows left gigabytes of holes.

    Under autocast of an f32 model keys come out of the rotation in f32 and values out of their
    projection in bf16, and transformers' cache takes one format.
    """
    from transformers import StaticCache

    class OneFormat(StaticCache):  # type: ignore[misc]  # untyped to mypy
        def update(self, key_states: Any, value_states: Any, *rest: Any, **named: Any) -> Any:
            return super().update(key_states, value_states.to(key_states.dtype), *rest, **named)

    return OneFormat(config=model.config, max_cache_len=tokens)


def _criterion(watch: StopWatch, width: int) -> Any:
    """Tell transformers which prompts are at a stop text."""

    def stopped(ids_BT: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        del scores
        new = ids_BT[:, width:].tolist()
        done = [watch.has_stopped(row, ids) for row, ids in enumerate(new)]
        return torch.tensor(done, device=ids_BT.device)

    return stopped


def _until(ids: list[int], end_ids: set[int]) -> list[int]:
    end = next((i for i, token in enumerate(ids) if token in end_ids), len(ids) - 1)
    return ids[: end + 1]
