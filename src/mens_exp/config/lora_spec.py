"""The specifications of adapter methods and initializations, as used by planning and records.

Nothing here imports torch. :mod:`mens_exp.config.lora` has the settings, and the table of methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.adapter_tensors import AdapterForm, factors
from mens_exp.artifacts.adapter_v3 import PROJECTION_SEED
from mens_exp.config.plugins import named_object

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_OF_LORA = frozenset(
    {"r", "alpha", "dropout", "rank_pattern", "alpha_pattern", "init", "loftq_iters"}
)
_LINEAR_ALONE = "the adapter method is for linear layers of decoder layers alone"


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """The spec of an adapter method; the defaults suit a user's method.

    Attributes:
        name: value of `lora.variant`, and the name in records.
        method: ``module:name`` of the :class:`mens_exp.lora.method.AdapterMethod`.
        form: the tensors of each layer, for records.
        settings: the settings of the `lora` group that it reads, except its targets.
        schema: the schema of the group; None means `LoraConfig`.
        inits: supported values of `lora.init`.
        backends: supported backends.
        peft: keys of PEFT's LoRA configuration that select it; None if no PEFT
            directory is written.
        keeps_inputs: whether the backward pass keeps the input of an adapted layer.
        not_on_head: why it cannot adapt the head; None if it can.
        not_on_experts: why it cannot adapt the experts of a layer; None if it can.
        not_merged: why it cannot be merged into weights; None if it can.
        not_on_biased: why it cannot adapt a layer with a bias; None if it can.
        allocates: whether training prunes ranks to a budget shared by all layers.
        not_sharded: why layers cannot be sharded across processes; None if they can.
        reads_base: whether it reads the weights of the base other than to multiply by them.
        on_norms: whether it adapts the vectors of norms instead of linear modules.
        on_embedding: whether it adapts the embedding table, and `lora.targets` must be empty.
        rank_setting: the setting that :meth:`rank` returns.
    """

    name: str
    method: str
    form: AdapterForm
    settings: frozenset[str] = frozenset()
    schema: type | None = None
    inits: frozenset[str] = frozenset({"default"})
    backends: tuple[str, ...] = ("qlora", "lora")
    peft: Mapping[str, bool] | None = None
    keeps_inputs: bool = False
    not_on_head: str | None = _LINEAR_ALONE
    not_on_experts: str | None = _LINEAR_ALONE
    not_merged: str | None = None
    not_on_biased: str | None = None
    allocates: bool = False
    not_sharded: str | None = None
    reads_base: bool = False
    on_norms: bool = False
    on_embedding: bool = False
    rank_setting: str = "r"

    def virtual_tokens(self, settings: Any) -> int:
        """Return the number of trained vectors that precede the tokens of each document."""
        del settings
        return 0

    def fits(self, settings: Any) -> bool:
        """Return whether the group has the settings that the method reads."""
        return self.schema is None or isinstance(settings, self.schema)

    def rank(self, settings: Any) -> int:
        """Return the rank for records; 1 for a method without one."""
        return settings.r if "r" in self.settings else 1

    def alpha(self, settings: Any) -> int:
        """Return the alpha for records; 1 for a method without one."""
        return settings.alpha if "alpha" in self.settings else 1

    def kept_per_token(self, *, r: int, out: int, width: int) -> int:
        """Return the elements per token that a layer saves for backward, except its input.

        Args:
            r: rank of the layer.
            out: outputs of the layer.
            width: inputs of the layer.
        """
        del r, width
        return out

    def formed(self, *, r: int, out: int, width: int) -> int:
        """Return the elements of a matrix that each forward pass builds and saves for backward."""
        del r, out, width
        return 0

    def largest_rank(self, *, out: int, width: int) -> int | None:
        """Return the largest rank that a layer can have; None without a limit."""
        del out, width
        return None

    @property
    def option(self) -> str:
        """The option of `lora` with its settings."""
        return self.name

    @property
    def has_peft_view(self) -> bool:
        """Whether a run writes a PEFT directory."""
        return self.peft is not None

    def shapes(self, settings: Any, *, r: int, width: int, out: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's tensors, by the last part of their names.

        Args:
            settings: the `lora` group.
            r: rank of the layer.
            width: inputs of the layer.
            out: outputs of the layer.
        """
        del settings
        return self.form.shapes(r=r, width=width, out=out)

    def problems(self, config: Any, modules: Sequence[Any]) -> Iterable[Any]:
        """Return errors for other unsupported configurations.

        Args:
            config: the whole configuration.
            modules: the modules to adapt.
        """
        del config, modules
        return ()

    def projections(self, settings: Any, sizes: Collection[tuple[int, int]]) -> dict[str, Any]:
        """Describe tensors shared by all layers, such as random matrices; empty if there are none.

        Args:
            settings: the `lora` group.
            sizes: outputs and inputs of the adapted layers.
        """
        del settings, sizes
        return {}

    def shared_bytes(self, projections: Mapping[str, int], *, width: int) -> int:
        """Return the size of the matrices that :meth:`projections` describes, f32.

        Args:
            projections: their description.
            width: bytes per element in the compute format.
        """
        del width
        return projections["r"] * (projections["out"] + projections["width"]) * 4

    def described(self, settings: Any) -> list[str]:
        """Describe the adapter in a few words; defaults are omitted."""
        found = [self.name]
        for name in ("r", "alpha"):
            if name in self.settings:
                pattern = "rank_pattern" if name == "r" else "alpha_pattern"
                several = pattern in self.settings and getattr(settings, pattern)
                found.append(f"{name} {getattr(settings, name)}{' and others' if several else ''}")
        if "dropout" in self.settings:
            found.append(f"dropout {settings.dropout:g}")
        return found


