"""One pass through a causal model of transformers: hidden states where tokens are learned, logits.

Shapes: B sequences, T tokens, D hidden width, M supervised positions, V vocabulary.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.errors import ModelFileError
from mens_exp.model import attention

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.data.batch import Batch

__all__ = ["backbone", "hidden_states", "logits"]


def backbone(causal_lm: Any) -> Any:
    """Return the part of a causal model that makes hidden states: all but its head.

    Raises:
        ModelFileError: no part does.
    """
    modules = causal_lm._modules  # noqa: SLF001  # of one level
    if causal_lm.base_model_prefix in modules:
        return modules[causal_lm.base_model_prefix]
    from transformers import PreTrainedModel

    models = [module for module in modules.values() if isinstance(module, PreTrainedModel)]
    if len(models) != 1:
        raise ModelFileError(
            "the model has no backbone apart from its head",
            where=type(causal_lm).__name__,
            found=", ".join(modules),
            remedy="choose another model",
        )
    return models[0]


def hidden_states(causal_lm: Any, batch: Batch) -> torch.Tensor:
    """Return hidden states at the batch's supervised positions, ``[M, D]``."""
    packed = batch.documents is not None
    ids_BT = batch.input_ids_BT
    output = backbone(causal_lm)(
        input_ids=ids_BT,
        attention_mask=attention.no_mask(ids_BT) if packed else batch.attention_mask_BT,
        use_cache=False,
        **({"position_ids": batch.position_ids_BT, "documents": batch.documents} if packed else {}),
    )
    hidden_BTD: torch.Tensor = output.last_hidden_state
    return hidden_BTD.flatten(0, 1).index_select(0, batch.predict_M)


def logits(causal_lm: Any, hidden_MD: torch.Tensor) -> torch.Tensor:
    """Return the logits that the model's own code makes of hidden states, ``[M, V]``.

    The model's ``forward`` runs with a backbone that returns these states, so that whatever the
    model does behind its backbone (scale, cap, project) is done here too.

    Raises:
        ModelFileError: the model's code computes logits from something else.
    """
    with _backbone_returns(causal_lm, hidden_MD[None]) as stand_in:
        ids_BM = torch.zeros((1, len(hidden_MD)), dtype=torch.long, device=hidden_MD.device)
        try:
            logits_BMV: torch.Tensor = causal_lm(input_ids=ids_BM, use_cache=False).logits
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise _from_elsewhere(causal_lm, f"{type(error).__name__}: {error}") from error
    if stand_in.calls != 1:
        calls = f"{stand_in.calls} calls of {type(backbone(causal_lm)).__name__}"
        raise _from_elsewhere(causal_lm, calls)
    return logits_BMV[0]


def _from_elsewhere(causal_lm: Any, found: str) -> ModelFileError:
    return ModelFileError(
        "the model's code does not compute its logits from its backbone's hidden states alone",
        where=type(causal_lm).__name__,
        found=found,
        expected="one call of the backbone, and its last hidden states used",
        remedy="choose another model",
    )


@contextmanager
def _backbone_returns(causal_lm: Any, hidden_BMD: torch.Tensor) -> Iterator[_Backbone]:
    """Put a stand-in in place of the backbone; the real one and its hooks are not run."""
    real, modules = backbone(causal_lm), causal_lm._modules  # noqa: SLF001  # no setter
    name = next(name for name, module in modules.items() if module is real)
    stand_in = _Backbone(real, hidden_BMD)
    modules[name] = stand_in
    try:
        yield stand_in
    finally:
        modules[name] = real


class _Backbone:
    """A backbone that returns given hidden states; everything else is the real one's."""

    def __init__(self, real: Any, hidden_BMD: torch.Tensor) -> None:
        self._real, self._hidden_BMD = real, hidden_BMD
        self._decoder = real.get_decoder() if hasattr(real, "get_decoder") else None
        self.calls = 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        return _Output([self._hidden_BMD])

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        return self if found is self._decoder else found


class _Output(tuple[torch.Tensor, ...]):
    """The output of a backbone, by place or by name; a part that it may omit is None."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
