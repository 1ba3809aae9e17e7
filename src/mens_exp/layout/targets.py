"""Adapter targets, matched against a model's shape without loading the model.

A target is a group (``attention``), the last name or names of a module (``q_proj``,
``self_attn.q_proj``), or a glob over the whole module path (``*.layers.1?.mlp.*``).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from mens_exp.config.quant import PATTERNS
from mens_exp.errors import ConfigError, Problems, expected_name
from mens_exp.layout.modules import (
    EXPERTS,
    embedding_module,
    linear_modules,
    norm_modules,
    stack_shape,
)
from mens_exp.layout.norms import METHOD, NORMS, is_of_heads
from mens_exp.layout.shape import HEAD

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from mens_exp.config.lora import LoraConfig
    from mens_exp.config.lora_spec import AdapterSpec
    from mens_exp.config.quant import QuantConfig, QuantType
    from mens_exp.layout.families import Family
    from mens_exp.layout.modules import LinearModule
    from mens_exp.layout.shape import Shape

GROUPS = ("attention", "qkv", "qv", "o_proj", "mlp", EXPERTS, "all_linear", HEAD, NORMS)
_GLOB = "*?["


def adaptable(spec: AdapterSpec, shape: Shape) -> tuple[LinearModule, ...]:
    """Return the modules that an adapter method can adapt."""
    return norm_modules(shape) if spec.on_norms else linear_modules(shape)


def chosen(lora: LoraConfig, shape: Shape) -> tuple[LinearModule, ...]:
    """Return the modules that get an adapter, in the model's order.

    Raises:
        ConfigError: a target matches nothing.
        Problems: several do.
    """
    if lora.spec.on_embedding:
        return (embedding_module(shape),)
    Problems.raise_if(target_problems(lora, shape))
    modules = adaptable(lora.spec, shape)
    matched = {one.path for t in lora.targets for one in _matching(t, modules, shape.family)}
    return tuple(one for one in modules if one.path in matched)


def skipped(patterns: Sequence[str], shape: Shape) -> tuple[LinearModule, ...]:
    """Return the modules of decoder layers that `quant.skip` leaves unquantized.

    Raises:
        ConfigError: a pattern matches nothing.
        Problems: several do.
    """
    modules = [one for one in linear_modules(shape) if one.layer is not None]
    Problems.raise_if(
        [
            _no_match(pattern, modules, shape.family, where="quant.skip")
            for pattern in patterns
            if not _matching(pattern, modules, shape.family)
        ]
    )
    paths = {one.path for p in patterns for one in _matching(p, modules, shape.family)}
    return tuple(one for one in modules if one.path in paths)


def quantized_modules(quant: QuantConfig, shape: Shape) -> dict[str, QuantConfig]:
    """Return the quantization settings of each quantized module of the decoder layers, by path.

    Experts that a model stores in one tensor are excluded.

    Raises:
        ConfigError: a pattern of `quant.skip` or a per-module setting has an effect on no module.
        Problems: several do.
    """
    left = {one.path for one in skipped(quant.skip, shape)}
    inside = [one for one in linear_modules(shape) if one.layer is not None and one.stack is None]
    if quant.spec.keeps_codes and shape.stored is not None:
        inside = [one for one in inside if shape.stored.holds(one.path)]
    found = {one.path: quant.of(quant.quant_type) for one in inside}
    problems: list[ConfigError] = []
    for pattern, quant_type in quant.type_pattern.items():
        matched = _matching(pattern, inside, shape.family)
        if not matched:
            problems.append(_no_match(pattern, inside, shape.family, where="quant.type_pattern"))
        elif left.issuperset(one.path for one in matched):
            problems.append(_all_skipped("quant.type_pattern", pattern))
        found |= dict.fromkeys((one.path for one in matched), quant.of(quant_type))
    for setting in ("block_size", "double_quant"):
        where, values = f"quant.{setting}_pattern", getattr(quant, f"{setting}_pattern")
        for pattern, value in values.items():
            matched = _matching(pattern, inside, shape.family)
            stored = {one.path: found[one.path] for one in matched}
            free = {path for path, one in stored.items() if setting in one.spec.settings}
            if not matched:
                problems.append(_no_match(pattern, inside, shape.family, where=where))
            elif left.issuperset(stored):
                problems.append(_all_skipped(where, pattern))
            elif not free:
                problems.append(_ineffective_pattern(setting, pattern, stored.values()))
            found |= {path: replace(found[path], **{setting: value}) for path in free}
    Problems.raise_if(problems)
    return {path: one for path, one in found.items() if path not in left}


def _all_skipped(where: str, pattern: str) -> ConfigError:
    return ConfigError(
        "matches only modules that quant.skip leaves unquantized",
        where=where,
        found=pattern,
        expected="a module that is quantized",
        remedy="remove the pattern, or shorten quant.skip",
    )


def _ineffective_pattern(setting: str, pattern: str, stored: Iterable[QuantConfig]) -> ConfigError:
    names = ", ".join(sorted({one.quant_type.value for one in stored}))
    fixed = {
        "block_size": "matches only modules whose quantizer has a fixed block size",
        "double_quant": "matches only modules whose quantizer cannot quantize its scales",
    }
    return ConfigError(
        fixed[setting],
        where=f"quant.{setting}_pattern",
        found=f"{pattern}, stored as {names}",
        expected=f"a module of a quantizer that reads quant.{setting}",
    )


def otherwise_quantized(quant: QuantConfig, shape: Shape) -> dict[str, QuantConfig]:
    """Return the modules of :func:`quantized_modules` that are stored differently from others."""
    usual, has_patterns = storage(quant), any(getattr(quant, name) for name in PATTERNS)
    stored = quantized_modules(quant, shape) if has_patterns else {}
    return {path: one for path, one in stored.items() if storage(one) != usual}


def storage(quant: QuantConfig) -> tuple[QuantType, int, bool]:
    """Return quantizer, block size and double quantization, in which modules may differ."""
    return quant.quant_type, quant.block, quant.double_quant


def target_problems(lora: LoraConfig, shape: Shape) -> list[ConfigError]:
    """List the targets that match no module, and the patterns that match no target module."""
    modules, family = adaptable(lora.spec, shape), shape.family
    if lora.spec.on_norms and not modules:
        return [_without_norms(lora.spec.name, family)]
    on_norms = lora.spec.name if lora.spec.on_norms else None
    problems = [
        _no_norm(target, modules, on_norms) if on_norms else _no_match(target, modules, family)
        for target in lora.targets
        if not _matching(target, modules, family)
    ]
    if problems:
        return problems  # patterns are checked against the matched modules
    adapted = [one for t in lora.targets for one in _matching(t, modules, family)]
    problems = list(_parts_of_stacks(lora, modules, {one.path for one in adapted}, family))
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, name):
            if not _matching(pattern, adapted, family):
                known = {*_last_names(adapted), *_groups_of(adapted, family)}
                problems.append(
                    ConfigError(
                        "matches no module that gets an adapter",
                        where=f"lora.{name}",
                        found=pattern,
                        expected=f"{expected_name(pattern, known)}, or a glob over whole paths",
                    )
                )
    return problems


def pattern_values(
    pattern: Mapping[str, int], modules: Sequence[LinearModule], family: Family, usual: int
) -> dict[str, int]:
    """Return a rank or an alpha for each module, keyed by path.

    Args:
        pattern: target-like pattern -> value; the last one that matches a module applies.
        modules: the modules that get an adapter.
        family: family of the model.
        usual: the value of modules that match no pattern.
    """
    values = {one.path: usual for one in modules}
    for target, value in pattern.items():
        values |= {one.path: value for one in _matching(target, modules, family)}
    return values


def adapter_parameters(lora: LoraConfig, shape: Shape) -> int:
    """Count trained parameters; see :func:`adapter_tensors`."""
    return sum(many * math.prod(sizes) for many, sizes in adapter_tensors(lora, shape))


def adapter_tensors(lora: LoraConfig, shape: Shape) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the shape of every trained tensor, and how many of it a module has.

    Gate and up of an expert are one tensor in transformers, so they share a matrix A. Targets that
    match nothing have none; they are reported elsewhere.
    """
    modules = [] if target_problems(lora, shape) else chosen(lora, shape)
    ranks = pattern_values(lora.rank_pattern, modules, shape.family, lora.r)
    for one in modules:
        matrices, width = 1, one.width
        if one.slot is not None:
            matrices, width = one.slot.matrices, 0 if one.slot.part else one.width
        shapes = lora.spec.shapes(lora, r=ranks[one.path], width=width, out=one.out)
        for sizes in shapes.values():
            yield matrices, sizes