@dataclass(frozen=True, kw_only=True)
class LoraSpec(AdapterSpec):
    """LoRA and its variants, through PEFT."""

    method: str = "mens_exp.backends.lora:PEFT_LORA"
    settings: frozenset[str] = _OF_LORA
    inits: frozenset[str] = frozenset({"default", "eva", "lora_ga", "pissa", "loftq"})
    backends: tuple[str, ...] = ("qlora", "lora", "burn")
    keeps_inputs: bool = True
    not_on_head: str | None = None
    not_on_experts: str | None = None

    def kept_per_token(self, *, r: int, out: int, width: int) -> int:
        """Return the size of A's output."""
        del out, width
        return r


class PlainLoraSpec(LoraSpec):
    """Plain LoRA, which descriptions omit."""

    def described(self, settings: Any) -> list[str]:
        """Describe the adapter without its name."""
        return super().described(settings)[1:]


class DoraSpec(LoraSpec):
    """DoRA, which scales an output by a ratio of norms."""

    def kept_per_token(self, *, r: int, out: int, width: int) -> int:
        """Return the sizes of A's output and of the scaled output."""
        del width
        return r + out


class WholeUpdateSpec(AdapterSpec):
    """A method whose forward pass builds the update of a full weight."""

    def formed(self, *, r: int, out: int, width: int) -> int:
        """Return the size of the weight."""
        del r
        return out * width


class LokrSpec(WholeUpdateSpec):
    """LoKr, one of whose matrices is itself a product of low rank."""

    def largest_rank(self, *, out: int, width: int) -> int:
        """Return the largest rank at which PEFT uses that product instead of a full matrix."""
        return (max(factors(out)[1], factors(width)[1]) - 1) // 2


class LnTuningSpec(AdapterSpec):
    """LN tuning, which PEFT has too."""

    @property
    def has_peft_view(self) -> bool:
        """True: PEFT has a type for it."""
        return True


class AdaloraSpec(AdapterSpec):
    """AdaLoRA, which has a diagonal factor between A and B."""

    def kept_per_token(self, *, r: int, out: int, width: int) -> int:
        """Return the size of A's output."""
        del out, width
        return r


class VeraSpec(AdapterSpec):
    """VeRA, whose frozen projections have the size of the largest layer."""

    def projections(self, settings: Any, sizes: Collection[tuple[int, int]]) -> dict[str, int]:
        """Return their seed, and sizes sufficient for every layer."""
        return {
            "seed": PROJECTION_SEED,
            "r": settings.r,
            "out": max((out for out, _ in sizes), default=0),
            "width": max((width for _, width in sizes), default=0),
        }

    def kept_per_token(self, *, r: int, out: int, width: int) -> int:
        """Return the sizes of both projections' outputs, which are inputs of trained factors."""
        del width
        return r + out


