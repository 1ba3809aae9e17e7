"""The backend protocol: the interface of a trained model to training, evaluation, export and chat.

`NonPeftBackend` implements the PEFT methods for models that PEFT cannot represent. `Stream`
generates one answer token by token, so that it can be displayed as it is generated.

Shapes: M supervised positions, D hidden width, T tokens, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy as np

    from mens_exp.artifacts.adapter_v3 import AdapterManifest
    from mens_exp.backends.generation import Trace
    from mens_exp.config.root import RunConfig
    from mens_exp.data.batch import Batch
    from mens_exp.model.liger import FusedHead


class Backend(Protocol):
    """A trained model: base, quantizer and adapter. Also a ``torch.nn.Module``."""

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return hidden states at the batch's supervised positions, ``[M, D]``."""

    def head(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Return logits ``[M, V]``."""

    def begin(self, micro_batch: int) -> None:
        """Set the index of the next micro-batch in the stream; dropout masks depend on it."""

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return every trainable parameter by name; nothing else has a gradient."""

    def base_only(self) -> AbstractContextManager[None]:
        """Disable the adapter inside the block."""

    def generate(self, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
        """Continue prompts; see `greedy` for the options."""

    def next_logits(self, ids: Sequence[int], cache: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the logits ``[V]`` after ids, and the cache extended by them."""

    def trace(self, ids: Sequence[int]) -> Trace:
        """Return the hidden states after each layer, and the logits, of one document."""

    def adapter(self, config: RunConfig) -> tuple[AdapterManifest, dict[str, np.ndarray]]:
        """Return the adapter under logical names, with its manifest."""

    def load_adapter(self, tensors: dict[str, np.ndarray]) -> None:
        """Load an adapter's tensors, under logical names, into the model."""

    def start_state(self) -> dict[str, torch.Tensor]:
        """Return the state of a checkpoint's base that the published weights do not determine."""

    def load_start_state(self, taken: dict[str, torch.Tensor]) -> None:
        """Rebuild the base of a checkpoint from its :meth:`start_state`."""

    def quantization_errors(self) -> dict[str, tuple[float, float]]:
        """Return each layer's quantization error before and after the adapter's initialisation.

        Empty if the initialisation does not depend on it. An error is ``|W − Ŵ| / |W|``, Frobenius.
        """

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained; if not, the weights are: see `write_weights`."""

    def write_weights(self, directory: Path) -> None:
        """Write the trained weights as a Hugging Face directory."""

    @property
    def has_peft_view(self) -> bool:
        """Whether PEFT can represent the model; if not, `write_peft` refuses."""

    def write_peft(self, directory: Path) -> None:
        """Write the adapter as a PEFT directory."""

    @property
    def peft_view_is_exact(self) -> bool:
        """Whether the PEFT directory, loaded on the quantized base, is exactly this model."""

    def as_peft_view(self) -> AbstractContextManager[None]:
        """Behave, inside the block, like the PEFT directory loaded on the base."""

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model supports, in tokens."""

    def facts(self) -> dict[str, Any]:
        """Return what was actually built, read back from the model."""


class NonPeftBackend:
    """Backend methods about PEFT and initialisation for models that PEFT cannot represent."""

    fused_head: FusedHead | None = None

    def start_state(self) -> dict[str, torch.Tensor]:
        """Return nothing: a checkpoint depends only on the published weights."""
        return {}

    def load_start_state(self, taken: dict[str, torch.Tensor]) -> None:
        """Do nothing: :meth:`start_state` is empty."""
        assert not taken, "made by another backend"

    def quantization_errors(self) -> dict[str, tuple[float, float]]:
        """Return nothing: the initialisation does not depend on quantization errors."""
        return {}

    @property
    def has_peft_view(self) -> bool:
        """False: PEFT cannot represent this model."""
        return False

    @property
    def peft_view_is_exact(self) -> bool:
        """True: there is no PEFT view that could differ."""
        return True

    @contextmanager
    def as_peft_view(self) -> Iterator[None]:
        """Leave the model unchanged: there is no PEFT view."""
        yield


class Stream:
    """The answer to one prompt under one condition; each call of `advance` adds a token.

    The condition is entered and left for each token, so that streams of the base and the tuned
    model can alternate on the same model object.
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
        """Start an answer.

        Args:
            backend: the model.
            prompt: the ids before the answer; at least one.
            end_ids: ids that end the answer.
            max_new_tokens: maximum length of the answer.
            temperature: 0 is greedy decoding; above 0, tokens are sampled.
            seed: sampling seed.
            condition: entered around each step; ``backend.base_only`` for the base model.
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
        """Whether the answer ended with an end id."""
        return bool(self.ids) and self.ids[-1] in self.end_ids

    @property
    def is_done(self) -> bool:
        """Whether the answer ended or reached its limit."""
        return self.is_ended or len(self.ids) >= self.max_new_tokens

    def advance(self) -> None:
        """Generate one token, unless the answer is done."""
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
