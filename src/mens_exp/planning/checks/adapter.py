"""Checks of the adapter: its target modules, and the adapter that training starts from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.backend import ProxyConfig
from mens_exp.config.fields import range_problems
from mens_exp.config.model import HfModel
from mens_exp.config.optim import MuonConfig
from mens_exp.config.trainer import Strategy
from mens_exp.corpus.source import labelling_of
from mens_exp.errors import ConfigError
from mens_exp.layout.model_cache import marked_weights, ready_directory
from mens_exp.layout.shape import HEAD, family_for, shape_of
from mens_exp.layout.starting_adapter import StartingAdapter, find, read
from mens_exp.layout.targets import (
    adapter_shapes,
    chosen,
    pattern_values,
    target_problems,
    without_experts,
)
from mens_exp.planning.messages import another_in_the_adapter
from mens_exp.rows.cache import cache_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.config.lora import LoraConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError
    from mens_exp.layout.modules import LinearModule
    from mens_exp.layout.shape import Shape


def check_lora(config: RunConfig) -> Iterator[MensError]:
    """Yield the problems of the modules that get an adapter."""
    if isinstance(config.backend, ProxyConfig):
        return  # the stack itself is the target
    if any(range_problems(config.model)):
        return  # already reported, and the model then has no shape
    lora, shape = config.lora, shape_of(config.model)
    problems = target_problems(lora, shape)
    yield from problems
    modules = () if problems else chosen(lora, shape)
    if any(one.logical == HEAD for one in modules):
        yield from _head_problems(lora)
    biased = sorted({one.kind for one in modules} & set(shape.family.biased))
    if biased and lora.spec.not_on_biased is not None:
        yield ConfigError(
            lora.spec.not_on_biased,
            where="lora.targets",
            found=f"{', '.join(biased)} of a {shape.family.model_type} model",
            expected="layers without a bias",
            remedy="choose other targets, or lora.variant=lora",
        )
    yield from _rank_problems(lora, modules)
    yield from _virtual_problems(config)
    yield from lora.spec.problems(config, modules)
    if lora.init.spec.from_rows:
        yield from _inputs_problems(lora, modules, shape)
    if any(one.stack is not None for one in modules):
        yield from _expert_problems(config, without_experts(shape.family, modules))


def _rank_problems(lora: LoraConfig, modules: Sequence[LinearModule]) -> Iterator[MensError]:
    """Refuse a rank from which the method would use a full matrix instead of a low-rank pair."""
    limits = {one.kind: lora.spec.largest_rank(out=one.out, width=one.width) for one in modules}
    limited = {kind: most for kind, most in limits.items() if most is not None and most < lora.r}
    if limited:
        kind = min(limited, key=lambda one: limited[one])
        yield ConfigError(
            f"the rank is too large for {lora.spec.name}, which would then use a whole matrix",
            where="lora.r",
            found=f"{lora.r}, and at most {limited[kind]} fits {kind}",
            expected=f"at most {limited[kind]}",
            remedy=f"set lora.r={limited[kind]}, or choose other targets",
        )


_LEAST = 2  # tokens of a document, of which the second is predicted


def _virtual_problems(config: RunConfig) -> Iterator[MensError]:
    """Refuse virtual tokens that leave no room for a document within `data.seq_len`."""
    many = config.lora.spec.virtual_tokens(config.lora)
    room = labelling_of(config).document_tokens if many else _LEAST
    if room < _LEAST:
        yield ConfigError(
            "the virtual tokens leave no room for a document",
            where="lora.num_virtual_tokens",
            found=f"{many} with data.seq_len={config.data.seq_len}",
            expected=f"at most {many + room - _LEAST}",
            remedy="lower lora.num_virtual_tokens, or raise data.seq_len",
        )


def _inputs_problems(
    lora: LoraConfig, modules: Sequence[LinearModule], shape: Shape
) -> Iterator[MensError]:
    """Refuse layers whose inputs or gradients `lora.init` cannot decompose at the chosen rank."""
    ranks = pattern_values(lora.rank_pattern, modules, shape.family, lora.r)
    of_gradients = lora.init.spec.from_gradients
    for one in modules:
        plain = one.layer is not None and one.stack is None
        width = min(one.width, one.out) if of_gradients else one.width
        if not plain or 2 * ranks[one.path] > width:
            yield ConfigError(
                f"lora.init={lora.init.value} starts from twice as many directions of the "
                f"{'gradients' if of_gradients else 'inputs'} of linear layers in decoder layers",
                where="lora.r" if plain else "lora.init",
                found=f"rank {ranks[one.path]} of {one.path}, which has {width}",
                expected=f"at most {width // 2}" if plain else "other targets",
                remedy="set lora.init=default, or choose other targets or ranks",
            )
            return


def _expert_problems(config: RunConfig, without: str) -> Iterator[MensError]:
    """Refuse settings unsupported by PEFT's LoRA on a layer's experts, which are one tensor."""
    lora = config.lora
    if lora.dropout > 0:
        yield ConfigError(
            "adapters of experts cannot have dropout: PEFT adds to their weights and does not "
            "drop inputs",
            where="lora.dropout",
            found=lora.dropout,
            expected="0, where experts are among the targets",
            remedy=f"set lora.dropout=0 to adapt experts; to leave them alone, {without}",
        )
    if lora.spec.not_on_experts is not None:
        yield ConfigError(
            lora.spec.not_on_experts,
            where="lora.variant",
            found=f"{lora.spec.name}, with adapters on experts",
            expected="lora.variant=lora or rslora",
            remedy=f"set lora.variant=lora; to leave the experts alone, {without}",
        )
    if lora.init.spec.exchanges_weights:
        yield ConfigError(
            "experts are not quantized, and this initialization needs quantized weights",
            where="lora.init",
            found=f"{lora.init.value}, with adapters on experts",
            expected="lora.init=default",
            remedy=f"set lora.init=default; to leave the experts alone, {without}",
        )
    if isinstance(config.optim, MuonConfig):
        yield ConfigError(
            "PEFT keeps the matrices of a layer's experts in one, which Muon would orthogonalize "
            "together",
            where="optim",
            found=f"{config.optim.name}, with adapters on experts",
            expected="optim=adamw or another that updates each value separately",
            remedy=f"choose optim=adamw; to leave the experts alone, {without}",
        )
    if config.trainer.sharing is Strategy.fsdp:
        yield ConfigError(
            "PEFT adds to whole experts, but here each process holds a part of them",
            where="trainer.strategy",
            found="fsdp, with adapters on experts",
            expected="a strategy under which each process holds the whole base",
            remedy=f"set trainer=gpu or trainer=ddp; to leave the experts alone, {without}",
        )


def _head_problems(lora: LoraConfig) -> Iterator[MensError]:
    """Refuse settings that an adapter on the head does not support."""
    if lora.init.spec.exchanges_weights:
        yield ConfigError(
            "the head is not quantized, and this initialization needs quantized weights",
            where="lora.init",
            found=f"{lora.init.value}, with an adapter on {HEAD}",
            expected=f"lora.init=default, or targets without {HEAD}",
        )
    if lora.spec.not_on_head is not None:
        yield ConfigError(
            lora.spec.not_on_head,
            where="lora.variant",
            found=f"{lora.spec.name}, with an adapter on {HEAD}",
            expected=f"lora.variant=lora or rslora, or targets without {HEAD}",
        )


_SHOWN = 8  # names listed of a longer list


def check_initial_adapter(config: RunConfig) -> Iterator[MensError]:
    """Yield the problems that prevent this run from starting from `lora.init_from`."""
    if config.lora.init_from is None:
        return
    adapter = read(find(config.lora.init_from), family_for(config.model))
    lora = config.lora
    for name, ours, theirs in (
        ("variant", lora.spec.name, adapter.variant),
        (lora.spec.rank_setting, lora.spec.rank(lora), adapter.rank),
        ("alpha", lora.spec.alpha(lora), adapter.alpha),
        ("config", dict(getattr(lora, "config", {})), adapter.peft_config),
    ):
        if ours != theirs:
            yield another_in_the_adapter(f"lora.{name}", ours, theirs, adapter.directory)
    same = (adapter.rank, adapter.variant) == (lora.spec.rank(lora), lora.spec.name)
    if same and not any(range_problems(config.model)):
        yield from _layers(config, adapter)
    # A directory's weights are hashed when the run opens, which can take a minute for a large one.
    model = config.model
    place = None if isinstance(model, HfModel) else ready_directory(model, cache_root())
    if place is not None:
        yield from other_base(adapter, marked_weights(place), model.name)


def _layers(config: RunConfig, adapter: StartingAdapter) -> Iterator[MensError]:
    shape = shape_of(config.model)
    if target_problems(config.lora, shape):
        return  # already reported
    expected = _expected_shapes(config, shape)
    found = {name: tuple(tensor.shape) for name, tensor in adapter.tensors.items()}
    for what, names in (
        ("the adapter lacks layers that this run trains", expected.keys() - found.keys()),
        ("the adapter has layers that this run does not train", found.keys() - expected.keys()),
    ):
        if names:
            yield ConfigError(
                what,
                where="lora.init_from",
                found=_listed({name.rpartition(".")[0] for name in names}),
                expected=f"the layers of lora.targets, {', '.join(config.lora.targets)}",
                remedy="choose the lora option that the adapter was trained with",
            )
    other = sorted(n for n in expected.keys() & found.keys() if expected[n] != found[n])
    if other:
        yield ConfigError(
            "the adapter's matrices have different shapes",
            where="lora.init_from",
            found=_listed({f"{name} {list(found[name])}" for name in other}),
            expected=f"{other[0]} {list(expected[other[0]])}, as {config.model.name} has it",
        )
    if (ours := _alphas(config, shape)) != adapter.alphas:
        yield ConfigError(
            "differs from that of the adapter to start from",
            where="lora.alpha_pattern",
            found=ours,
            expected=f"{adapter.alphas}, by layer, as {adapter.directory} has",
        )


def _expected_shapes(config: RunConfig, shape: Shape) -> dict[str, tuple[int, ...]]:
    modules = chosen(config.lora, shape)
    ranks = pattern_values(config.lora.rank_pattern, modules, shape.family, config.lora.r)
    shapes: dict[str, tuple[int, ...]] = {}
    for one in modules:
        parts = adapter_shapes(one, config.lora, ranks[one.path])
        shapes |= {f"{one.logical}.{part}": found for part, found in parts.items()}
    return shapes


def _alphas(config: RunConfig, shape: Shape) -> dict[str, int]:
    """Return the alphas of the layers whose alpha differs from the default."""
    modules, usual = chosen(config.lora, shape), config.lora.spec.alpha(config.lora)
    values = pattern_values(config.lora.alpha_pattern, modules, shape.family, usual)
    return {one.logical: values[one.path] for one in modules if values[one.path] != usual}


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def other_base(adapter: StartingAdapter, weights_sha256: str, name: str) -> Iterator[MensError]:
    """Yield a problem if an adapter was trained on different base weights.

    Args:
        adapter: the adapter; one that does not record its base is accepted.
        weights_sha256: hash of the base weights that this run loads.
        name: name of that base, for the message.
    """
    theirs = adapter.base_weights_sha256
    if theirs is not None and theirs != weights_sha256:
        yield ConfigError(
            "the adapter was trained on another base model",
            where="lora.init_from",
            found=f"{adapter.directory}, base weights {theirs[:12]}",
            expected=f"base weights {weights_sha256[:12]}, those of {name}",
            remedy="choose the model that the adapter was trained on",
        )
