"""Any adapter type of PEFT, from the fields of its own configuration class (`lora=peft`).

PEFT wraps one linear layer at a time, so that a layer's initial values depend only on the seed and
its name. `inject_adapter_in_model` refuses types that have no layers, or whose layers share state.
Before a model is loaded, :class:`_Trial` checks the other requirements of records, resumed runs and
merges on a layer of the run's smallest size and its quantizer.

Shapes: T tokens, I inputs and O outputs of a projection.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import typing
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from mens_exp.artifacts.record import check_type
from mens_exp.config.lora import ADAPTERS, PassthroughConfig
from mens_exp.config.quant import ComputeDtype
from mens_exp.errors import ConfigError, RequestError, SetupError, expected_name
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import shortest_names
from mens_exp.lora.keyed import key_of
from mens_exp.lora.method import AdapterMethod, ByDefinition
from mens_exp.model.quiet import quiet
from mens_exp.quant.binding import binding_of, compute_dtype
from mens_exp.quant.layers import binding_that_holds

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from mens_exp.config.quant import QuantConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.modules import LinearModule
    from mens_exp.lora.method import Tensors

with quiet():  # bitsandbytes, which PEFT imports, writes a notice about kernels for CPUs
    import peft  # noqa: F401  # imported here first

_ADAPTER = "default"
_NAME = "layer"
_TYPE = "peft_type"
_WRITTEN = "the run writes it into the adapter's adapter_config.json"
_CHOSEN = "lora.targets chooses the modules"
_BEYOND = "the adapter's records hold tensors of linear layers alone"
_ALIKE = "all layers have the same settings, whatever their names"
_RANDOM = "PEFT draws the masks from a stream that the run's seed and step do not set"
_DETERMINED = "an adapter whose tensors and settings alone determine a changed weight"
_REFUSED = {
    **dict.fromkeys(("auto_mapping", "base_model_name_or_path", "inference_mode"), _WRITTEN),
    **dict.fromkeys(("peft_version", "revision", "task_type"), _WRITTEN),
    **dict.fromkeys(("target_modules", "target_parameters", "exclude_modules"), _CHOSEN),
    **dict.fromkeys(("layers_to_transform", "layers_pattern"), _CHOSEN),
    **dict.fromkeys(("bias", "modules_to_save", "trainable_token_indices"), _BEYOND),
}
_TARGETS = "set lora.targets=[…], which takes names of modules and globs over their paths"
_NEAR = 1e-4  # for f32 sums in another order, relative to the largest output
_TOKENS, _MOVED = 4, 0.05
_SET_TO = re.compile(r"Setting (\w+) to ([\w.]+)")  # PEFT's words, where it changes a value


class AnyPeft(AdapterMethod):
    """PEFT's layers of one configuration."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """Store the fields of one configuration, which `sharing` passes."""
        self._config = dict(config or {})

    def sharing(self, projections: Mapping[str, Any]) -> AdapterMethod:
        """Return the method of a configuration."""
        return AnyPeft(projections)

    def shared(self) -> dict[str, Any]:
        """Return the configuration."""
        return dict(self._config)

    def problems(self, config: RunConfig, modules: Sequence[LinearModule]) -> Iterator[ConfigError]:
        """Yield errors of a configuration, and what PEFT or the records do not support.

        Args:
            config: the whole configuration.
            modules: the modules to adapt.
        """
        if not isinstance(config.lora, PassthroughConfig):
            return  # the rules of the group report it
        found = list(_field_problems(config.lora.config))
        if not found:
            found += _Trial(config, modules).problems()
        yield from found

    def shapes(self, config: Mapping[str, Any], *, out: int, width: int) -> dict[str, Any]:
        """Return the shapes of PEFT's tensors of a layer; none if PEFT refuses the configuration.

        Args:
            config: the fields of a configuration.
            out: outputs of the layer.
            width: inputs of the layer.
        """
        try:
            return dict(_shapes(json.dumps(config, sort_keys=True), out, width))
        except ConfigError:
            return {}  # reported by `problems`

    # ---- graph

    def layer(self, base: torch.nn.Module, one: LinearModule, lora: Any) -> Any:
        """Return PEFT's layer around a linear layer."""
        del one, lora
        return _made(self._config, base)

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        """Return a layer's trained parameters."""
        return {part: layer.get_parameter(name) for part, name in layer.trained_parts.items()}

    @contextmanager
    def disabled(self, model: Any, layers: Collection[Any]) -> Iterator[None]:
        """Disable the adapter inside the block; PEFT's own method would also freeze it."""
        del model
        for layer in layers:
            layer._disable_adapters = True  # noqa: SLF001
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False  # noqa: SLF001

    def draw(self, layer: Any, *, seed: int, logical: str) -> None:
        """Let PEFT draw the initial values, seeded by the run's seed and the layer's name."""
        fresh = _made(self._config, layer.get_base_layer(), seed=key_of(seed, logical))
        _fill(layer, {part: one.data for part, one in self.parameters(fresh).items()})

    def write_peft(self, model: Any, directory: Path, *, base: str, revision: str | None) -> None:
        """Write the configuration and the tensors by PEFT's names."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        modules = dict(model.named_modules())
        layers = {path: one for path, one in modules.items() if isinstance(one, BaseTunerLayer)}
        settings = _settings(self._config)
        settings.target_modules = shortest_names(list(layers), list(modules))
        settings.task_type, settings.inference_mode = "CAUSAL_LM", True
        settings.base_model_name_or_path, settings.revision = base, revision
        settings.save_pretrained(directory)
        tensors = {
            f"base_model.model.{path}.{name.replace(f'.{_ADAPTER}', '')}": layer.get_parameter(name)
            for path, layer in layers.items()
            for name in layer.trained_parts.values()
        }
        kept = {name: one.detach().cpu().contiguous() for name, one in tensors.items()}
        save_file(kept, directory / "adapter_model.safetensors", metadata={"format": "pt"})

    # ---- merge

    def weight(self, weight_OI: torch.Tensor, tensors: Tensors, *, scale: float) -> torch.Tensor:
        """Return the merged weight: the output of PEFT's layer for the identity, transposed."""
        del scale
        layer = _around(self._config, weight_OI)
        held = {layer.trained_parts[part]: one for part, one in tensors.items()}
        identity_II = torch.eye(weight_OI.shape[1], dtype=weight_OI.dtype, device=weight_OI.device)
        merged_IO: torch.Tensor = torch.func.functional_call(layer, held, (identity_II,))
        return merged_IO.T

    def change(self, tensors: Tensors, *, scale: float) -> ByDefinition:
        """Return the change that PEFT's merge makes."""
        return _OfMerge(self, tensors, scale)

    def merged(self, weight_OI: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """Merge the tensors into a weight with PEFT, and return the result.

        Raises:
            RequestError: PEFT has no merge of this type.
        """
        layer = _around(self._config, weight_OI.clone())
        _fill(layer, tensors)
        try:
            with quiet():
                layer.merge(safe_merge=True)
        except (NotImplementedError, ValueError, RuntimeError) as error:
            raise RequestError(
                f"PEFT's {self._config[_TYPE]} cannot be merged into weights",
                where="mens_exp.peft_config",
                found=f"{type(error).__name__}: {error}",
                expected="a type that can be merged",
                remedy="evaluate the run itself: task=evaluate path=<run>",
            ) from error
        return layer.get_base_layer().weight.detach()  # type: ignore[no-any-return]


class _OfMerge(ByDefinition):
    """The change of PEFT's merge, which a certificate compares with PEFT's forward pass in f64."""

    def onto(self, weight_NI: torch.Tensor, first: int) -> torch.Tensor:
        """Merge into the whole weight, f32."""
        assert first == 0, "the whole weight is merged at once"
        assert isinstance(self.method, AnyPeft)
        return self.method.merged(weight_NI, self.tensors)


ANY_PEFT = AnyPeft()


# ------------------------------------------------------------------ PEFT's configuration


def _field_problems(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield an unknown type, unknown fields, wrong values, and fields that a run sets itself."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    types = {one.value: cls for one, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    name = str(config.get(_TYPE))
    if name not in types:
        near = name.upper() if name.upper() in types else "OFT"
        yield ConfigError(
            "unknown type of PEFT",
            where=f"lora.config.{_TYPE}",
            found=config.get(_TYPE),
            expected=expected_name(name, types),
            remedy=f"write lora.config.peft_type={near}",
        )
        return
    own = "lora=all_linear" if name == "LORA" else f"lora={name.lower()}"
    if name.lower() in ADAPTERS.built_in:
        yield ConfigError(
            f"PEFT's {name} has a separate option here",
            where=f"lora.config.{_TYPE}",
            found=name,
            expected=own,
            remedy=f"choose {own}",
        )
        return
    hints = typing.get_type_hints(types[name])
    fields = {one.name: one for one in dataclasses.fields(types[name]) if one.init}
    for key, value in config.items():
        where = f"lora.config.{key}"
        if key not in fields:
            expected = expected_name(key, fields)
            yield ConfigError(
                f"unknown field of {types[name].__name__}", where=where, expected=expected
            )
        elif key == _TYPE or value == _default(fields[key]):
            continue
        elif _why_refused(key) is not None:
            yield ConfigError(
                f"cannot be set: {_why_refused(key)}",
                where=where,
                found=value,
                expected=str(_default(fields[key])),
                remedy=_TARGETS if _why_refused(key) == _CHOSEN else f"leave out {where}",
            )
        elif (error := _type_problem(value, hints[key], where)) is not None:
            yield error


def _why_refused(key: str) -> str | None:
    if key in _REFUSED:
        return _REFUSED[key]
    if key.endswith("_pattern"):
        return _ALIKE
    return _RANDOM if "dropout" in key else None


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _type_problem(value: Any, hint: Any, where: str) -> ConfigError | None:
    try:
        problems = check_type(value, hint, where)
    except KeyError:  # a class of PEFT's, or a literal: PEFT's constructor validates it
        return None
    if not problems:
        return None
    first = problems[0]
    return ConfigError("wrong type", where=where, found=first.found, expected=first.expected)


def _settings(config: Mapping[str, Any]) -> Any:
    """Return PEFT's configuration, whose constructor may refuse values."""
    from peft.mapping import get_peft_config

    return get_peft_config({**config, "task_type": None})


# ------------------------------------------------------------------ PEFT's layers


def _made(
    config: Mapping[str, Any], base: torch.nn.Module, *, seed: int = 0, on_meta: bool = False
) -> Any:
    """Return PEFT's layer around a linear layer, its trained parameters in f32.

    Raises:
        ConfigError: PEFT refuses the values, the type, or the layer.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    alone: Any = torch.nn.ModuleDict({_NAME: base})
    kind = type(base).__name__  # PEFT reads these from the model, not from its layers
    alone.is_loaded_in_4bit, alone.is_loaded_in_8bit = "4bit" in kind, "8bit" in kind
    try:
        with torch.random.fork_rng(), _without_notices(config):
            torch.manual_seed(seed)
            settings = _settings(config)
            settings.target_modules = [_NAME]
            inject_adapter_in_model(
                settings, alone, adapter_name=_ADAPTER, low_cpu_mem_usage=on_meta
            )
    except Exception as error:
        raise _refusal(config, base, error) from error
    layer = alone[_NAME]
    if not isinstance(layer, BaseTunerLayer):
        raise _refusal(config, base, "no layer is put around a linear layer")
    trained: Any = [name for name, one in layer.named_parameters() if one.requires_grad]
    for name in trained:
        parameter = layer.get_parameter(name)
        parameter.data = parameter.data.float()
    layer.trained_parts = {
        name.replace(f".{_ADAPTER}", "").replace(".", "_").lower(): name for name in trained
    }
    return layer


@contextmanager
def _without_notices(settings: Mapping[str, Any]) -> Iterator[None]:
    """Silence PEFT's warnings, such as a missing CUDA extension, inside the block.

    Raises:
        ValueError: PEFT replaced the value of a field, which no record would show.
    """
    with quiet(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    for text in (str(one.message) for one in said):
        set_to = _SET_TO.search(text)
        if "djusted" in text or (set_to and str(settings.get(set_to[1], set_to[2])) != set_to[2]):
            raise ValueError(text)


def _refusal(config: Mapping[str, Any], base: torch.nn.Module, error: object) -> ConfigError:
    said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    on = "a linear layer" if type(base) is torch.nn.Linear else f"a layer of {type(base).__name__}"
    name, sizes = config.get(_TYPE), f"{base.in_features} inputs and {base.out_features} outputs"
    return ConfigError(
        f"PEFT cannot put {name} with these settings on {on} with {sizes}",
        where="lora.config",
        found=said,
        expected=f"settings and layers that PEFT's {name} supports",
        remedy="change the field that PEFT names, or lora.targets"
        if type(base) is torch.nn.Linear
        else "choose backend=lora quant=none, or another lora.config.peft_type",
    )


def _around(config: Mapping[str, Any], weight_OI: torch.Tensor) -> Any:
    """Return PEFT's layer, in evaluation mode, around a linear layer that shares the weight."""
    base = torch.nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    base.weight = torch.nn.Parameter(weight_OI.detach(), requires_grad=False)
    return _made(config, base).eval()


def _fill(layer: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for part, values in tensors.items():
            layer.get_parameter(layer.trained_parts[part]).copy_(values)


@functools.lru_cache(maxsize=64)
def _shapes(config: str, out: int, width: int) -> Mapping[str, tuple[int, ...]]:
    base = torch.nn.Linear(width, out, bias=False, device="meta")
    try:
        layer = _made(json.loads(config), base, on_meta=True)
    except ConfigError:  # some types initialise from the values of the weight
        base.weight = torch.nn.Parameter(torch.ones(()).expand(out, width), requires_grad=False)
        layer = _made(json.loads(config), base)
    names = layer.trained_parts.items()
    return {part: tuple(layer.get_parameter(name).shape) for part, name in names}


# ------------------------------------------------------------------ trial


class _Trial:
    """A trial of everything that a run needs, on a layer of the run's smallest size."""

    def __init__(self, config: RunConfig, modules: Sequence[LinearModule]) -> None:
        self.config, self.modules = config, modules
        self.fields: dict[str, Any] = config.lora.config  # type: ignore[attr-defined]
        self.method = AnyPeft(self.fields)

    def problems(self) -> Iterator[ConfigError]:
        """Yield the first problem."""
        try:
            parts = {tuple(self._shapes_of(one)) for one in self.modules}
            if len(parts) > 1:
                raise self._unfit("trains other tensors in some layers than in others")
            biased = set(shape_of(self.config.model).family.biased)
            for bias in (False, True):
                alike = [one for one in self.modules if (one.kind in biased) is bias]
                if alike:
                    self._run(min(alike, key=lambda one: one.out * one.width), bias=bias)
        except ConfigError as error:
            yield error

    def _shapes_of(self, one: LinearModule) -> dict[str, Any]:
        return dict(_shapes(json.dumps(self.fields, sort_keys=True), one.out, one.width))

    def _run(self, one: LinearModule, *, bias: bool) -> None:
        quant, exact = self.config.quant, ComputeDtype.f32
        for kind in dict.fromkeys((exact, quant.compute_dtype)):
            base = _base(one, dataclasses.replace(quant, compute_dtype=kind), bias=bias)
            try:
                with _without_notices(self.fields):
                    self._try(base, exact=kind is exact)
            except (ConfigError, SetupError):
                raise
            except Exception as error:
                raise _refusal(self.fields, base, error) from error

    def _try(self, base: Any, *, exact: bool) -> None:
        """Run forward and backward on a few tokens; with ``exact``, check what must be equal."""
        layer, other = (_made(self.fields, base, seed=seed) for seed in (0, 1))
        values = {
            part: one.data + _MOVED * torch.randn(one.shape)
            for part, one in self.method.parameters(layer).items()
        }
        _fill(layer, values)
        _fill(other, values)
        dtype = torch.float32 if exact else torch.bfloat16
        x_TI = torch.randn(_TOKENS, base.in_features, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=not exact):
            y_TO, again_TO = layer.train()(x_TI), layer(x_TI)
        (y_TO.float() ** 2).sum().backward()
        learned = [x_TI, *self.method.parameters(layer).values()]
        if any(one.grad is None or not one.grad.isfinite().all() for one in learned):
            raise self._unfit("gives no gradient to some of its tensors, or to its inputs")
        if not exact:
            return
        if not torch.equal(y_TO, again_TO):
            raise self._unfit("draws random numbers in training, which a resumed run cannot repeat")
        with torch.no_grad():
            plain_TO, eval_TO, other_TO = base(x_TI), layer.eval()(x_TI), other.eval()(x_TI)
            with self.method.disabled(None, [layer]):
                if not torch.equal(layer(x_TI), plain_TO):
                    raise self._unfit("changes the weights of the base")
            merged_OI = self.method.weight(_dense(base), values, scale=1.0)
            as_merged_TO = torch.nn.functional.linear(x_TI, merged_OI, base.bias)
            gradient_TI = 2 * y_TO @ merged_OI  # of the sum of squares
        if not torch.equal(eval_TO, other_TO):
            raise self._unfit("has frozen tensors that are random and in no record")
        if (eval_TO - as_merged_TO).abs().max() > _NEAR * eval_TO.abs().max():
            raise self._unfit("computes something else than a product with a changed weight")
        if (x_TI.grad - gradient_TI).abs().max() > _NEAR * gradient_TI.abs().max():
            expected = "the gradient of its output times the changed weight, within f32 rounding"
            raise self._unfit("computes a wrong gradient of its input", expected)
        self._try_merge(_dense(base).float(), values)

    def _try_merge(self, weight_OI: torch.Tensor, values: Tensors) -> None:
        """Merge in f32, and compute the certificate's expectation in f64, as `task=merge` does."""
        change = self.method.change(values, scale=1.0)
        try:
            merged_OI = change.onto(weight_OI.clone(), 0)
            expected_OI = change.expected(weight_OI.double())
        except RequestError as error:
            raise self._unfit(f"cannot be merged into weights: {error.found}") from error
        if (merged_OI - expected_OI).abs().max() > _NEAR * expected_OI.abs().max():
            raise self._unfit("merges another weight than it trains")

    def _unfit(self, what: str, expected: str = _DETERMINED) -> ConfigError:
        """Return an error for settings that PEFT accepts, naming the fields that may cause it."""
        fields = [name for name in self.fields if "dropout" in name or "seed" in name]
        named = ", ".join(f"lora.config.{name}" for name in fields)
        return ConfigError(
            f"PEFT's {self.fields[_TYPE]} {what}",
            where=named or "lora.config",
            found={name: self.fields[name] for name in fields} or self.fields,
            expected=expected,
            remedy=f"leave out {named}" if fields else "choose another lora.config.peft_type",
        )


def _base(one: LinearModule, quant: QuantConfig, *, bias: bool) -> Any:
    """Return a frozen linear layer with random weights, quantized like the run's layers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        alone = torch.nn.ModuleDict({_NAME: torch.nn.Linear(one.width, one.out, bias=bias)})
    alone = alone.to(compute_dtype(quant)).requires_grad_(requires_grad=False)
    if quant.is_quantized:
        binding = binding_of(quant.quant_type.spec)
        binding.quantize(alone, [_NAME], quant)
        if binding.holds(alone[_NAME]):  # else only transformers' loader makes its layers
            binding.keep_trainable([alone[_NAME]])
    return alone[_NAME]


def _dense(base: torch.nn.Module) -> torch.Tensor:
    binding = binding_that_holds(base)
    return base.weight if binding is None else binding.dequantized(base)  # type: ignore[return-value]
