"""Settings of `lora`, and the specs of adapter methods and initializations.

Nothing here imports torch. :attr:`AdapterSpec.method` names the object that adds layers to a model
and initializes, saves and merges them; it extends :class:`mens_exp.lora.method.AdapterMethod`.

An installed package adds a method under the entry point group ``mens_exp.adapter_methods``
(:mod:`mens_exp.config.plugins`). Its name is the value of `lora.variant`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from mens_exp.artifacts.adapter_tensors import FORMS, AdapterForm, factors
from mens_exp.artifacts.adapter_v3 import PROJECTION_SEED
from mens_exp.config.fields import Condition, Effect, setting, when
from mens_exp.config.plugins import Registry, named_object

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

_OF_LORA = frozenset(
    {"r", "alpha", "dropout", "rank_pattern", "alpha_pattern", "init", "loftq_iters"}
)
_OF_ALLOCATION = frozenset(
    {"target_r", "orthogonality", "allocate_after_steps", "allocate_every_n_steps", "settle_steps"}
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
        on_norms: whether it adapts the vectors of norms instead of linear modules.
        on_embedding: whether it adapts the embedding table, and `lora.targets` must be empty.
        rank_setting: the setting that :meth:`rank` returns.
    """

    name: str
    method: str
    form: AdapterForm
    settings: frozenset[str] = frozenset()
    schema: type[LoraConfig] | None = None
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
    on_norms: bool = False
    on_embedding: bool = False
    rank_setting: str = "r"

    def virtual_tokens(self, settings: LoraConfig) -> int:
        """Return the number of trained vectors that precede the tokens of each document."""
        del settings
        return 0

    def fits(self, settings: LoraConfig) -> bool:
        """Return whether the group has the settings that the method reads."""
        return self.schema is None or isinstance(settings, self.schema)

    def rank(self, settings: LoraConfig) -> int:
        """Return the rank for records; 1 for a method without one."""
        return settings.r if "r" in self.settings else 1

    def alpha(self, settings: LoraConfig) -> int:
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

    def shapes(
        self, settings: LoraConfig, *, r: int, width: int, out: int
    ) -> dict[str, tuple[int, ...]]:
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

    def projections(
        self, settings: LoraConfig, sizes: Collection[tuple[int, int]]
    ) -> dict[str, Any]:
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

    def described(self, settings: LoraConfig) -> list[str]:
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
class _Lora(AdapterSpec):
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


class _Plain(_Lora):
    """Plain LoRA, which descriptions omit."""

    def described(self, settings: LoraConfig) -> list[str]:
        """Describe the adapter without its name."""
        return super().described(settings)[1:]


class _Dora(_Lora):
    """DoRA, which scales an output by a ratio of norms."""

    def kept_per_token(self, *, r: int, out: int, width: int) -> int:
        """Return the sizes of A's output and of the scaled output."""
        del width
        return r + out


class _WholeUpdate(AdapterSpec):
    """A method whose forward pass builds the update of a full weight."""

    def formed(self, *, r: int, out: int, width: int) -> int:
        """Return the size of the weight."""
        del r
        return out * width


class _Lokr(_WholeUpdate):
    """LoKr, one of whose matrices is itself a product of low rank."""

    def largest_rank(self, *, out: int, width: int) -> int:
        """Return the largest rank at which PEFT uses that product instead of a full matrix."""
        return (max(factors(out)[1], factors(width)[1]) - 1) // 2


class _LnTuning(AdapterSpec):
    """LN tuning, which PEFT has too."""

    @property
    def has_peft_view(self) -> bool:
        """True: PEFT has a type for it."""
        return True


class _Adalora(AdapterSpec):
    """AdaLoRA, which has a diagonal factor between A and B."""

    def kept_per_token(self, *, r: int, out: int, width: int) -> int:
        """Return the size of A's output."""
        del out, width
        return r


class _Vera(AdapterSpec):
    """VeRA, whose frozen projections have the size of the largest layer."""

    def projections(
        self, settings: LoraConfig, sizes: Collection[tuple[int, int]]
    ) -> dict[str, int]:
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


class _RandLora(_Vera):
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


