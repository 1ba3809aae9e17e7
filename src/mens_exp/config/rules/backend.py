"""Rules of each backend: the settings that it goes together with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.config.backend import ProxyConfig
from mens_exp.config.fields import shown
from mens_exp.config.lora import LoraInit, LoraVariant
from mens_exp.config.quant import ComputeDtype
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["PROXY_STACK", "problems"]

PROXY_STACK = "proxy_stack"  # the proxy's only target
_OWN_IDS_ONLY = frozenset({"qlora", "lora", "full", "proxy"})  # the planner's gate 2 refuses vox


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with `backend`, alone and beside the other groups."""
    if isinstance(config.backend, ProxyConfig):
        yield from _proxy(config, config.backend)
    if config.tokenizer.name == "vox":
        yield from _vox(config)
    if config.backend.name == "burn" and config.quant.compute_dtype is not ComputeDtype.f32:
        yield ConfigError(
            "the research lane computes in f32",
            where="quant.compute_dtype",
            found=config.quant.compute_dtype.value,
            expected="f32",
            remedy="choose backend=lora for bf16",
        )


def _vox(config: RunConfig) -> Iterator[ConfigError]:
    if not config.tokenizer.allow_control_text:
        yield ConfigError(
            "the vox tokenizer has no way to tell a row's markers from the template's",
            where="tokenizer.allow_control_text",
            found=False,
            expected="true, or tokenizer=hf",
        )
    judged = _encodes_for_it(config) and config.backend.name not in _OWN_IDS_ONLY
    if judged and _is_pretrained(config) and not config.tokenizer.allow_unrelated_rows:
        yield ConfigError(
            "the ids 0 to 130 of the vox tokenizer select unrelated rows of this model's embedding",
            where="tokenizer",
            found=f"vox, for {config.model.name}",
            expected="hf, the model's own tokenizer, or a model with random weights",
            remedy="choose tokenizer=hf, or add tokenizer.allow_unrelated_rows=true to train on "
            "them all the same",
        )


def _is_pretrained(config: RunConfig) -> bool:
    return config.model.source != "random"


def _encodes_for_it(config: RunConfig) -> bool:
    """Tell whether the task puts ids into the command's own model."""
    return config.task.name in {"train", "plan"} or config.path == "base"


def _proxy(config: RunConfig, backend: ProxyConfig) -> Iterator[ConfigError]:
    if backend.require_full_stack and (backend.lm_head_only or backend.max_layers == 0):
        yield ConfigError(
            "a head alone is no full stack",
            where="backend.require_full_stack",
            found=True,
            expected="false, or middle projections",
        )
    yield from _only_plain_lora(config)


def _only_plain_lora(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what the proxy's own LoRA has no place for."""
    lora = config.lora
    usual: dict[str, tuple[Any, Any]] = {
        "targets": (lora.targets, [PROXY_STACK]),
        "variant": (lora.variant, LoraVariant.lora),
        "init": (lora.init, LoraInit.default),
        "rank_pattern": (lora.rank_pattern, {}),
        "alpha_pattern": (lora.alpha_pattern, {}),
    }
    for name, (found, expected) in usual.items():
        if found != expected:
            yield ConfigError(
                "the proxy stack has plain LoRA on every projection",
                where=f"lora.{name}",
                found=getattr(found, "value", found),
                expected=shown(getattr(expected, "value", expected)),
                remedy="choose lora=proxy_stack, or backend=qlora",
            )
