"""Settings of `optim`: the optimizers, and the size of their states."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from omegaconf import MISSING

from mens_exp.config.backend import has_frozen_base
from mens_exp.config.fields import Condition, Effect, setting

_F32 = 4  # bytes
DEFAULT_LR = 2e-3  # measured on the main job, of 135M: below 1e-3 in training loss
HIGHEST_LR = 1e6  # no optimizer here trains at it; far higher rates overflow an f32 update


def lr_beside(default_lr: float | None, parts: float = 1) -> float:
    """Return the default peak rate: the model's, divided by ``parts``.

    Args:
        default_lr: the default of the model's option; None if it has none.
        parts: the factor by which the optimizer's rate is smaller than AdamW's.
    """
    return (DEFAULT_LR if default_lr is None else default_lr) / parts


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """Settings common to all optimizers."""

    _target_: str = setting(MISSING, "Class of the optimizer; set by the option.")
    name: str = setting("own", "The option's name; set by the option.", changes=Effect.NOTHING)
    lr: float = setting(
        DEFAULT_LR,
        "Peak rate; unless set, that of the model's own option, model.default_lr.",
        gt=0,
        le=HIGHEST_LR,
        contract=("exec.learning_rate",),
        aliases={"learning_rate": "Transformers and TRL, Axolotl and LLaMA-Factory"},
        label="learning rate",
    )

    def state_bytes(self, parameters: int, sides: int) -> float | None:
        """Return the bytes of the optimizer state; None (unknown) for a user's class.

        Args:
            parameters: number of trained parameters.
            sides: sum of rows and columns of the trained matrices.
        """
        del parameters, sides
        return None

    @property
    def usual_parts(self) -> float:
        """The factor by which its typical rate is smaller than AdamW's."""
        return 1.0


_HAS_PAIR = Condition(
    holds=lambda config: (
        has_frozen_base(config.backend, config.model.source) and config.lora.spec.form.has_pair
    ),
    words=lambda config: (
        f"with backend={config.backend.name} and lora.variant={config.lora.spec.name}, which "
        "do not train matrices A and B alone"
    ),
    needs="a frozen base, and an adapter with matrices A and B, such as lora.variant=lora",
)


@dataclass(kw_only=True, slots=True)
class OptimConfig(OptimizerConfig):
    """Additional settings of AdamW and of the optimizers that share its form."""

    betas: list[float] = setting(
        [0.9, 0.999], "Decay of the two averages (torch's default).", example="[0.9,0.95]"
    )
    weight_decay: float = setting(
        0.0,
        "Decoupled decay (0: adapters are small, B starts at 0).",
        ge=0,
        aliases={"weight_decay": "Transformers and TRL, Axolotl and LLaMA-Factory"},
    )
    loraplus_lr_ratio: float | None = setting(
        None,
        "LoRA+ (arXiv:2402.12354): B, and DoRA's magnitudes, learn at this multiple of the rate, "
        "and A at the rate itself. The paper advises 16 with a lower rate. null: one rate.",
        ge=1,
        only_if=_HAS_PAIR,
        idle=None,
        aliases={"loraplus_lr_ratio": "PEFT, Axolotl and LLaMA-Factory"},
        example="16",
        label="LoRA+ ratio",
    )

    def state_bytes(self, parameters: int, sides: int) -> float:
        """Return the size of two f32 moments."""
        del sides
        return 2.0 * _F32 * parameters


@dataclass(kw_only=True, slots=True)
class AdamwConfig(OptimConfig):
    """AdamW (arXiv:1711.05101), with both moments in f32."""

    name: str = setting("adamw", "The option's name; set by the option.")
    eps: float = setting(
        1e-8,
        "Added to the denominator (torch's default).",
        gt=0,
        aliases={"adam_epsilon": "Transformers and TRL and Axolotl"},
    )


@dataclass(kw_only=True, slots=True)
class Adamw8bitConfig(AdamwConfig):
    """AdamW with 8-bit moments in blocks of 256 (arXiv:2110.02861).

    Matrices with fewer than 4,096 elements keep f32 moments, as is bitsandbytes' rule.
    """

    name: str = setting("adamw_8bit", "The option's name; set by the option.")

    def state_bytes(self, parameters: int, sides: int) -> float:
        """Return the size of two 8-bit moments, each with one scale per 256 elements."""
        del sides
        return 2 * (1 + _F32 / 256) * parameters


