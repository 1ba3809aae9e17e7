"""One pass through a causal model of transformers: hidden states where tokens are learned, logits.

Shapes: B sequences, T tokens, D hidden width, M supervised positions, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mens_exp.model import attention

if TYPE_CHECKING:
    from mens_exp.data.batch import Batch

__all__ = ["hidden_states", "logits"]


def hidden_states(causal_lm: Any, batch: Batch) -> torch.Tensor:
    """Return hidden states at the batch's supervised positions, ``[M, D]``."""
    packed = batch.documents is not None
    ids_BT = batch.input_ids_BT
    output = causal_lm.base_model(
        input_ids=ids_BT,
        position_ids=batch.position_ids_BT,
        attention_mask=attention.no_mask(ids_BT) if packed else batch.attention_mask_BT,
        use_cache=False,
        **({"documents": batch.documents} if packed else {}),
    )
    hidden_BTD: torch.Tensor = output.last_hidden_state
    return hidden_BTD.flatten(0, 1).index_select(0, batch.predict_M)


def logits(causal_lm: Any, hidden_MD: torch.Tensor) -> torch.Tensor:
    """Return logits ``[M, V]``, squeezed where the model does so."""
    logits_MV: torch.Tensor = causal_lm.get_output_embeddings()(hidden_MD)
    cap = getattr(causal_lm.config, "final_logit_softcapping", None)
    return logits_MV if cap is None else cap * torch.tanh(logits_MV / cap)
