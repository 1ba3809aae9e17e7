"""The backend protocol: what training, evaluation, export and chat ask of a trained graph.

`NonPeftBackend` answers for graphs that PEFT has no form for; `Stream` produces one answer, token
by token, so that it can be shown as it is made.

Shapes: M supervised positions, D hidden width, T tokens, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mens_exp.backends.generation import evaluating
from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy as np

    from mens_exp.artifacts.adapter_v3 import AdapterManifest
    from mens_exp.backends.generation import Trace
    from mens_exp.config.root import RunConfig
    from mens_exp.data.batch import Batch


class Backend(Protocol):
    """A trained graph: base model, quantizer and adapter. Also a ``torch.nn.Module``."""

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return hidden states at the batch's supervised positions, ``[M, D]``."""

    def head(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Return logits ``[M, V]``."""

    def begin(self, micro_batch: int) -> None:
        """Say which micro-batch of the stream comes next; dropout masks depend on it."""

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return every trained parameter by name; nothing else has a gradient."""

    def base_only(self) -> AbstractContextManager[None]:
        """Switch the adapter off inside the block."""

    def generate(self, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
        """Continue prompts; `greedy` tells the options."""

    def next_logits(self, ids: Sequence[int], cache: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the logits ``[V]`` that follow ids, and the cache grown by these."""

    def trace(self, ids: Sequence[int]) -> Trace:
        """Return the hidden states after each layer, and the logits, of one document."""

    def adapter(self, config: RunConfig) -> tuple[AdapterManifest, dict[str, np.ndarray]]:
        """Return the adapter under logical names, with its manifest."""

    def load_adapter(self, tensors: dict[str, np.ndarray]) -> None:
        """Put an adapter's tensors, under logical names, into the graph."""

    def start_state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint's base depends on, beside the published weights."""

    def load_start_state(self, taken: dict[str, torch.Tensor]) -> None:
        """Rebuild the base of a checkpoint from its :meth:`start_state`."""

    def quantization_errors(self) -> dict[str, tuple[float, float]]:
        """Return, by layer, the quantization error before and after the adapter's start.

        Empty where the start does not depend on it. An error is ``|W − Ŵ| / |W|``, Frobenius.
        """

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained; without one the weights are, see `write_weights`."""

    def write_weights(self, directory: Path) -> None:
        """Write the trained weights as a Hugging Face directory."""

    @property
    def has_peft_view(self) -> bool:
        """Whether PEFT knows such a graph; without one there is nothing for `write_peft`."""

    def write_peft(self, directory: Path) -> None:
        """Write the adapter as a PEFT directory."""

    @property
    def peft_view_is_exact(self) -> bool:
        """Whether the PEFT directory, loaded on the plainly quantized base, is this very model."""

    def as_peft_view(self) -> AbstractContextManager[None]:
        """Make it, inside the block, what loading the PEFT directory on the base gives."""

    @property
    def max_positions(self) -> int:
        """Longest sequence the model was made for, in tokens."""

    def facts(self) -> dict[str, Any]:
        """Return what was really built, read back from the graph."""


class NonPeftBackend:
    """Such a graph's answers to the backend protocol's questions about PEFT and starts."""

    def start_state(self) -> dict[str, torch.Tensor]:
        """Return nothing: a checkpoint depends on the published weights alone."""
        return {}

    def load_start_state(self, taken: dict[str, torch.Tensor]) -> None:
        """Do nothing, as :meth:`start_state` gives nothing."""
        assert not taken, "made by another backend"

    def quantization_errors(self) -> dict[str, tuple[float, float]]:
        """Return nothing: the start does not depend on them."""
        return {}

    @property
    def has_peft_view(self) -> bool:
        """PEFT knows no such graph."""
        return False

    @property
    def peft_view_is_exact(self) -> bool:
        """There is no view that could differ."""
        return True

    @contextmanager
    def as_peft_view(self) -> Iterator[None]:
        """Leave the graph as it is: there is no view."""
        yield


def step(model: Any, ids: Sequence[int], cache: Any = None) -> tuple[torch.Tensor, Any]:
    """Feed ids to a causal model.

    Args:
        model: a transformers model.
        ids: the tokens that its cache does not hold yet.
        cache: what an earlier call returned; None begins a sequence.

    Returns:
        The logits of the token that follows, ``[V]``, f32, and the cache.
    """
    ids_T = torch.tensor([list(ids)], device=model.device)
    with torch.inference_mode(), evaluating(model), quiet():
        output = model(input_ids=ids_T, past_key_values=cache, use_cache=True)
    return output.logits[0, -1].float(), output.past_key_values


class Stream:
    """The answer to one prompt under one condition; each call of `advance` adds a token.

    The condition is entered for each token alone, so that streams of base and tuned model can
    take turns on one graph.
    """

    def __init__(
        self,
        backend: Backend,
        prompt: Sequence[int],
        *,
        end_ids: set[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        condition: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Begin an answer.

        Args:
            backend: the graph.
            prompt: the ids before the answer; at least one.
            end_ids: ids that end it.
            max_new_tokens: the longest answer.
            temperature: 0 takes the likeliest token; above, tokens are drawn.
            seed: of the drawing.
            condition: entered around each step, ``backend.base_only`` for the base model.
        """
        self.backend = backend
        self.end_ids = end_ids
        self.max_new_tokens = min(max_new_tokens, backend.max_positions - len(prompt))
        self.temperature = temperature
        self.condition = condition
        self.ids: list[int] = []
        self._pending = list(prompt)
        self._cache: Any = None
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def is_ended(self) -> bool:
        """Whether the answer ended by an end id."""
        return bool(self.ids) and self.ids[-1] in self.end_ids

    @property
    def is_done(self) -> bool:
        """Whether the answer ended, or reached its limit."""
        return self.is_ended or len(self.ids) >= self.max_new_tokens

    def advance(self) -> None:
        """Add one token, unless the answer is done."""
        if self.is_done:
            return
        with self.condition():
            logits_V, self._cache = self.backend.next_logits(self._pending, self._cache)
        token = self._choose(logits_V.cpu())
        self.ids.append(token)
        self._pending = [token]

    def _choose(self, logits_V: torch.Tensor) -> int:
        if self.temperature == 0:
            return int(logits_V.argmax())
        chances = torch.softmax(logits_V / self.temperature, dim=-1)
        return int(torch.multinomial(chances, 1, generator=self._generator))