class RandLoraSpec(VeraSpec):
    """RandLoRA, which builds one factor of each update from the random bases."""

    def kept_per_token(self, *, r: int, out: int, width: int) -> int:
        """Return the output size of the frozen factor, if it comes first."""
        return -(-out // r) * r if out < width else 0

    def formed(self, *, r: int, out: int, width: int) -> int:
        """Return the size of the factor."""
        smaller = min(out, width)
        return -(-smaller // r) * r * smaller

    def shared_bytes(self, projections: Mapping[str, int], *, width: int) -> int:
        """Return the size of A and of all bases in B, in the compute format."""
        r, sides = projections["r"], (projections["out"], projections["width"])
        return (r * min(sides) + -(-min(sides) // r) * r * max(sides)) * width


class PromptTuningSpec(AdapterSpec):
    """Prompt tuning, whose only tensor has a row for each virtual token."""

    def fits(self, settings: Any) -> bool:
        """Return whether the group has the number of virtual tokens."""
        return hasattr(settings, self.rank_setting)

    def virtual_tokens(self, settings: Any) -> int:
        """Return the setting; 0 for a group without it, which is reported elsewhere."""
        return getattr(settings, self.rank_setting, 0)

    def rank(self, settings: Any) -> int:
        """Return the number of virtual tokens, the rows of the tensor."""
        return self.virtual_tokens(settings)

    @property
    def has_peft_view(self) -> bool:
        """True: PEFT has the method."""
        return True

    def shapes(self, settings: Any, *, r: int, width: int, out: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of the vectors; ``r`` is not read."""
        del r
        return super().shapes(settings, r=self.virtual_tokens(settings), width=width, out=out)

    def kept_per_token(self, *, r: int, out: int, width: int) -> int:
        """Return zero: the lookup of a vector saves no values."""
        del r, out, width
        return 0

    def described(self, settings: Any) -> list[str]:
        """Name the method, the number of virtual tokens, and their initial values."""
        many, start = settings.num_virtual_tokens, settings.prompt_tuning_init.value
        return [self.name, f"{many} virtual token{'s' if many != 1 else ''}", f"from {start}"]


class PassthroughSpec(WholeUpdateSpec):
    """Any PEFT type, with PEFT's own configuration; its methods import PEFT."""

    @property
    def option(self) -> str:
        """The option with PEFT's configuration."""
        return "peft"

    def fits(self, settings: Any) -> bool:
        """Return whether the group has PEFT's configuration."""
        return hasattr(settings, "config")

    @property
    def has_peft_view(self) -> bool:
        """True: PEFT reads its own configuration."""
        return True

    def shapes(self, settings: Any, *, r: int, width: int, out: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the layer that PEFT builds."""
        del r
        found: dict[str, tuple[int, ...]] = self._asked().shapes(
            settings.config, out=out, width=width
        )
        return found

    def problems(self, config: Any, modules: Sequence[Any]) -> Iterable[Any]:
        """Try the configuration with PEFT."""
        found: Iterable[Any] = self._asked().problems(config, modules)
        return found

    def projections(self, settings: Any, sizes: Collection[tuple[int, int]]) -> dict[str, Any]:
        """Return PEFT's configuration."""
        del sizes
        return dict(settings.config)

    def shared_bytes(self, projections: Mapping[str, Any], *, width: int) -> int:
        """Return zero: layers share no tensor."""
        del projections, width
        return 0

    def described(self, settings: Any) -> list[str]:
        """Name the type and the configured fields."""
        fields = dict(settings.config)
        name = str(fields.pop("peft_type", self.name))
        return [name, *(f"{key} {value}" for key, value in fields.items())]

    def _asked(self) -> Any:
        return named_object(self.method, object, of=f"the adapter method {self.name}")


@dataclass(frozen=True, kw_only=True)
class InitSpec:
    """The spec of an adapter initialization.

    Attributes:
        name: value of `lora.init`, and the name in records.
        start: ``module:name`` of the :class:`mens_exp.lora.method.Initialization` that computes
            the initial values; None draws A at random and sets B to zero.
        settings: the settings of the `lora` group that it reads.
        from_inputs: whether A is set to directions of its layer's inputs.
        from_gradients: whether A and B are set to directions of the weight's gradient.
    """

    name: str
    start: str | None = None
    settings: frozenset[str] = frozenset()
    from_inputs: bool = False
    from_gradients: bool = False

    @property
    def from_rows(self) -> bool:
        """Whether it needs passes of the run's rows through the base model."""
        return self.from_inputs or self.from_gradients

    @property
    def is_drawn(self) -> bool:
        """Whether it depends only on the seed and the shapes."""
        return self.start is None and not self.from_rows

    @property
    def exchanges_weights(self) -> bool:
        """Whether B is not initially zero, so the adapter holds a part of the base weights."""
        return self.from_weights or self.from_gradients

    @property
    def from_weights(self) -> bool:
        """Whether it starts from the base weights and their quantization error."""
        return self.start is not None

    def changes_base(self, settings: Any) -> bool:
        """Return whether the base weights are replaced by the residual of the initialization."""
        del settings
        return self.exchanges_weights

    def record(self, settings: Any) -> dict[str, Any]:
        """Return its settings for the adapter's record."""
        return {name: getattr(settings, name) for name in sorted(self.settings)}


class LoftqSpec(InitSpec):
    """The best low-rank approximation of the quantization error, over several rounds."""

    def changes_base(self, settings: Any) -> bool:
        """Return whether there is more than one round; the first leaves the base unchanged."""
        rounds: int = settings.loftq_iters
        return rounds > 1
