"""LoRA, rsLoRA and DoRA through PEFT's layers; and backend=lora, an unquantized, frozen base.

Shapes: R rank, I inputs and O outputs of a projection, E experts of a layer.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import warnings
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.backends.adapters import other_targets
from mens_exp.backends.qlora import QloraBackend
from mens_exp.errors import ConfigError, SetupError
from mens_exp.layout.peft_format import stacks_of
from mens_exp.layout.targets import pattern_values, shortest_names
from mens_exp.lora.keyed import initialise, share_dropout
from mens_exp.lora.linear import take_over
from mens_exp.lora.method import AdapterMethod, Delta, stacked
from mens_exp.model.quiet import quiet
from mens_exp.quant.layers import values_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from mens_exp.config.lora import LoraConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.families import Family
    from mens_exp.layout.modules import LinearModule
    from mens_exp.layout.peft_format import Stack
    from mens_exp.lora.keyed import KeyedDropout
    from mens_exp.lora.linear import SharedInput, Weights
    from mens_exp.lora.method import Start, Tensors

ADAPTER = "default"  # PEFT's own name for a single adapter
_PREFIX = "base_model.model."


class LoraBackend(QloraBackend):
    """The QLoRA model over a base in f32 or bf16; the only difference is ``quant=none``."""


class PeftLora(AdapterMethod):
    """PEFT's LoRA layers; the variant is a flag of its configuration."""

    def place(
        self, model: Any, lora: LoraConfig, modules: Sequence[LinearModule], family: Family
    ) -> tuple[Any, dict[str, Any]]:
        """Wrap the model in a PEFT model; see `AdapterMethod.place`.

        Raises:
            ConfigError: PEFT refuses the targets.
            SetupError: PEFT adapted modules other than the requested ones.
        """
        from peft import get_peft_model

        wanted = peft_config(lora, modules, family, [path for path, _ in model.named_modules()])
        try:
            with quiet(), tied_head_is_meant():
                peft = get_peft_model(model, wanted, adapter_name=ADAPTER)
        except ValueError as error:
            raise ConfigError(
                "PEFT rejects the targets for this model",
                where="lora.targets",
                found=str(error),
                remedy=other_targets(family, ()),
            ) from error
        layers = dict(lora_layers(peft))
        plain = [one for one in modules if one.stack is None]
        sites: list[LinearModule | Stack] = [*plain, *stacks_of(modules)]
        expected = {f"{_PREFIX}{one.path}" for one in sites}
        if layers.keys() != expected:
            raise SetupError(
                "PEFT put its layers on modules other than the planned ones",
                where="lora.targets",
                found=", ".join(sorted(layers.keys() ^ expected)[:8]),
                expected="the modules of layout/targets.py",
                remedy=other_targets(family, sorted(layers.keys() & expected)),
            )
        return peft, {one.logical: layers[f"{_PREFIX}{one.path}"] for one in sites}

    def base_model(self, model: Any) -> Any:
        """Return the transformers model inside the PEFT model."""
        return model.get_base_model()

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        """Return A ``[R, I]``, B ``[O, R]``, and DoRA's magnitudes ``[O]``.

        The parameters of experts have the shapes that :mod:`mens_exp.layout.peft_format` describes.
        """
        found = {"lora_a": layer.lora_A[ADAPTER].weight, "lora_b": layer.lora_B[ADAPTER].weight}
        if ADAPTER in layer.lora_magnitude_vector:
            found["lora_magnitude"] = layer.lora_magnitude_vector[ADAPTER].weight
        return found

    @contextmanager
    def disabled(self, model: Any, layers: Collection[Any]) -> Iterator[None]:
        """Disable the adapter inside the block."""
        del layers
        with model.disable_adapter():
            yield

    def dropouts(
        self, config: RunConfig, layers: Sequence[tuple[LinearModule, Any]]
    ) -> list[KeyedDropout]:
        """Replace PEFT's dropout modules and return the new ones."""
        return share_dropout(layers, p=config.lora.dropout, seed=config.seed, adapter=ADAPTER)

    def take_over(
        self, layers: Sequence[tuple[LinearModule, Any]], weights: Weights, *, together: bool
    ) -> list[SharedInput]:
        """Replace the training forward of layers with that of :mod:`mens_exp.lora.linear`."""
        return take_over(layers, adapter=ADAPTER, weights=weights, together=together)

    def accumulate_in_f32(self, layers: Collection[Any], *, learns: bool) -> None:
        """Let autocast cast the inputs while the adapter learns, and PEFT otherwise.

        PEFT checks only CUDA's autocast. When training on CPU, it would give each projection an f32
        copy of the input, and each copy would draw its dropout mask again. All layers switch
        together, so only the first is checked: this runs for each chunk of the head.
        """
        if all(one.cast_input_dtype_enabled is learns for one in itertools.islice(layers, 1)):
            for layer in layers:
                layer.cast_input_dtype_enabled = not learns

    def draw(self, layer: Any, *, seed: int, logical: str) -> None:
        """Draw A, and set B to zero; PEFT has set DoRA's magnitudes to the norms of the base."""
        found = self.parameters(layer)
        initialise(found["lora_a"], found["lora_b"], seed=seed, layer=logical)

    def set_start(self, layer: Any, start: Start) -> None:
        """Set A and B, and DoRA's magnitudes to the norms of the initial weights, so W is kept."""
        found, (A_RI, B_OR) = self.parameters(layer), start.pair
        with torch.no_grad():
            found["lora_a"].copy_(A_RI)
            found["lora_b"].copy_(B_OR)
            if "lora_magnitude" in found:
                weight_OI = values_of(layer.get_base_layer())
                weight_OI = weight_OI + self.scale(layer) * (found["lora_b"] @ found["lora_a"])
                found["lora_magnitude"].copy_(torch.linalg.norm(weight_OI, dim=1))

    def scale(self, layer: Any) -> float:
        """Return the scaling factor of ``B A`` in one of PEFT's LoRA layers."""
        return float(layer.scaling[ADAPTER])

    def write_peft(self, model: Any, directory: Path, *, base: str, revision: str | None) -> None:
        """Write the files of a PEFT directory."""
        # PEFT would record the local path of the weights, which means nothing on another machine.
        model.peft_config[ADAPTER].base_model_name_or_path = base
        model.peft_config[ADAPTER].revision = revision
        with quiet(), tied_head_is_meant():
            model.save_pretrained(directory, save_embedding_layers=False)
        (directory / "README.md").unlink(missing_ok=True)  # MODEL_CARD.md replaces it
        in_fixed_order(directory / "adapter_config.json")

    @contextmanager
    def saved_form(
        self, model: Any, lora: LoraConfig, layers: Mapping[str, Any], taken: Tensors
    ) -> Iterator[None]:
        """Give the PEFT model, inside the block, the matrices of its saved directory.

        Doubling both rank and alpha keeps ``alpha / r``. rsLoRA's ``alpha / sqrt(r)`` would change,
        so the difference is folded into B, and the saved form is plain LoRA.
        """
        if not taken:
            yield
            return
        usual = model.peft_config[ADAPTER]
        before = {name: _matrices(layer) for name, layer in layers.items()}
        scales = {name: layer.scaling[ADAPTER] for name, layer in layers.items()}
        model.peft_config[ADAPTER] = replace(
            usual,
            r=2 * usual.r,
            lora_alpha=2 * usual.lora_alpha,
            rank_pattern={path: 2 * r for path, r in usual.rank_pattern.items()},
            alpha_pattern={path: 2 * alpha for path, alpha in usual.alpha_pattern.items()},
            use_rslora=False,
        )
        try:
            for name, layer in layers.items():
                pair = (taken[f"{name}.lora_a"], taken[f"{name}.lora_b"])
                _double(layer, pair, lora)
            yield
        finally:
            model.peft_config[ADAPTER] = usual
            for name, layer in layers.items():
                layer.lora_A[ADAPTER], layer.lora_B[ADAPTER] = before[name]
                layer.scaling[ADAPTER] = scales[name]

    def weight(self, weight_OI: torch.Tensor, tensors: Tensors, *, scale: float) -> torch.Tensor:
        """Return ``W + s · B A``; DoRA then rescales its rows (arXiv:2402.09353, eq. 5)."""
        merged_OI = weight_OI + scale * (tensors["lora_b"] @ tensors["lora_a"])
        if "lora_magnitude" in tensors:
            magnitude_O = tensors["lora_magnitude"].flatten()
            merged_OI = merged_OI * (magnitude_O / merged_OI.norm(dim=1))[:, None]
        return merged_OI

    def expert_weights(
        self, weight_EOI: torch.Tensor, tensors: Tensors, *, scale: float
    ) -> torch.Tensor:
        """Return ``W + s · B A`` for each expert, whose B is every E-th column of ``lora_b``."""
        A, B, many = tensors["lora_a"], tensors["lora_b"], len(weight_EOI)
        r = len(A) // many
        deltas = [B[:, one::many] @ A[one * r : (one + 1) * r] for one in range(many)]
        return weight_EOI + scale * torch.stack(deltas)

    def change(self, tensors: Tensors, *, scale: float) -> Delta:
        """Return the delta, which can be merged into any rows of a weight."""
        return Delta(
            A_RI=tensors["lora_a"],
            B_OR=tensors["lora_b"],
            scale=scale,
            magnitude_O=tensors.get("lora_magnitude"),
        )


