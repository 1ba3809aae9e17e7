"""Settings of `lora`, and the tables of adapter methods and initializations.

Nothing here imports torch. :attr:`AdapterSpec.method` names the object that adds layers to a model
and initializes, saves and merges them; it extends :class:`mens_exp.lora.method.AdapterMethod`.

An installed package adds a method under the entry point group ``mens_exp.adapter_methods``
(:mod:`mens_exp.config.plugins`). Its name is the value of `lora.variant`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from mens_exp.artifacts.adapter_tensors import FORMS
from mens_exp.config.fields import Condition, Effect, setting, when
from mens_exp.config.lora_spec import (
    AdaloraSpec,
    AdapterSpec,
    DoraSpec,
    InitSpec,
    LnTuningSpec,
    LoftqSpec,
    LokrSpec,
    LoraSpec,
    PassthroughSpec,
    PlainLoraSpec,
    PromptTuningSpec,
    RandLoraSpec,
    VeraSpec,
    WholeUpdateSpec,
)
from mens_exp.config.plugins import Registry

_OF_ALLOCATION = frozenset(
    {"target_r", "orthogonality", "allocate_after_steps", "allocate_every_n_steps", "settle_steps"}
)
_BUILT_IN: dict[str, AdapterSpec] = {
    spec.name: spec
    for spec in (
        PlainLoraSpec(
            name="lora",
            form=FORMS["lora"],
            backends=("qlora", "lora", "burn", "proxy"),
            peft={},
        ),
        LoraSpec(name="rslora", form=FORMS["rslora"], peft={"use_rslora": True}),
        DoraSpec(
            name="dora",
            form=FORMS["dora"],
            peft={"use_dora": True},
            reads_base=True,
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
        LnTuningSpec(
            name="ln_tuning",
            method="mens_exp.lora.norms:LN_TUNING",
            form=FORMS["ln_tuning"],
            on_norms=True,
        ),
        WholeUpdateSpec(
            name="loha",
            method="mens_exp.lora.peft_methods:LOHA",
            form=FORMS["loha"],
            settings=frozenset({"r", "alpha"}),
            keeps_inputs=True,
        ),
        LokrSpec(
            name="lokr",
            method="mens_exp.lora.peft_methods:LOKR",
            form=FORMS["lokr"],
            settings=frozenset({"r", "alpha"}),
            keeps_inputs=True,
        ),
        AdaloraSpec(
            name="adalora",
            method="mens_exp.lora.peft_methods:ADALORA",
            form=FORMS["adalora"],
            settings=frozenset({"r", "alpha", *_OF_ALLOCATION}),
            keeps_inputs=True,
            allocates=True,
            not_sharded="ranks are taken from all layers together, and each process holds a part "
            "of them",
        ),
        VeraSpec(
            name="vera",
            method="mens_exp.lora.peft_methods:VERA",
            form=FORMS["vera"],
            settings=frozenset({"r"}),
            not_sharded="all layers share VeRA's projections, and each process holds a part of "
            "the layers",
        ),
        RandLoraSpec(
            name="randlora",
            method="mens_exp.lora.peft_methods:RANDLORA",
            form=FORMS["randlora"],
            settings=frozenset({"r", "alpha"}),
            keeps_inputs=True,
            not_sharded="all layers share RandLoRA's bases, and each process holds a part of the "
            "layers",
        ),
        PromptTuningSpec(
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
        PassthroughSpec(
            name="passthrough",
            method="mens_exp.backends.passthrough:ANY_PEFT",
            form=FORMS["passthrough"],
            keeps_inputs=True,
            not_sharded="PEFT's layers compute with whole tensors, and each process holds a part "
            "of them",
            reads_base=True,
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


INITS = {
    spec.name: spec
    for spec in (
        InitSpec(name="default"),
        InitSpec(name="eva", from_inputs=True),
        InitSpec(name="lora_ga", from_gradients=True),
        InitSpec(name="pissa", start="mens_exp.lora.method:PISSA"),
        LoftqSpec(
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
        "Probability of dropping an input element of A (the QLoRA paper's), rounded to a multiple "
        "of 1/32768; 0 with experts, because PEFT adapts their weights and not their inputs.",
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
        "OFT, BOFT, FOURIERFT, MISS or WAVEFT. On the command line also the path of an "
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
