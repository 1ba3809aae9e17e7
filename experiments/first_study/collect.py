"""Write what is published of the study: each run's figures, the tables, the decision, a drawing.

Usage: python experiments/first_study/collect.py outputs/first_study
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

RESULTS = Path(__file__).with_name("results")
PANELS = [  # comparison, arm, reference, KPI, unit
    ("double_quant", "single_quant", "qlora", "val_loss", "nats a token"),
    ("burn", "burn", "qlora", "task_success", "share of tasks"),
    ("full", "full", "qlora", "task_success", "share of tasks"),
]


def runs(study: Path) -> list[dict[str, Any]]:
    """Return the figures of every run, in the order of arms and seeds."""
    found = []
    for path in study.glob("cycle*/*/*/manifest.json"):
        if not (scorecard := path.with_name("scorecard.json")).is_file():
            continue
        results = json.loads(path.read_text("utf-8"))["results"]
        kpis = json.loads(scorecard.read_text("utf-8"))["conditions"]["tuned"]
        job = json.loads(path.with_name("job.json").read_text("utf-8"))
        found.append(
            {
                "cycle": path.parts[-4],
                "arm": path.parts[-3],
                "seed": next(int(o[5:]) for o in job["overrides"] if o.startswith("seed=")),
                "val_loss": results["tuned_val_loss"],
                "task_success": kpis["task_success"],
                "compile_at_1": kpis["compile_at_1"],
                "train_s": results["train_s"],
                "peak_rss_bytes": results["peak_rss_bytes"],
            }
        )
    return sorted(found, key=lambda one: (one["arm"], one["seed"]))


def draw(study: Path, found: list[dict[str, Any]], file: Path) -> None:
    """Draw each contrast: the seeds' differences, their mean and its interval."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 2.8), layout="constrained")
    for axis, (name, arm, reference, kpi, unit) in zip(axes, PANELS, strict=True):
        values = {(one["arm"], one["seed"]): one[kpi] for one in found}
        seeds = sorted(seed for this, seed in values if this == arm)
        differences = [values[arm, seed] - values[reference, seed] for seed in seeds]
        (contrast,) = json.loads((study / name / "compare.json").read_text("utf-8"))["contrasts"]
        told = contrast["kpis"][kpi]
        axis.axvline(0, color="0.6", linestyle="--", linewidth=1)
        axis.scatter(differences, seeds, s=14, color="0.35")
        axis.errorbar(
            told["estimate"],
            max(seeds) + 1.5,
            xerr=[[told["estimate"] - told["low"]], [told["high"] - told["estimate"]]],
            fmt="D",
            color="C3",
        )
        axis.set(title=f"{arm} − {reference}", xlabel=f"{kpi}, {unit}", ylabel="seed")
        axis.locator_params(axis="x", nbins=5)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def main(study: Path) -> None:
    """Write it all."""
    RESULTS.mkdir(exist_ok=True)
    found = runs(study)
    lines = ",\n".join(json.dumps(one) for one in found)
    (RESULTS / "runs.json").write_text(f"[\n{lines}\n]\n", "utf-8")
    for name in ("double_quant", "burn", "full"):
        shutil.copy(study / name / "compare.md", RESULTS / f"{name}.md")
    for name in ("cycle1", "cycle2"):
        shutil.copy(study / name / "burn_against_qlora" / "compare.md", RESULTS / f"{name}.md")
    ledger = (study / "decisions.jsonl").read_text("utf-8").splitlines()
    decision = json.loads(ledger[-1])["decision"]
    for rule in decision["rules"]:
        if rule["evidence"] is not None:
            rule["evidence"] = str(Path(rule["evidence"]).relative_to(study.resolve()))
    told = {"decision": decision["decision"], "rules": decision["rules"]}
    (RESULTS / "decision.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    draw(study, found, RESULTS / "differences.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