PEFT_LORA = PeftLora()


def peft_config(
    lora: LoraConfig, modules: Sequence[LinearModule], family: Family, paths: Iterable[str]
) -> Any:
    """Translate the `lora` config group into PEFT's configuration.

    Args:
        lora: rank, alpha and variant.
        modules: the modules to adapt.
        family: the model's family.
        paths: the paths of all modules of the model.
    """
    from peft import LoraConfig as PeftLora

    ranks = pattern_values(lora.rank_pattern, modules, family, lora.r)
    alphas = pattern_values(lora.alpha_pattern, modules, family, lora.alpha)
    names = {one.path: one.stack or one.path for one in modules}
    # A stack of experts takes the values of its members, under the path that PEFT uses for it.
    ranks, alphas = ({names[p]: v for p, v in found.items()} for found in (ranks, alphas))
    plain = [one.path for one in modules if one.stack is None]
    return PeftLora(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=shortest_names(plain, list(paths)),
        target_parameters=[one.path for one in stacks_of(modules)] or None,
        rank_pattern={re.escape(path): r for path, r in ranks.items() if r != lora.r},
        alpha_pattern={re.escape(path): a for path, a in alphas.items() if a != lora.alpha},
        **(lora.spec.peft or {}),
        task_type="CAUSAL_LM",
    )


