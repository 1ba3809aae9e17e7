"""LoRA layers on a frozen base, through PEFT.

Shapes: R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.nearest import expected_name
from mens_exp.errors import ConfigError, Problems
from mens_exp.model.quiet import quiet
from mens_exp.quant.bnb import quantized_linears

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from mens_exp.config.root import RunConfig

__all__ = ["ADAPTER", "adapted", "lora_layers", "matrices"]

ADAPTER = "default"  # PEFT's own name for a single adapter


def adapted(model: Any, config: RunConfig) -> Any:
    """Put PEFT's LoRA layers on the targets.

    Raises:
        ConfigError: a target matches no 4-bit linear module.
    """
    from peft import LoraConfig, get_peft_model

    _check_targets(model, config.lora.targets)
    lora = LoraConfig(
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        lora_dropout=config.lora.dropout,
        target_modules=list(config.lora.targets),
        task_type="CAUSAL_LM",
    )
    with quiet():
        return get_peft_model(model, lora, adapter_name=ADAPTER)


def _check_targets(model: torch.nn.Module, targets: Sequence[str]) -> None:
    known = {path.rpartition(".")[2] for path in quantized_linears(model)}
    Problems.raise_if(
        [
            ConfigError(
                "matches no 4-bit linear module",
                where="lora.targets",
                found=target,
                expected=expected_name(target, known),
            )
            for target in sorted(set(targets) - known)
        ]
    )


def lora_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield PEFT's LoRA layers by module path."""
    from peft.tuners.lora import LoraLayer

    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield path, module


def matrices(module: Any) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """Return A ``[R, I]`` and B ``[O, R]``."""
    return module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
