"""Settings of task=compare, task=promote and studies, and the promotion policies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from mens_exp.config.fields import Condition, section, setting, unless


class CompareTest(Enum):
    """The statistical test behind a verdict."""

    t = "t"
    sign_flip = "sign_flip"


class CompareTarget(Enum):
    """The items that a verdict covers."""

    these_items = "these_items"
    items_like_these = "items_like_these"


class Sequential(Enum):
    """Whether a verdict corrects for repeated looks at the same arms."""

    none = "none"
    always_valid = "always_valid"


@dataclass(kw_only=True, slots=True)
class CompareConfig:
    """The basis of a verdict, fixed before the verdict is known."""

    factors: list[str] = setting(
        [],
        "Settings or groups in which the arms differ, such as [quant.double_quant]; an empty "
        "list: what the runs' own command lines vary.",
        example="[lora.targets]",
    )
    primary: str | None = setting(
        None,
        "The KPI that decides verdicts; all others are secondary. null: the first of "
        "task_success, parse_rate, val_loss and val_bits_per_byte that every arm has.",
        example="val_loss",
    )
    reference: str | None = setting(
        None,
        "The reference arm: its name, or its value of a factor; null is that of the first run.",
        example="qlora",
    )
    condition: str = setting(
        "tuned", "The scorecards' condition that arms are compared on.", example="base"
    )
    alpha: float = setting(
        0.05, "Two-sided error rate, shared by all arms (Holm).", ge=1e-9, lt=0.5
    )  # the field's convention
    power: float = setting(
        0.8, "Chance at which the minimum detectable effect is stated.", ge=0.5, lt=1
    )
    test: CompareTest = setting(
        CompareTest.t,
        "t: Student's t on the seeds' differences (measured: benchmarks/calibration.py); "
        "sign_flip: a permutation test of their signs; five seeds can never reach p < 0.05.",
    )
    target: CompareTarget = setting(
        CompareTarget.these_items,
        "these_items: other seeds on exactly these items; items_like_these: other items of their "
        "kind too, of which these are a sample (needs test=t; measured: benchmarks/items.py).",
    )
    sequential: Sequential = setting(
        Sequential.none,
        "none: the p-value of one look, after a number of seeds that was fixed before; "
        "always_valid: one that may be read after every seed, at the price of wider intervals "
        "(measured: benchmarks/looks.py).",
    )

    def record(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {
            "primary": self.primary,
            "reference": self.reference,
            "condition": self.condition,
            "alpha": self.alpha,
            "power": self.power,
            "test": self.test.value,
            "target": self.target.value,
            "sequential": self.sequential.value,
        }


# Limits of the mens trainer (REFERENCE §10).
_FLOORS = {
    "strictness": 0.95,
    "compile_pass_1": 0.90,
    "semantic_task_success": 0.85,
    "anti_stub_pass": 0.92,
    "richness": 0.20,
}
_CEILINGS = {"trivial_placeholder_output": 0.08, "placeholder_marker_hits": 0.08}


class Direction(Enum):
    """The direction of a hypothesis."""

    higher = "higher"
    lower = "lower"


@dataclass(kw_only=True, slots=True)
class PolicyConfig:
    """Settings common to all policies."""

    name: str = setting(MISSING, "Name of the policy; set by the option.")


@dataclass(kw_only=True, slots=True)
class BurnProductionPolicy(PolicyConfig):
    """Decide whether the challenger's backend replaces the incumbent's in production.

    A cycle freezes these values when it is opened; KPI, direction and margin are the cycle's own.
    """

    name: str = "burn_production"
    challenger: str = setting("burn", "Backend that is to be promoted.", example="burn")
    incumbent: str = setting("qlora", "Backend that it would replace.", example="qlora")
    min_cycles: int = setting(2, "Registered benchmark cycles, their seeds disjoint.", ge=2)
    share_margin: float = setting(
        0.02, "Largest accepted loss in a KPI that is a share (a rough choice).", ge=0
    )
    relative_margin: float = setting(
        0.1,
        "The same for any other KPI, as a share of the incumbent's mean (a rough choice).",
        ge=0,
    )
    floors: dict[str, float] = setting(
        _FLOORS,
        "Least mean of the challenger, by KPI (the Vox mens trainer's limit).",
        example="{richness:0.3}",
    )
    ceilings: dict[str, float] = setting(
        _CEILINGS,
        "Highest mean of the challenger, by KPI (the Vox mens trainer's limit).",
        example="{placeholder_marker_hits:0.05}",
    )
    parity: bool = setting(
        default=True, doc="Ask for a passed certificate of one of the challenger's adapters."
    )


@dataclass(kw_only=True, slots=True)
class QloraPlateauPolicy(PolicyConfig):
    """Decide whether QLoRA has plateaued, so that research into another model is due."""

    name: str = "qlora_plateau"
    backend: str = setting("qlora", "Backend of the arms.", example="qlora")
    spread: float = setting(
        0.05,
        "Largest difference in task success between the arms (the Vox mens trainer's limit).",
        ge=0,
    )
    floors: dict[str, float] = setting(
        _FLOORS,
        "Least mean that the best arm should have, by KPI (the Vox mens trainer's limit).",
        example="{richness:0.3}",
    )
    ceilings: dict[str, float] = setting(
        _CEILINGS,
        "Highest mean that it should have, by KPI (the Vox mens trainer's limit).",
        example="{placeholder_marker_hits:0.05}",
    )


@dataclass(kw_only=True, slots=True)
class BurnRndPolicy(PolicyConfig):
    """Decide whether further research into the challenger is worthwhile."""

    name: str = "burn_rnd"
    challenger: str = setting("burn", "Backend under research.", example="burn")
    incumbent: str = setting("qlora", "Backend that it is compared with.", example="qlora")
    margin: float = setting(
        0.05,
        "Required lead of its best arm in task success (the Vox mens trainer's limit).",
        ge=0,
    )


@dataclass(kw_only=True, slots=True)
class EvalGatePolicy(PolicyConfig):
    """Decide whether one arm may be released: thresholds, where a missing metric fails."""

    name: str = "eval_gate"
    arm: str | None = setting(
        None, "Arm to judge; null is the only one that is not the reference.", example="tuned"
    )
    floors: dict[str, float] = setting(
        {
            "supervised_frac": 0.10,
            "parse_rate": 0.60,
            "coverage": 0.35,
            "pass_at_1": 0.25,
            "pass_at_k": 0.50,
            "anti_stub_pass": 0.92,
            "richness": 0.20,
        },
        "Least mean, by KPI (the Vox mens trainer's limit).",
        example="{task_success:0.5}",
    )
    ceilings: dict[str, float] = setting(
        {"truncated_frac": 0.50, **_CEILINGS},
        "Highest mean, by KPI (the Vox mens trainer's limit).",
        example="{placeholder_marker_hits:0.05}",
    )
    tokens_per_s: float = setting(
        0.0, "Least training throughput, tokens/s; it depends on the device.", ge=0
    )
    regression: float = setting(
        0.03,
        "How much worse the primary KPI may be than the reference's (the Vox mens trainer's "
        "limit).",
        ge=0,
    )


_OF_A_CYCLE = unless("promote.open_cycle", None, needs="promote.open_cycle=<name>")
DECIDES = Condition(
    holds=lambda config: config.policy is not None and config.promote.open_cycle is None,
    words=lambda config: (
        f"without policy=<name>{'' if config.promote.open_cycle is None else ' alone'}"
    ),
    needs="policy=<name>, without promote.open_cycle",
    tasks=frozenset({"promote"}),
)


COMPARES = Condition(
    holds=lambda config: config.promote.open_cycle is None and not config.promote.replay,
    words=lambda config: f"with promote.{'replay' if config.promote.replay else 'open_cycle'}",
    needs="policy=<name> in its place",
    tasks=frozenset({"promote"}),
)


@dataclass(kw_only=True, slots=True)
class PromoteConfig:
    """Settings of task=promote besides its policy; most describe the cycle that it opens."""

    open_cycle: str | None = setting(
        None, "Name of a benchmark cycle to register before any of its runs.", example="cycle1"
    )
    replay: bool = setting(
        default=False, doc="Make every decision of a ledger again; a difference exits with code 4."
    )
    parity: str | None = setting(
        None,
        "Certificate (parity.json) of the merge or export of a challenger's adapter.",
        only_if=DECIDES,
        example="parity.json",
    )
    suite_digest: str | None = setting(
        None,
        "SHA-256 of the suite that the cycle freezes, as a scorecard states it.",
        only_if=_OF_A_CYCLE,
        example="2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    )
    seeds: list[int] = setting(
        [],
        "Seeds of the cycle, none of them of an earlier one.",
        only_if=_OF_A_CYCLE,
        example="[1,2,3,4,5,6]",
    )
    arms: list[str] = setting(
        [],
        "Backends, or names of arms, that the cycle runs.",
        only_if=_OF_A_CYCLE,
        example="[qlora,burn]",
    )
    factor: str | None = setting(
        None,
        "Factor of the hypothesis, in which the arms differ.",
        only_if=_OF_A_CYCLE,
        example="backend",
    )
    kpi: str = setting(
        "task_success",
        "KPI of the hypothesis, the primary one of the comparison.",
        only_if=_OF_A_CYCLE,
        example="task_success",
    )
    direction: Direction = setting(
        Direction.higher,
        "Which way the KPI of `policy.challenger` goes from that of `policy.incumbent`.",
        only_if=_OF_A_CYCLE,
    )
    margin: float = setting(
        0.0,
        "Margin in the KPI's unit, which the worse bound of the difference must exceed.",
        ge=0,
        only_if=_OF_A_CYCLE,
    )
    alpha: float = setting(
        0.05, "`compare.alpha` of the cycle's comparison.", ge=1e-9, lt=0.5, only_if=_OF_A_CYCLE
    )  # the field's convention
    test: CompareTest = setting(CompareTest.t, "`compare.test` of it.", only_if=_OF_A_CYCLE)
    sequential: Sequential = setting(
        Sequential.none, "`compare.sequential` of it.", only_if=_OF_A_CYCLE
    )
    condition: str = setting(
        "tuned", "`compare.condition` of it.", only_if=_OF_A_CYCLE, example="tuned"
    )
    target: CompareTarget = setting(
        CompareTarget.these_items, "`compare.target` of it.", only_if=_OF_A_CYCLE
    )


class Stopping(Enum):
    """The rule that ends a study."""

    all_seeds = "all_seeds"
    first_verdict = "first_verdict"


@dataclass(kw_only=True, slots=True)
class StudyBudget:
    """The most that a study may cost; null sets no limit."""

    runs: int | None = setting(None, "Runs of all arms and seeds together.", ge=1)
    hours: float | None = setting(
        None,
        "Hours of all runs together. A study that is expected to take longer is refused; one that "
        "has taken longer starts no further seed.",
        gt=0,
    )


@dataclass(kw_only=True, slots=True)
class StudyConfig:
    """A study: its hypothesis, its arms, and how they are judged, registered before any run."""

    hypothesis: str = setting(
        MISSING,
        "The statement that the study tests, in one sentence, about arm and reference.",
        example="'Rank 8 is no worse than rank 16.'",
    )
    shared: list[str] = setting(
        [],
        "Overrides of every run, such as experiment=double_quant.",
        example="['experiment=double_quant']",
    )
    arms: dict[str, list[str]] = setting(
        {},
        "The arms: a name for each, and its overrides. Instead of `grid`.",
        example="{small:['lora.r=4'],large:['lora.r=32']}",
    )
    grid: dict[str, Any] = setting(
        {},
        "Values by key; each combination is an arm. Instead of `arms`.",
        example="{lora.r:[4,32]}",
    )
    seeds: list[int] = setting(
        MISSING,
        "Seeds of every arm, in order; use five or more for a verdict.",
        example="[1,2,3,4,5]",
    )
    reference: str | None = setting(
        None,
        "The arm that others are compared with, as compare.reference; null is the first.",
        example="small",
    )
    primary: str = setting("val_loss", "The KPI that the hypothesis is about.")
    direction: Direction = setting(
        Direction.lower, "Which way the KPI of an arm goes from that of the reference, if true."
    )
    margin: float = setting(
        0.0,
        "Margin in the KPI's unit, beyond which the interval must be. A negative margin "
        "claims that an arm is no worse than the reference by as much (non-inferiority).",
        ge=-1e9,
        le=1e9,
        example="-0.05",
    )
    alpha: float = setting(
        0.05, "Two-sided error rate, shared by all arms (Holm).", ge=1e-9, lt=0.5
    )  # the field's convention
    test: CompareTest = setting(CompareTest.t, "`compare.test` of the verdicts.")
    target: CompareTarget = setting(CompareTarget.these_items, "`compare.target` of the verdicts.")
    stopping: Stopping = setting(
        Stopping.all_seeds,
        "all_seeds: every seed runs, and one look decides; first_verdict: one seed after the other "
        "runs until every arm has a verdict, by p-values that hold at any number of looks.",
    )
    budget: StudyBudget = section(StudyBudget)

    def compared(self, factors: list[str]) -> CompareConfig:
        """Return the settings for the study's comparison.

        Args:
            factors: settings and groups that the arms differ in.
        """
        sequential = Sequential.none
        if self.stopping is Stopping.first_verdict:
            sequential = Sequential.always_valid
        return CompareConfig(
            factors=factors,
            primary=self.primary,
            reference=self.reference,
            alpha=self.alpha,
            test=self.test,
            target=self.target,
            sequential=sequential,
        )