@dataclass(kw_only=True, slots=True)
class PagedAdamw8bitConfig(Adamw8bitConfig):
    """8-bit AdamW whose moments the driver pages to host memory when the GPU is full."""

    name: str = setting("paged_adamw_8bit", "The option's name; set by the option.")


@dataclass(kw_only=True, slots=True)
class LionConfig(OptimConfig):
    """Lion (arXiv:2302.06675): the sign of a moving average, one f32 value per parameter."""

    name: str = setting("lion", "The option's name; set by the option.")
    lr: float = setting(
        DEFAULT_LR / 10,
        "Peak rate; unless set, a tenth of model.default_lr (the paper advises a third to a tenth "
        "of AdamW's).",
        gt=0,
        le=HIGHEST_LR,
    )
    betas: list[float] = setting(
        [0.9, 0.99], "Decay of the average in the update and in the state (the paper's)."
    )

    def state_bytes(self, parameters: int, sides: int) -> float:
        """Return the size of one average in f32."""
        del sides
        return float(_F32 * parameters)

    @property
    def usual_parts(self) -> float:
        """All its steps have the same size (arXiv:2302.06675, section 5)."""
        return 10.0


class MuonRate(Enum):
    """The meaning of Muon's rate for a matrix, as torch names it."""

    match_rms_adamw = "match_rms_adamw"
    original = "original"


@dataclass(kw_only=True, slots=True)
class MuonConfig(OptimizerConfig):
    """Muon (https://kellerjordan.github.io/posts/muon) for matrices, AdamW for all others.

    An update is the average gradient with its singular values set to about 1, by five steps of a
    Newton-Schulz iteration in bf16. torch does the arithmetic of both (`torch.optim.Muon`).
    """

    name: str = setting("muon", "The option's name; set by the option.")
    adjust_lr_fn: MuonRate = setting(
        MuonRate.match_rms_adamw,
        "match_rms_adamw: updates as large as AdamW's, whose rate can be kept (arXiv:2502.16982); "
        "original: the rate is scaled by the square root of rows over columns, if that is above 1.",
    )
    momentum: float = setting(
        0.95, "Decay of the average gradient of a matrix (torch's default).", ge=0, lt=1
    )
    nesterov: bool = setting(True, "Look ahead by one step of the average (torch's default).")
    ns_steps: int = setting(5, "Steps of the iteration (torch's default).", ge=1, lt=100)
    betas: list[float] = setting(
        [0.9, 0.999], "Decay of AdamW's two averages (torch's default).", example="[0.9,0.95]"
    )
    eps: float = setting(1e-8, "Added to AdamW's denominator (torch's default).", gt=0)
    weight_decay: float = setting(
        0.0, "Decoupled decay (0: adapters are small, B starts at 0).", ge=0
    )

    def state_bytes(self, parameters: int, sides: int) -> float:
        """Return the size of one f32 average; the second one of vectors is neglected."""
        del sides
        return float(_F32 * parameters)


@dataclass(kw_only=True, slots=True)
class ScheduleFreeConfig(AdamwConfig):
    """Schedule-free AdamW (arXiv:2405.15682): an average over all steps instead of a decay.

    The model holds the average wherever it is validated, scored, saved or written; a gradient is
    taken at the point between the average and the last step, as the paper asks. Needs the
    schedulefree package.
    """

    name: str = setting("schedule_free", "The option's name; set by the option.")
    betas: list[float] = setting(
        [0.9, 0.999],
        "Weight of the average at the point of the gradient; decay of the squared gradient "
        "(schedulefree's defaults).",
        example="[0.95,0.999]",
    )

    def state_bytes(self, parameters: int, sides: int) -> float:
        """Return the size of the last step, the gradient's point and the second moment, in f32."""
        del sides
        return 3.0 * _F32 * parameters


