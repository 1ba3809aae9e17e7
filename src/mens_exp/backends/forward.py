"""The forward pass of a transformers model: hidden states, logits, and an attention-leak check.

Hidden states are those of the supervised positions. With packing, document bounds are passed down
to attention. The known families forward them, but other model code (for example code shipped with a
model) may drop them, and then documents would silently attend to their neighbours. A check before
training therefore compares packed documents with the same documents on their own.

Shapes: B sequences, T tokens, D hidden width, M supervised positions, V vocabulary.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.errors import ModelFileError
from mens_exp.model import attention

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.data.batch import Batch


def backbone(causal_lm: Any) -> Any:
    """Return the part of a causal model that computes hidden states: everything but the head.

    Raises:
        ModelFileError: there is no such part.
    """
    modules = causal_lm._modules  # noqa: SLF001  # direct children
    if causal_lm.base_model_prefix in modules:
        return modules[causal_lm.base_model_prefix]
    from transformers import PreTrainedModel

    models = [module for module in modules.values() if isinstance(module, PreTrainedModel)]
    if len(models) != 1:
        raise ModelFileError(
            "the model has no backbone that is separate from its head",
            where=type(causal_lm).__name__,
            found=", ".join(modules),
            remedy="choose another model",
        )
    return models[0]


def hidden_states(causal_lm: Any, batch: Batch) -> torch.Tensor:
    """Return hidden states at the batch's supervised positions, ``[M, D]``."""
    return _supervised(_passed(causal_lm, batch).last_hidden_state, batch)


def layer_states(
    causal_lm: Any, batch: Batch, layers: Sequence[int]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the result of `hidden_states`, and the states after the given layers, from 1.

    As in transformers' own ``hidden_states``, the states after the last layer are the head's input.

    Raises:
        ModelFileError: the model's code does not return them.
    """
    output = _passed(causal_lm, batch, output_hidden_states=True)
    states, many = output.hidden_states or (), causal_lm.config.num_hidden_layers
    if len(states) != many + 1:
        raise ModelFileError(
            "the model's code does not return the hidden states after each of its layers",
            where=type(causal_lm).__name__,
            found=f"{len(states)} tensors of {many} layers",
            expected=f"{many + 1}, the first before the layers",
            remedy="set objective.hidden_weight=0, or choose another model",
        )
    chosen = tuple(_supervised(states[layer], batch) for layer in layers)
    return _supervised(output.last_hidden_state, batch), chosen


def _passed(causal_lm: Any, batch: Batch, **options: Any) -> Any:
    packed = {}
    if batch.documents is not None:
        packed = {"position_ids": batch.position_ids_BT, "documents": batch.documents}
        if batch.prefixes is not None:
            packed["prefixes"] = batch.prefixes
    ids_BT = batch.input_ids_BT
    return backbone(causal_lm)(
        input_ids=ids_BT,
        attention_mask=attention.no_mask(ids_BT) if packed else batch.attention_mask_BT,
        use_cache=False,
        **packed,
        **options,
    )


def _supervised(hidden_BTD: torch.Tensor, batch: Batch) -> torch.Tensor:
    return hidden_BTD.flatten(0, 1).index_select(0, batch.predict_M)


def logits(causal_lm: Any, hidden_MD: torch.Tensor) -> torch.Tensor:
    """Compute logits ``[M, V]`` from hidden states with the model's own code.

    The model's ``forward`` runs with a stand-in backbone that returns these states, so that
    everything that the model does after its backbone (scale, cap, project) is applied here too.

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
    """Replace the backbone with a stand-in; the real one and its hooks do not run."""
    real, modules = backbone(causal_lm), causal_lm._modules  # noqa: SLF001  # no setter
    name = next(name for name, module in modules.items() if module is real)
    stand_in = _Backbone(real, hidden_BMD)
    modules[name] = stand_in
    try:
        yield stand_in
    finally:
        modules[name] = real


class _Backbone:
    """A backbone that returns the given hidden states and otherwise delegates to the real one."""

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
    """The output of a backbone, by index or attribute; optional parts are None."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


_WINDOW = 4  # tokens; shorter than the documents, as no real window is
_LENGTHS = (7, 9)
_BOUNDS = ((0, 7), (7, 16))


# Relative to a document's norm. A neighbour's values can reach it only through a leak, so rounding
# does not explain a difference. On its own, a document runs through other kernels, and bf16 rounds
# differently. Unverified guesses.
_BY_NEIGHBOUR, _BY_PACKING = 1e-3, 0.05


# Raised by code that does not support document bounds, or expects another form of mask.
MODEL_CODE_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def check_attention_leaks(causal_lm: Any) -> None:
    """Compare documents packed, packed with a different neighbour, alone, and without packing.

    Raises:
        ModelFileError: the model's code does not accept document bounds, or a document's hidden
            states depend on its neighbour or its position in the pack.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = causal_lm.config.vocab_size
    ids = torch.randint(vocabulary, (1, sum(_LENGTHS)), generator=generator).to(causal_lm.device)
    changed = ids.clone()
    changed[:, : _LENGTHS[0]] = (changed[:, : _LENGTHS[0]] + 1) % vocabulary
    second = slice(*_BOUNDS[1])
    try:
        with torch.no_grad(), _narrow_windows(causal_lm):
            packed = _hidden(causal_lm, ids, _BOUNDS)[:, second]
            other = _hidden(causal_lm, changed, _BOUNDS)[:, second]
            alone = _hidden(causal_lm, ids[:, second], ((0, _LENGTHS[1]),))
            plain = backbone(causal_lm)(input_ids=ids[:, second], use_cache=False)
    except MODEL_CODE_ERRORS as error:
        raise _refusal(causal_lm, str(error)) from error
    for what, found, limit in (
        ("another neighbour", other, _BY_NEIGHBOUR),
        ("no neighbour", alone, _BY_PACKING),
        ("no packing", plain.last_hidden_state, _BY_PACKING),
    ):
        moved = float((found - packed).float().norm() / packed.float().norm())
        if not moved <= limit:
            raise _refusal(causal_lm, f"{what} moves a document's hidden states by {moved:.1%}")


@contextmanager
def _narrow_windows(causal_lm: Any) -> Iterator[None]:
    """Narrow the attention windows, so that short documents reveal code that ignores them.

    Some code (PhiMoE's) applies the window in transformers' masks but not in its attention, so it
    attends to whole documents when they are packed.
    """
    holders = [causal_lm.config, *causal_lm.modules()]
    kept = [
        (vars(holder), window)
        for holder in holders
        if type(window := vars(holder).get("sliding_window")) is int
    ]
    try:
        for held, _ in kept:
            held["sliding_window"] = _WINDOW
        yield
    finally:
        for held, window in kept:
            held["sliding_window"] = window


def _hidden(causal_lm: Any, ids: torch.Tensor, bounds: tuple[tuple[int, int], ...]) -> torch.Tensor:
    positions = torch.cat([torch.arange(b - a, device=ids.device) for a, b in bounds])[None]
    hidden: torch.Tensor = backbone(causal_lm)(
        input_ids=ids,
        position_ids=positions,
        attention_mask=attention.no_mask(ids),
        use_cache=False,
        documents=bounds,
    ).last_hidden_state
    return hidden


def _refusal(causal_lm: Any, found: str) -> ModelFileError:
    return ModelFileError(
        "the model's code cannot keep packed documents apart",
        where=type(causal_lm).__name__,
        found=found,
        expected="attention through transformers' attention interface, all arguments passed on",
        remedy="set data.packing=false; or model.trust_remote_code=false, where transformers has "
        "the model itself",
    )