class _PromptTuning(AdapterSpec):
    """Prompt tuning, whose only tensor has a row for each virtual token."""

    def fits(self, settings: LoraConfig) -> bool:
        """Return whether the group has the number of virtual tokens."""
        return isinstance(settings, PromptTuningConfig)

    def virtual_tokens(self, settings: LoraConfig) -> int:
        """Return the setting; 0 for a group without it, which is reported elsewhere."""
        return settings.num_virtual_tokens if isinstance(settings, PromptTuningConfig) else 0

    def rank(self, settings: LoraConfig) -> int:
        """Return the number of virtual tokens, the rows of the tensor."""
        return self.virtual_tokens(settings)

    @property
    def has_peft_view(self) -> bool:
        """True: PEFT has the method."""
        return True

    def shapes(
        self, settings: LoraConfig, *, r: int, width: int, out: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the shape of the vectors; ``r`` is not read."""
        del r
        return super().shapes(settings, r=self.virtual_tokens(settings), width=width, out=out)

    def kept_per_token(self, *, r: int, out: int, width: int) -> int:
        """Return zero: the lookup of a vector saves no values."""
        del r, out, width
        return 0

    def described(self, settings: LoraConfig) -> list[str]:
        """Name the method, the number of virtual tokens, and their initial values."""
        assert isinstance(settings, PromptTuningConfig)
        many, start = settings.num_virtual_tokens, settings.prompt_tuning_init.value
        return [self.name, f"{many} virtual token{'s' if many != 1 else ''}", f"from {start}"]


class _AnyPeft(_WholeUpdate):
    """Any PEFT type, with PEFT's own configuration; its methods import PEFT."""

    @property
    def option(self) -> str:
        """The option with PEFT's configuration."""
        return "peft"

    def fits(self, settings: LoraConfig) -> bool:
        """Return whether the group has PEFT's configuration."""
        return isinstance(settings, PassthroughConfig)

    @property
    def has_peft_view(self) -> bool:
        """True: PEFT reads its own configuration."""
        return True

    def shapes(
        self, settings: LoraConfig, *, r: int, width: int, out: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the layer that PEFT builds."""
        del r
        assert isinstance(settings, PassthroughConfig)
        found: dict[str, tuple[int, ...]] = self._asked().shapes(
            settings.config, out=out, width=width
        )
        return found

    def problems(self, config: Any, modules: Sequence[Any]) -> Iterable[Any]:
        """Try the configuration with PEFT."""
        found: Iterable[Any] = self._asked().problems(config, modules)
        return found

    def projections(
        self, settings: LoraConfig, sizes: Collection[tuple[int, int]]
    ) -> dict[str, Any]:
        """Return PEFT's configuration."""
        del sizes
        assert isinstance(settings, PassthroughConfig)
        return dict(settings.config)

    def shared_bytes(self, projections: Mapping[str, Any], *, width: int) -> int:
        """Return zero: layers share no tensor."""
        del projections, width
        return 0

    def described(self, settings: LoraConfig) -> list[str]:
        """Name the type and the configured fields."""
        assert isinstance(settings, PassthroughConfig)
        fields = dict(settings.config)
        name = str(fields.pop("peft_type", self.name))
        return [name, *(f"{key} {value}" for key, value in fields.items())]

    def _asked(self) -> Any:
        return named_object(self.method, object, of=f"the adapter method {self.name}")


_BUILT_IN: dict[str, AdapterSpec] = {
    spec.name: spec
    for spec in (
        _Plain(
            name="lora",
            form=FORMS["lora"],
            backends=("qlora", "lora", "burn", "proxy"),
            peft={},
        ),
        _Lora(name="rslora", form=FORMS["rslora"], peft={"use_rslora": True}),
        _Dora(
            name="dora",
            form=FORMS["dora"],
            peft={"use_dora": True},
            not_on_head="the head has rows of zeros (padding), which have no direction to learn "
            "apart",
            not_on_experts="PEFT has no DoRA for experts",
        ),
        AdapterSpec(
            name="ia3",
            method="mens_exp.lora.peft_methods:IA3",
            form=FORMS["ia3"],
            not_on_biased="(IA)³ multiplies the bias too, and a merge changes weights alone",
        ),
        _LnTuning(
            name="ln_tuning",
            method="mens_exp.lora.norms:LN_TUNING",
            form=FORMS["ln_tuning"],
            on_norms=True,
        ),
        _WholeUpdate(
            name="loha",
            method="mens_exp.lora.peft_methods:LOHA",
            form=FORMS["loha"],
            settings=frozenset({"r", "alpha"}),
            keeps_inputs=True,
        ),
        _Lokr(
            name="lokr",
            method="mens_exp.lora.peft_methods:LOKR",
            form=FORMS["lokr"],
            settings=frozenset({"r", "alpha"}),
            keeps_inputs=True,
        ),
        _Adalora(
            name="adalora",
            method="mens_exp.lora.peft_methods:ADALORA",
            form=FORMS["adalora"],
            settings=frozenset({"r", "alpha", *_OF_ALLOCATION}),
            keeps_inputs=True,
            allocates=True,
            not_sharded="ranks are taken from all layers together, and each process holds a part "
            "of them",
        ),
        _Vera(
            name="vera",
            method="mens_exp.lora.peft_methods:VERA",
            form=FORMS["vera"],
            settings=frozenset({"r"}),
            not_sharded="all layers share VeRA's projections, and each process holds a part of "
            "the layers",
        ),
        _RandLora(
            name="randlora",
            method="mens_exp.lora.peft_methods:RANDLORA",
            form=FORMS["randlora"],
            settings=frozenset({"r", "alpha"}),
            keeps_inputs=True,
            not_sharded="all layers share RandLoRA's bases, and each process holds a part of the "
            "layers",
        ),
        _PromptTuning(
            name="prompt_tuning",
            method="mens_exp.lora.prompt_tuning:PROMPT_TUNING",
            form=FORMS["prompt_tuning"],
            settings=frozenset(
                {"num_virtual_tokens", "prompt_tuning_init", "prompt_tuning_init_text"}
            ),
            not_on_head=None,
            not_merged="virtual tokens of prompt tuning are inputs of the model, and cannot be "
            "merged into its weights",
            not_sharded="each process holds a part of the layers, and the virtual tokens come "
            "before all of them",
            on_embedding=True,
            rank_setting="num_virtual_tokens",
        ),
        _AnyPeft(
            name="passthrough",
            method="mens_exp.backends.passthrough:ANY_PEFT",
            form=FORMS["passthrough"],
            keeps_inputs=True,
            not_sharded="PEFT's layers compute with whole tensors, and each process holds a part "
            "of them",
        ),
    )
}
ADAPTERS = Registry(
    kind="adapter method",
    group="mens_exp.adapter_methods",
    spec=AdapterSpec,
    built_in=_BUILT_IN,
    options="lora",
)

# Keys of PEFT's LoRA configuration that select one of our methods.
PEFT_FLAGS = tuple(
    sorted({flag for spec in ADAPTERS.built_in.values() for flag in spec.peft or {}})
)


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

    def changes_base(self, settings: LoraConfig) -> bool:
        """Return whether the base weights are replaced by the residual of the initialization."""
        del settings
        return self.exchanges_weights

    def record(self, settings: LoraConfig) -> dict[str, Any]:
        """Return its settings for the adapter's record."""
        return {name: getattr(settings, name) for name in sorted(self.settings)}


class _OfError(InitSpec):
    """The best low-rank approximation of the quantization error, over several rounds."""

    def changes_base(self, settings: LoraConfig) -> bool:
        """Return whether there is more than one round; the first leaves the base unchanged."""
        return settings.loftq_iters > 1


INITS = {
    spec.name: spec
    for spec in (
        InitSpec(name="default"),
        InitSpec(name="eva", from_inputs=True),
        InitSpec(name="lora_ga", from_gradients=True),
        InitSpec(name="pissa", start="mens_exp.lora.method:PISSA"),
        _OfError(
            name="loftq", start="mens_exp.lora.method:LOFTQ", settings=frozenset({"loftq_iters"})
        ),
    )
}


class LoraVariant(Enum):
    """Name of an adapter method; its :class:`AdapterSpec` describes it."""

    lora = "lora"
    rslora = "rslora"
    dora = "dora"
    ia3 = "ia3"
    ln_tuning = "ln_tuning"
    loha = "loha"
    lokr = "lokr"
    adalora = "adalora"
    vera = "vera"
    randlora = "randlora"
    prompt_tuning = "prompt_tuning"
    passthrough = "passthrough"
    vars().update({name: name for name in ADAPTERS.installed_names()})

    @property
    def spec(self) -> AdapterSpec:
        """The adapter method."""
        return ADAPTERS.named(self.value)


class LoraInit(Enum):
    """The initialization of an adapter's tensors."""

    default = "default"
    eva = "eva"
    lora_ga = "lora_ga"
    pissa = "pissa"
    loftq = "loftq"

    @property
    def spec(self) -> InitSpec:
        """The initialization."""
        return INITS[self.value]


def _read(name: str) -> Condition:
    """Return the condition that the selected adapter method reads a setting."""
    return Condition(
        holds=lambda config: name in config.lora.spec.settings,
        words=lambda config: f"with lora.variant={config.lora.spec.name}, which does not read it",
        needs="a lora.variant that reads it",
    )


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """LoRA (arXiv:2106.09685): a target's update is ``(alpha / r) · B A``, B initially zero."""

    name: str = setting(
        MISSING, "Name of the target group; set by the option.", changes=Effect.NOTHING
    )
    targets: list[str] = setting(
        MISSING,
        "Modules that get an adapter: groups (attention, qkv, qv, o_proj, mlp, experts, "
        "all_linear, lm_head; norms in ln_tuning), last names of modules (q_proj, "
        "self_attn.q_proj), or globs over a module's whole path ('*.layers.1?.mlp.*').",
        aliases={
            "lora_target": "LLaMA-Factory",
            "lora_target_modules": "Axolotl and TRL",
            "target_modules": "PEFT and Unsloth",
        },
        example="[attention,down_proj]",
    )
    r: int = setting(
        16,
        "Rank of the update (SigilDERG's value).",
        ge=1,
        only_if=_read("r"),
        contract=("adapter.rank",),
        aliases={"lora_rank": "LLaMA-Factory and torchtune", "lora_r": "Axolotl and LitGPT"},
    )
    alpha: int = setting(
        16,
        "Numerator of the scale: alpha / r, alpha / sqrt(r) in rslora (SigilDERG's value).",
        ge=1,
        only_if=_read("alpha"),
        contract=("adapter.alpha",),
        aliases={"lora_alpha": "PEFT, Axolotl, LLaMA-Factory, torchtune and LitGPT"},
    )
    dropout: float = setting(
        0.05,
        "Probability of dropping an input element of A (the QLoRA paper's); 0 with experts, "
        "because PEFT adapts their weights and not their inputs.",
        ge=0,
        lt=1,
        only_if=_read("dropout"),
        contract=("adapter.dropout",),
        aliases={"lora_dropout": "PEFT, Axolotl, LLaMA-Factory, torchtune and LitGPT"},
    )
    variant: LoraVariant = setting(
        LoraVariant.lora,
        "lora; rslora, whose scale is alpha / sqrt(r) (arXiv:2312.03732); dora, which learns the "
        "magnitude of each output's weights separately (arXiv:2402.09353); ia3, a factor for each "
        "output (arXiv:2205.05638); ln_tuning, the weights and biases of norms themselves "
        "(arXiv:2312.11420); loha, the elementwise product of two low-rank matrices "
        "(arXiv:2108.06098); lokr, their Kronecker product (arXiv:2309.14859); adalora, "
        "which takes ranks from the layers that need them least (arXiv:2303.10512); vera, factors "
        "on random projections that all layers share (arXiv:2310.11454); randlora, factors on "
        "random bases of full rank (arXiv:2502.00987); prompt_tuning, vectors before the tokens of "
        "each document (arXiv:2104.08691; lora=prompt_tuning); or passthrough, the type of PEFT "
        "that lora.config of lora=peft names.",
    )
    target_r: int = setting(
        8,
        "Mean rank of a layer at the end in adalora, below lora.r (PEFT's).",
        ge=1,
        only_if=_read("target_r"),
        idle=8,
    )
    orthogonality: float = setting(
        0.5,
        "Weight of the penalty on A and B that are not orthogonal in adalora (PEFT's "
        "`orth_reg_weight`).",
        ge=0,
        only_if=_read("orthogonality"),
        idle=0.5,
    )
    allocate_after_steps: int = setting(
        0,
        "Steps with full ranks at the beginning of adalora (PEFT's `tinit`).",
        ge=0,
        only_if=_read("allocate_after_steps"),
        idle=0,
    )
    allocate_every_n_steps: int = setting(
        1,
        "Steps between two allocations of ranks in adalora (PEFT's `deltaT`).",
        ge=1,
        only_if=_read("allocate_every_n_steps"),
        idle=1,
    )
    settle_steps: int = setting(
        0,
        "Steps with the final ranks at the end of adalora (PEFT's `tfinal`).",
        ge=0,
        only_if=_read("settle_steps"),
        idle=0,
    )
    rank_pattern: dict[str, int] = setting(
        {},
        "Ranks of single modules, by target: {down_proj: 8}. The last match counts.",
        only_if=_read("rank_pattern"),
        idle={},
        example="{down_proj:8}",
    )
    alpha_pattern: dict[str, int] = setting(
        {},
        "Alphas of single modules, by target. The last match counts.",
        only_if=_read("alpha_pattern"),
        idle={},
        example="{down_proj:16}",
    )
    init: LoraInit = setting(
        LoraInit.default,
        "default: A random, B zero (PEFT's); eva: A the principal directions of the layer's "
        "inputs (arXiv:2410.07170); lora_ga: singular directions of the gradient of the run's "
        "first step by the weight (arXiv:2407.05000, with PEFT's factors), the base quantizes "
        "what is left; pissa: the first r singular directions of a weight, the base quantizes "
        "what is left (arXiv:2404.02948); loftq: those of the quantization error "
        "(arXiv:2310.08659).",
    )
    loftq_iters: int = setting(
        1,  # with one round, the quantized base is unchanged, and the adapter matches it exactly
        "Rounds of quantization and decomposition in loftq; from the second round, the base "
        "changes too.",
        ge=1,
        only_if=when("lora.init", "loftq"),
        idle=1,
    )
    init_from: str | None = setting(
        None,
        "A run, `latest`, or an adapter directory (schema v3 or PEFT) whose adapter this run "
        "starts from, with a fresh optimizer; null: a new adapter.",
        example="latest",
    )

    @property
    def spec(self) -> AdapterSpec:
        """The adapter method."""
        return self.variant.spec

    @property
    def start_changes_base(self) -> bool:
        """Whether the base weights are replaced by the residual of the initialization."""
        return self.init.spec.changes_base(self)


@dataclass(kw_only=True, slots=True)
class PassthroughConfig(LoraConfig):
    """Any type of PEFT that adapts linear layers one by one, by its own configuration."""

    config: dict[str, Any] = setting(
        {},
        "Fields of PEFT's configuration class by PEFT's names, with peft_type: the type, such as "
        "OFT, BOFT, C3A, FOURIERFT, MISS or WAVEFT. On the command line also the path of an "
        "adapter_config.json, whose target_modules become lora.targets.",
        example="{peft_type:OFT,oft_block_size:32}",
        only_if=when("lora.variant", "passthrough"),
    )


class PromptInit(Enum):
    """The initial values of virtual tokens, by PEFT's names."""

    random = "random"
    sample_vocab = "sample_vocab"
    text = "text"


@dataclass(kw_only=True, slots=True)
class PromptTuningConfig(LoraConfig):
    """Prompt tuning (arXiv:2104.08691): trained vectors before the tokens of each document."""

    num_virtual_tokens: int = setting(
        20,
        "Virtual tokens before each document; they count towards data.seq_len (the paper's choice "
        "for most models, section 3.2: more than 20 gain little).",
        ge=1,
    )
    prompt_tuning_init: PromptInit = setting(
        PromptInit.sample_vocab,
        "Initial values: sample_vocab, embeddings of tokens drawn from the vocabulary (the paper's "
        "figure 3b: better than random values); random, a standard normal distribution (PEFT's "
        "default); or text, embeddings of the tokens of lora.prompt_tuning_init_text.",
    )
    prompt_tuning_init_text: str | None = setting(
        None,
        "Text whose tokens the virtual tokens start as, repeated or cut to their number.",
        only_if=when("lora.prompt_tuning_init", "text"),
        example="'Complete the Python function.'",
    )


def prompt_tuning(num_virtual_tokens: int) -> PromptTuningConfig:
    """Return the group for prompt tuning with this number of virtual tokens."""
    return PromptTuningConfig(
        name="prompt_tuning",
        targets=[],
        variant=LoraVariant.prompt_tuning,
        num_virtual_tokens=num_virtual_tokens,
    )


def plain_lora(targets: list[str]) -> LoraConfig:
    """Return the group for a plain LoRA adapter, whose initial update is zero."""
    return LoraConfig(name="plain", targets=targets, dropout=0.0)