@dataclass(kw_only=True, slots=True)
class ProdigyConfig(OptimizerConfig):
    """Prodigy (arXiv:2306.06101): Adam whose rate is estimated from the distance to the start.

    Needs the prodigyopt package, whose defaults these are, except for safeguard_warmup.
    """

    name: str = setting("prodigy", "The option's name; set by the option.")
    lr: float = setting(
        1.0,
        "Multiple of the estimated rate at the peak of the schedule; leave it at 1.",
        gt=0,
        le=HIGHEST_LR,
    )
    betas: list[float] = setting([0.9, 0.999], "Decay of the two averages.", example="[0.9,0.99]")
    eps: float = setting(1e-8, "Added to the denominator, times the estimate.", gt=0)
    weight_decay: float = setting(
        0.0, "Decoupled decay (0: adapters are small, B starts at 0).", ge=0
    )
    d0: float = setting(1e-6, "First estimate, which only grows.", gt=0)
    d_coef: float = setting(
        1.0, "Multiple of each new estimate; the package advises 0.5 to 2 to tune the method.", gt=0
    )
    use_bias_correction: bool = setting(False, "Correct the averages of the first steps, as Adam.")
    safeguard_warmup: bool = setting(
        True, "Keep the low rates of a warm-up out of the estimate; built-in schedules have one."
    )
    slice_p: int = setting(
        1, "Estimate from every n-th element only, to save memory; the package suggests 11.", ge=1
    )

    def state_bytes(self, parameters: int, sides: int) -> float:
        """Return the size of two averages, and of the start and a sum, in f32."""
        del sides
        return 2.0 * _F32 * parameters * (1 + 1 / self.slice_p)


