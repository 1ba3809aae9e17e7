"""LN tuning (arXiv:2312.11420): the weights and biases of norms are trained, and nothing else.

The tuned values replace those of the base, which stay in the model: without the adapter, it is the
base, bit for bit. As in PEFT, a norm computes with its own code, in the dtype of its own weight.
Here the trained values are f32 and rounded to that dtype in every pass, so that small steps add up.

Shapes: D width of a norm.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from mens_exp.layout.norms import VALUES, peft_config, peft_name
from mens_exp.layout.targets import shortest_names
from mens_exp.lora.method import AdapterMethod

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from mens_exp.config.lora import LoraConfig
    from mens_exp.layout.families import Family
    from mens_exp.layout.modules import LinearModule
    from mens_exp.lora.method import Tensors


class TunedVector(torch.nn.Module):
    """The trained values ``[D]`` of one vector of a norm, f32: a logical layer of the adapter."""

    def __init__(self, base_D: torch.Tensor) -> None:
        """Start with the values of the base."""
        super().__init__()
        self.ln_tuning = torch.nn.Parameter(base_D.detach().clone().float())
        self.adapts = True


class TunedNorm(torch.nn.Module):
    """A norm, and tuned values of some of its vectors."""

    def __init__(self, base: torch.nn.Module, vectors: Collection[str]) -> None:
        """Tune vectors of a norm.

        Args:
            base: the norm.
            vectors: names of its parameters.
        """
        super().__init__()
        self.base_layer = base
        for name in vectors:
            self.add_module(f"tuned_{name}", TunedVector(base.get_parameter(name)))

    @property
    def tuned(self) -> dict[str, TunedVector]:
        """The tuned values by the name of the vector that they replace."""
        named = {name.removeprefix("tuned_"): one for name, one in self.named_children()}
        return {name: one for name, one in named.items() if isinstance(one, TunedVector)}

    def values(self) -> dict[str, torch.Tensor]:
        """Return the tuned values in the base's dtype; none if the adapter is off."""
        base = self.base_layer
        return {
            name: one.ln_tuning.to(base.get_parameter(name).dtype)
            for name, one in self.tuned.items()
            if one.adapts
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the norm's own code with the tuned values, unless the adapter is off."""
        values = self.values()
        if not values:
            return self.base_layer(*args, **kwargs)
        return torch.func.functional_call(self.base_layer, values, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the norm, such as its weight, which some models read."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            base = super().__getattr__("base_layer")
            values = self.values()
            return values[name] if name in values else getattr(base, name)


class LnTuning(AdapterMethod):
    """Tuned values in place of those of norms."""

    def place(
        self, model: Any, lora: LoraConfig, modules: Sequence[LinearModule], family: Family
    ) -> tuple[Any, dict[str, Any]]:
        """Wrap each norm once; see `AdapterMethod.place`."""
        del lora, family
        vectors: dict[str, list[LinearModule]] = {}
        for one in modules:
            vectors.setdefault(one.path, []).append(one)
        layers: dict[str, TunedVector] = {}
        for path, listed in vectors.items():
            names = {str(one.norm): one.logical for one in listed}
            norm = TunedNorm(model.get_submodule(path), names)
            model.set_submodule(path, norm)
            layers |= {names[name]: one for name, one in norm.tuned.items()}
        return model, layers

    def weight(self, weight_OI: torch.Tensor, tensors: Tensors, *, scale: float) -> torch.Tensor:
        """Return the tuned values, in place of the base's ``[D]``."""
        del scale
        return tensors[VALUES].to(weight_OI)

    def write_peft(self, model: Any, directory: Path, *, base: str, revision: str | None) -> None:
        """Write PEFT's configuration, and the tensors by PEFT's names."""
        modules = dict(model.named_modules())
        norms = {path: one for path, one in modules.items() if isinstance(one, TunedNorm)}
        config = peft_config(
            shortest_names(list(norms), list(modules)), base=base, revision=revision
        )
        text = json.dumps(config, indent=2, sort_keys=True)
        (directory / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
        tensors = {
            peft_name(path, name): one.ln_tuning.detach().cpu().contiguous()
            for path, norm in norms.items()
            for name, one in norm.tuned.items()
        }
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


LN_TUNING = LnTuning()