def adapter_shapes(one: LinearModule, lora: LoraConfig, r: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's tensors in schema v3, keyed by the last part of their names.

    Args:
        one: the module.
        lora: the `lora` group.
        r: rank of its adapter.
    """
    shapes = lora.spec.shapes(lora, r=r, width=one.width, out=one.out)
    return {name: (*stack_shape(one), *shape) for name, shape in shapes.items()}


def without_experts(family: Family, modules: Iterable[LinearModule]) -> str:
    """Describe the setting that excludes experts from adaptation.

    Args:
        family: family of the model.
        modules: alternative modules, for a family without a group for them.
    """
    if "attention" in family.groups:
        return "set lora=attention"
    names = sorted(set(_last_names(one for one in modules if one.slot is None)))
    return f"set lora.targets=[{','.join(names)}]" if names else "choose another model"


def described(modules: Iterable[LinearModule], layers: int) -> str:
    """Summarize matched modules: ``q, v in 30 of 30 layers; lm_head: 61 modules``.

    Args:
        modules: the modules that get an adapter.
        layers: number of decoder layers of the model.
    """
    matched = list(modules)
    where: dict[str, set[int | None]] = {}
    for one in matched:
        where.setdefault(_kind_of(one), set()).add(one.layer)
    kinds: dict[frozenset[int | None], list[str]] = {}
    for kind, numbers in where.items():
        kinds.setdefault(frozenset(numbers), []).append(kind)
    parts = [
        ", ".join(names) + ("" if None in numbers else f" in {len(numbers)} of {layers} layers")
        for numbers, names in kinds.items()
    ]
    count = len({one.stack or one.path for one in matched})
    return f"{'; '.join(parts)}: {count} module{'s' if count != 1 else ''}"


def _kind_of(one: LinearModule) -> str:
    """Return a module's kind; the matrices of all experts count as one kind."""
    if one.slot is None:
        return one.kind
    return f"{one.slot.parameter.rpartition('.')[2]} of {one.slot.experts} experts"


def shortest_names(matched: Sequence[str], paths: Iterable[str]) -> list[str]:
    """Return the last names of module paths if they are unambiguous, else the whole paths.

    Args:
        matched: the intended modules.
        paths: every module of the model that a name might refer to.
    """
    names = {path.rpartition(".")[2] for path in matched}
    if {path for path in paths if path.rpartition(".")[2] in names} == set(matched):
        return sorted(names)
    return list(matched)


def _matching(
    target: str, modules: Iterable[LinearModule], family: Family
) -> tuple[LinearModule, ...]:
    kinds = family.groups.get(target)
    if kinds is not None:
        return tuple(one for one in modules if one.kind in kinds)
    if target == NORMS:
        return tuple(one for one in modules if one.norm and not is_of_heads(one.path))
    if any(character in target for character in _GLOB):
        return tuple(one for one in modules if one.is_like(target))
    if target in GROUPS and target != HEAD:
        return ()  # a group that this family's fused modules cannot separate
    return tuple(one for one in modules if one.is_called(target))


def _parts_of_stacks(
    lora: LoraConfig, modules: Sequence[LinearModule], adapted: Collection[str], family: Family
) -> Iterator[ConfigError]:
    """Yield problems of adapters on some experts of a layer, or with unequal ranks or alphas."""
    stacks: dict[str, list[LinearModule]] = {}
    for one in modules:
        if one.stack is not None:
            stacks.setdefault(one.stack, []).append(one)
    ranks = pattern_values(lora.rank_pattern, modules, family, lora.r)
    alphas = pattern_values(lora.alpha_pattern, modules, family, lora.alpha)
    for path, members in stacks.items():
        chosen_here = [one for one in members if one.path in adapted]
        if chosen_here and len(chosen_here) < len(members):
            absent = next(one.path for one in members if one.path not in adapted)
            yield ConfigError(
                "all experts of a layer are one tensor, with gate and up in it",
                where="lora.targets",
                found=f"{chosen_here[0].path}, and not {absent}",
                expected=f"the whole of {path}",
                remedy=f"set lora=experts, or lora.targets=[{'.'.join(path.split('.')[-2:])}]",
            )
            return
        for name, values in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
            if chosen_here and len({values[one.path] for one in members}) > 1:
                yield ConfigError(
                    "gives the experts of one tensor values that differ",
                    where=f"lora.{name}",
                    found=str(dict(getattr(lora, name))),
                    expected=f"one value for all of {path}",
                )
                return


def _no_match(
    target: str, modules: Sequence[LinearModule], family: Family, *, where: str = "lora.targets"
) -> ConfigError:
    if target == HEAD:
        return ConfigError("the head is never quantized", where=where, found=target)
    if target == NORMS:
        return ConfigError(
            f"norms are adapted by lora.variant={METHOD} alone, and never quantized",
            where=where,
            found=target,
            expected=f"one of {', '.join(family.groups)}, or names of linear modules",
            remedy=f"choose lora={METHOD} to tune the norms" if where == "lora.targets" else None,
        )
    if target == EXPERTS:
        return ConfigError(
            f"{family.model_type} has no experts that PEFT's LoRA is known to fit",
            where=where,
            found=target,
            expected=f"one of {', '.join(family.groups)}",
            remedy=without_experts(family, modules),
        )
    if target in GROUPS and "qkv" not in family.groups:
        return ConfigError(
            f"unknown group for {family.model_type}",
            where="lora.targets",
            found=target,
            expected=f"one of {', '.join(family.groups)}, or names such as "
            f"{', '.join(_last_names(modules))}",
        )
    if target in GROUPS:
        return _no_group(target, family, where=where)
    glob = any(character in target for character in _GLOB)
    known = [one.path for one in modules] if glob else [*_last_names(modules), *family.groups]
    like = f"a glob over paths such as {modules[0].path}" if glob else expected_name(target, known)
    return ConfigError(
        "matches no linear module of the model", where=where, found=target, expected=like
    )


def _no_group(group: str, family: Family, *, where: str) -> ConfigError:
    """Refuse a group that a family lacks, with the reason."""
    joint = family.groups["qkv"]
    remedy = None
    expected = f"one of {', '.join(family.groups)}, {HEAD}"
    if group == "mlp" and EXPERTS in family.groups:
        reason = f"the feed-forward layers of {family.model_type} are experts"
        remedy = "set lora=experts to adapt them" if where == "lora.targets" else None
    elif group == "qv" and len(joint) == 1:
        reason = f"{family.model_type} computes query, key and value in one module"
        expected = f"qkv, which is {joint[0]} there, or {expected}"
    else:
        reason = f"{family.model_type} has no modules that it stands for"
    return ConfigError(
        f"is not available: {reason}", where=where, found=group, expected=expected, remedy=remedy
    )


def _no_norm(target: str, modules: Sequence[LinearModule], method: str) -> ConfigError:
    names = _last_names(modules)
    return ConfigError(
        f"matches no norm of the model, and {method} adapts norms alone",
        where="lora.targets",
        found=target,
        expected=f"{NORMS}, a name among {', '.join(names)}, or a glob over paths such as "
        f"{modules[0].path}",
        remedy=f"write lora.targets=[{NORMS}], or choose another lora.variant",
    )


def _without_norms(method: str, family: Family) -> ConfigError:
    return ConfigError(
        f"the model has no norm with trained weights, which {method} needs",
        where="lora.variant",
        found=f"{method}, on a {family.model_type} model",
        expected="an adapter method for linear layers",
        remedy="choose another, such as lora=all_linear",
    )


def _last_names(modules: Iterable[LinearModule]) -> list[str]:
    return list(dict.fromkeys(one.path.rpartition(".")[2] for one in modules))


def _groups_of(modules: Iterable[LinearModule], family: Family) -> list[str]:
    kinds = {one.kind for one in modules}
    return [name for name, members in family.groups.items() if kinds & set(members)]