@dataclass(kw_only=True, slots=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor (arXiv:1804.04235): a second moment of row and column sums, and no first one.

    The rate is relative to the root mean square of each matrix, or to 0.001 where that is smaller,
    and at most ``1 / sqrt(step)``: torch's `torch.optim.Adafactor`.
    """

    name: str = setting("adafactor", "The option's name; set by the option.")
    lr: float = setting(
        50 * DEFAULT_LR,
        "Peak relative rate; unless set, fifty times model.default_lr (measured: "
        "experiments/LOG.md, 2026-11-25).",
        gt=0,
        le=HIGHEST_LR,
    )
    beta2_decay: float = setting(
        -0.8, "Exponent of the step in the decay of the second moment (the paper's).", le=0
    )
    d: float = setting(1.0, "Largest root mean square of an update (the paper's).", ge=1)
    weight_decay: float = setting(
        0.0, "Decoupled decay (0: adapters are small, B starts at 0).", ge=0
    )

    def state_bytes(self, parameters: int, sides: int) -> float:
        """Return the size of the sums, in f32."""
        del parameters
        return float(_F32 * sides)

    @property
    def usual_parts(self) -> float:
        """Its rate is a share of a matrix's size."""
        return 1 / 50


@dataclass(kw_only=True, slots=True)
class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum: `torch.optim.SGD`."""

    name: str = setting("sgd", "The option's name; set by the option.")
    lr: float = setting(
        100 * DEFAULT_LR,
        "Peak rate; unless set, a hundred times model.default_lr (measured: experiments/LOG.md, "
        "2026-11-25).",
        gt=0,
        le=HIGHEST_LR,
    )
    momentum: float = setting(0.9, "Share of the last update that is kept (0: none).", ge=0, lt=1)
    nesterov: bool = setting(
        False,
        "Look ahead by one step of the momentum.",
        only_if=Condition(
            holds=lambda config: config.optim.momentum > 0,
            words=lambda _: "with optim.momentum=0",
            needs="optim.momentum above 0",
        ),
        idle=False,
    )
    weight_decay: float = setting(0.0, "Decay, added to the gradient (torch's).", ge=0)

    def state_bytes(self, parameters: int, sides: int) -> float:
        """Return the size of the momentum in f32."""
        del sides
        return float(_F32 * parameters) if self.momentum > 0 else 0.0

    @property
    def usual_parts(self) -> float:
        """Its steps are as small as the gradient."""
        return 1 / 100


@dataclass(kw_only=True, slots=True)
class LowRankConfig(OptimizerConfig):
    """Settings common to optimizers that project gradients to a low rank.

    They project the decoder's linear weights whose shorter side is above `rank`. AdamW of the same
    package trains all other parameters.
    """

    in_group: ClassVar[dict[str, str]]  # settings of the projected weights -> the package's names

    rank: int = setting(MISSING, "Rank; set by the option.")
    update_proj_gap: int = setting(
        200, "Steps between new projections (Transformers' default).", ge=1
    )
    scale: float = setting(MISSING, "Factor; set by the option.")
    betas: list[float] = setting([0.9, 0.999], "Decay of the two averages.", example="[0.9,0.95]")
    eps: float = setting(1e-6, "Added to the denominator (the package's default).", gt=0)
    weight_decay: float = setting(0.0, "Decoupled decay (the package's default).", ge=0)

    def state_bytes(self, parameters: int, sides: int) -> float:
        """Return the size of two f32 moments, without projection."""
        del sides
        return 2.0 * _F32 * parameters

    def projects(self, rows: int, columns: int) -> bool:
        """Return whether a linear weight of the decoder is large enough to be projected."""
        return min(rows, columns) > self.rank

    def saved_bytes(self, rows: int, columns: int) -> float:
        """Return the bytes saved on a projected weight; its moments are [rank, longer side]."""
        state = self.rank * (2 * max(rows, columns) + min(rows, columns))
        return _F32 * (2.0 * rows * columns - state)


class ProjectedSide(Enum):
    """The side of a matrix that GaLore projects."""

    std = "std"
    reverse_std = "reverse_std"


@dataclass(kw_only=True, slots=True)
class GaloreConfig(LowRankConfig):
    """GaLore (arXiv:2403.03507): AdamW on gradients projected to their largest singular vectors.

    Needs the pytorch-optimizer package.
    """

    in_group: ClassVar[dict[str, str]] = {
        "rank": "rank",
        "update_proj_gap": "update_proj_gap",
        "scale": "scale",
        "proj_type": "projection_type",
    }

    name: str = setting("galore", "The option's name; set by the option.")
    rank: int = setting(
        128, "Singular vectors that a projection keeps (Transformers' default).", ge=1
    )
    scale: float = setting(
        0.25, "Multiple of the update of a projected weight (Transformers' default).", gt=0
    )
    proj_type: ProjectedSide = setting(
        ProjectedSide.std,
        "std: project the shorter side of a matrix, and keep moments of the longer one; "
        "reverse_std: the other way round, with smaller moments and a larger projection.",
    )

    def saved_bytes(self, rows: int, columns: int) -> float:
        """Return the bytes saved on a projected weight."""
        moments, projected = max(rows, columns), min(rows, columns)
        if self.proj_type is ProjectedSide.reverse_std:
            moments, projected = projected, moments
        return _F32 * (2.0 * rows * columns - self.rank * (2 * moments + projected))


class Projection(Enum):
    """The method that computes APOLLO's projections."""

    random = "random"
    svd = "svd"


class ScaleType(Enum):
    """The granularity at which APOLLO scales a gradient."""

    channel = "channel"
    tensor = "tensor"


@dataclass(kw_only=True, slots=True)
class ApolloConfig(LowRankConfig):
    """APOLLO (arXiv:2412.05270): the gradient itself, scaled by AdamW's update of its projection.

    Needs the apollo-torch package of the authors, whose license excludes commercial use. The
    defaults are those of APOLLO-Mini in Transformers.
    """

    in_group: ClassVar[dict[str, str]] = {
        "rank": "rank",
        "update_proj_gap": "update_proj_gap",
        "scale": "scale",
        "proj": "proj",
        "scale_type": "scale_type",
    }

    name: str = setting("apollo", "The option's name; set by the option.")
    rank: int = setting(1, "Rank of the projection; 1 with scale_type=tensor is APOLLO-Mini.", ge=1)
    scale: float = setting(
        128.0,
        "The update of a projected weight is multiplied by the square root of this; the authors "
        "advise 128 for APOLLO-Mini, and 1 with scale_type=channel.",
        gt=0,
    )
    scale_type: ScaleType = setting(
        ScaleType.tensor,
        "tensor: one factor for a matrix; channel: one for each row, or for each column if those "
        "are longer.",
    )
    proj: Projection = setting(
        Projection.random,
        "random: normal numbers drawn from the run's seed; svd: the largest singular vectors.",
    )


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "adamw": AdamwConfig,
    "adamw_8bit": Adamw8bitConfig,
    "paged_adamw_8bit": PagedAdamw8bitConfig,
    "lion": LionConfig,
    "muon": MuonConfig,
    "schedule_free": ScheduleFreeConfig,
    "prodigy": ProdigyConfig,
    "adafactor": AdafactorConfig,
    "sgd": SgdConfig,
    "galore": GaloreConfig,
    "apollo": ApolloConfig,
}
