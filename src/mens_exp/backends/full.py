"""Full fine-tuning of the causal model: the baseline that adapters are compared with.

Weights, gradients and optimizer state are f32; matmuls run in ``quant.compute_dtype``.

Shapes: M supervised positions, D hidden width, V vocabulary.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mens_exp.backends.frozen_base import FrozenWeights, load_base, published_config
from mens_exp.backends.protocol import NonPeftBackend
from mens_exp.backends.qlora import QloraBackend, noise_on
from mens_exp.backends.saved_model import write_model
from mens_exp.errors import RequestError
from mens_exp.layout.shape import shape_of
from mens_exp.lora.method import AdapterMethod
from mens_exp.model.compiled import NUMERICS
from mens_exp.quant.binding import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np

    from mens_exp.artifacts.adapter_v3 import AdapterManifest
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.peft_format import Stack
    from mens_exp.model.sources import BaseModel


class FullBackend(NonPeftBackend, QloraBackend):
    """The causal model without adapters; forward pass, head and generation are those of QLoRA."""

    def __init__(self, config: RunConfig, base: BaseModel, device: torch.device) -> None:
        """Load the base model in f32 and make every weight trainable.

        Raises:
            SetupError: the device cannot hold the model.
        """
        torch.nn.Module.__init__(self)  # the parent's __init__ would add an adapter
        self.base, self.config, self.device = base, config, device
        self.compute_dtype = compute_dtype(config.quant)
        self.shape = shape_of(config.model)
        self.model = load_base(config, base, device, dtype=torch.float32)
        self.causal_lm = self.model
        self.model.requires_grad_(requires_grad=True)
        self.method, self.layers = AdapterMethod(), {}  # none is adapted
        self.stacks: list[Stack] = []
        self.dropouts = []
        self.inputs = []
        self.weights = FrozenWeights()
        self.noise = noise_on(self.causal_lm, config)

    @property
    def has_adapter(self) -> bool:
        """False: the weights themselves are trained."""
        return False

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return every f32 weight by its transformers name; a tied head is the embedding."""
        return dict(self.causal_lm.named_parameters())

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """Use the published weights, read again from disk, inside the block."""
        tuned = {name: p.detach().to("cpu", copy=True) for name, p in self.trainable().items()}
        published = load_base(self.config, self.base, torch.device("cpu"), dtype=torch.float32)
        self._put(dict(published.named_parameters()))
        del published
        try:
            yield
        finally:
            self._put(tuned)

    def _put(self, values: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.trainable().items():
                parameter.copy_(values[name])

    def write_weights(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory, atomically."""
        source, published = self.base.directory, published_config(self.base)
        write_model(self.causal_lm, self.trainable(), source, directory, config=published)

    def _no_adapter(self) -> NoReturn:
        raise RequestError(
            "every weight was trained, so there is no adapter",
            where="backend",
            found="full",
            expected="a run of a backend with an adapter: qlora, lora, proxy or burn",
            remedy="load the run's weights/ as a model: model=hf model.id=<it>",
        )

    def adapter(self, config: RunConfig) -> tuple[AdapterManifest, dict[str, np.ndarray]]:
        """Refuse: there is no adapter.

        Raises:
            RequestError: always; see ``has_adapter``.
        """
        del config
        self._no_adapter()

    def load_adapter(self, tensors: dict[str, np.ndarray]) -> None:
        """Refuse: the model has no adapter to load into.

        Raises:
            RequestError: always.
        """
        del tensors
        self._no_adapter()

    def write_peft(self, directory: Path) -> None:
        """Refuse: there is no adapter.

        Raises:
            RequestError: always.
        """
        del directory
        self._no_adapter()

    def facts(self) -> dict[str, Any]:
        """Report what was built, as read back from the model."""
        parameters = self.trainable().values()
        count = sum(p.numel() for p in parameters)
        return {
            "trainable_parameters": count,
            "trainable_matrices": len(parameters),
            "total_parameters": count,
            **self.shape.facts(),
            "quantized_linears": 0,
            "quant": "none",
            "compute_dtype": str(self.compute_dtype).removeprefix("torch."),
            "attention": str(self.causal_lm.config._attn_implementation),  # noqa: SLF001
            **({"numerics": {"layers": NUMERICS}} if self.compiled_layers is not None else {}),
        }