@contextmanager
def tied_head_is_meant() -> Iterator[None]:
    """Silence PEFT's warning about a tied head, because training does not change the shared table.

    The adapter's manifest records what a merge has to consider.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model (has|with) `tie_word_embeddings=True`")
        # PEFT looks for the experts' patterns among modules only and warns, but it still applies
        # them.
        warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did no")
        # GPT-2's Conv1D layers store their weights transposed; PEFT detects this and warns.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        yield


def lora_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield PEFT's LoRA layers with the path of the module or, for experts, of the parameter."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    for path, module in model.named_modules():
        if isinstance(module, ParamWrapper):  # nested if several parameters of a module are adapted
            yield f"{path.replace('.base_layer', '')}.{module.parameter_name}", module
        elif isinstance(module, LoraLayer):
            yield path, module


def in_fixed_order(path: Path) -> None:
    """Sort the module list in PEFT's configuration, which PEFT keeps as a set."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for name in ("target_modules", "target_parameters"):
        if config.get(name):
            config[name] = sorted(config[name])
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def _matrices(layer: Any) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    return layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]


def _double(layer: Any, taken: tuple[torch.Tensor, torch.Tensor], lora: LoraConfig) -> None:
    A, B = _matrices(layer)
    device = A.weight.device
    there = (taken[0].to(device), taken[1].to(device))
    A_RI, B_OR = stacked((A.weight.detach(), B.weight.detach()), there)
    if lora.spec.form.root_scale:
        r = A.weight.shape[0]
        B_OR = B_OR * math.sqrt(r)
        layer.scaling[ADAPTER] /= math.sqrt(r)
    layer.lora_A[ADAPTER] = _linear(A_RI)
    layer.lora_B[ADAPTER] = _linear(B_OR)


def _linear(weight_OI: torch.Tensor) -> torch.nn.Linear:
    out, width = weight_OI.shape
    linear = torch.nn.Linear(width, out, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight_OI, requires_grad=False)
    return linear
