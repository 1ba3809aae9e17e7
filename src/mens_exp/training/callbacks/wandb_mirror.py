"""Weights & Biases, rendered from the JSON record of a run while it runs.

wandb is imported by `WandbMirror.start` and nowhere earlier, so that ``logger=none`` never
pays for it. Look at an offline mirror with ``wandb leet <run>/wandb``, upload it with
``wandb sync <run>/wandb/offline-run-*``.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from lightning import Callback

from mens_exp.artifacts.manifest import Status
from mens_exp.artifacts.metrics import METRICS
from mens_exp.artifacts.telemetry import read_events
from mens_exp.errors import MensError, SetupError
from mens_exp.training.wandb_agent import agent_run
from mens_exp.training.wandb_rendering import (
    artifacts,
    config_of,
    settings_of,
    summary_of,
    tables,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import wandb
    from lightning import LightningModule, Trainer

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.artifacts.telemetry import Event
    from mens_exp.config.logger import WandbLogger
    from mens_exp.training.record import RunRecord

__all__ = ["WandbMirror"]

_TOKENS = "data/supervised_tokens"
# Who the user is and where the server stands. Every other WANDB_ variable would change what
# the configuration says (WANDB_MODE, WANDB_TAGS, WANDB_SWEEP_PARAM_PATH, …), so wandb never sees
# it. What an agent of a sweep tells its run, `agent_run` reads.
_ACCOUNT = frozenset(
    {
        "WANDB_API_KEY",
        "WANDB_APP_URL",
        "WANDB_BASE_URL",
        "WANDB_CONFIG_DIR",
        "WANDB_CREDENTIALS_FILE",
        "WANDB_ENTITY",
        "WANDB_HTTP_TIMEOUT",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_INSECURE_DISABLE_SSL",
    }
)


class WandbMirror(Callback):
    """Shows in W&B what the run's JSON record says, and nothing else."""

    def __init__(self, *, logger: WandbLogger, run: RunRecord) -> None:
        """Remember what to mirror; nothing is imported or started yet.

        Args:
            logger: the configured sink.
            run: the open run.
        """
        self._logger = logger
        self._run = run
        # The run's own name, so that a resumed attempt continues the same W&B run.
        self._agent = agent_run(os.environ)
        ours = re.sub(r"[^A-Za-z0-9_.-]", "-", run.manifest.run_id)
        self._id = ours if self._agent is None else self._agent.run_id
        self._sink: wandb.Run | None = None
        self._started = False
        self._tokens = 0  # supervised tokens at the latest step, the second axis

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Start the mirror, on the first process only."""
        if trainer.is_global_zero:
            self.start()

    def start(self) -> None:
        """Start wandb, replay what has happened and follow what will; once is enough.

        Raises:
            SetupError: wandb did not start.
        """
        if self._started:
            return
        self._started = True
        try:
            with _contained(self._run.dir):
                self._open()
        except Exception as error:
            with suppress(Exception):
                self._end(exit_code=1)
            raise SetupError(
                "the W&B mirror did not start",
                where="logger",
                found=f"{type(error).__name__}: {error}",
                expected="logger.mode=offline, which needs no account, or a machine that is "
                "logged in (`wandb login`)",
                remedy="run with logger=none to do without the mirror",
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the W&B run."""
        return {"wandb_run_id": self._id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the id of the W&B run, unless one is already being written."""
        if not self._started:
            self._id = str(state_dict["wandb_run_id"])

    def _open(self) -> None:
        import wandb

        run = self._run
        events = read_events(run.dir.telemetry)
        config = config_of(run.dir, events)
        settings = settings_of(self._logger, run.dir, run.manifest, config, self._id)
        if self._agent is not None:
            settings["sweep_id"] = self._agent.sweep_id
        self._sink = wandb.init(settings=wandb.Settings(**settings), config=config)
        run.after_close(self._close)
        _define_metrics(self._sink)
        for record in events:
            self._mirror(record)
        run.telemetry.subscribe(self._mirror, "wandb")

    def _mirror(self, record: Event) -> None:
        if self._sink is None:
            return
        payload = record["payload"]
        match record["event"]:
            case "step":
                self._tokens = payload.get(_TOKENS, self._tokens)
                numbers = {k: v for k, v in _known(payload).items() if not isinstance(v, str)}
                self._sink.log(numbers, step=payload["step"])  # a digest is no point of a curve
            case "scorecard_step":
                numbers = {k: v for k, v in payload.items() if k.startswith("eval/")}
                self._sink.log(numbers, step=payload["step"])
            case "validation":
                self._mirror_validation(self._sink, payload)
            case "run_started" if "config" in payload:
                _set_config(self._sink, payload["config"])
            case "plan" | "facts" as name:
                _set_config(self._sink, {name: payload})

    def _mirror_validation(self, sink: wandb.Run, payload: Mapping[str, Any]) -> None:
        is_base = payload["condition"] == "base"
        if is_base:
            sink.summary["base_val_loss"] = payload["val/loss"]
        if payload["condition"] == "peft_view":
            return  # no point of the curve; the results have it
        # The base model is a point of the tuned curve only where it starts.
        if not is_base or payload["step"] == 0:
            row = {**_known(payload), _TOKENS: self._tokens}
            del row["condition"]
            sink.log(row, step=payload["step"])

    def _close(self, manifest: Manifest) -> None:
        if self._sink is None:
            return
        exit_code = 0 if manifest.status == Status.SUCCEEDED else 1
        with _contained(self._run.dir), ExitStack() as stack:
            stack.callback(self._end, exit_code=exit_code)
            self._mirror_results(self._sink, manifest)

    def _mirror_results(self, sink: wandb.Run, manifest: Manifest) -> None:
        if manifest.facts:
            _set_config(sink, {"facts": manifest.facts})
        if found := tables(self._run.dir):
            sink.log(found)  # without a step: a part of the last row
        sink.summary.update(summary_of(self._run.dir, manifest))
        for artifact in artifacts(self._run.dir, manifest, self._id):
            sink.log_artifact(artifact)

    def _end(self, *, exit_code: int) -> None:
        sink, self._sink = self._sink, None
        with _contained(self._run.dir), ExitStack() as stack:
            stack.callback(_stop_service)
            if sink is not None:
                sink.finish(exit_code=exit_code)


@contextmanager
def _contained(run_dir: RunDir) -> Iterator[None]:
    """Keep wandb's files in the run directory, and undo what it does to this process.

    wandb reads where to stage from the environment only, exports the address of its service
    there, and replaces `sys.exit` and `sys.excepthook` for good.
    """
    staging = run_dir.wandb.absolute()
    saved = {name: value for name, value in os.environ.items() if _is_wandb(name)}
    hooks = {"exit": sys.exit, "excepthook": sys.excepthook}
    for name in saved.keys() - _ACCOUNT:
        del os.environ[name]
    os.environ |= {
        "WANDB_ARTIFACT_DIR": str(staging / "artifacts"),
        "WANDB_CACHE_DIR": str(staging / "cache"),
        "WANDB_DATA_DIR": str(staging / "data"),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",  # also what keeps wandb from asking for an account
    }
    try:
        yield
    finally:
        vars(sys).update(hooks)
        for name in filter(_is_wandb, list(os.environ)):
            del os.environ[name]
        os.environ |= saved


def _is_wandb(name: str) -> bool:
    return name.lstrip("_").startswith("WANDB_")


def _stop_service() -> None:
    """Stop wandb's process, so that the next run of a sweep starts one with its own paths."""
    import wandb

    if wandb.run is not None:  # somebody else's run lives in this process
        return
    try:
        wandb.teardown(exit_code=0)
    except SystemExit as error:  # how wandb says that its process crashed
        raise MensError("the W&B process crashed", found=f"exit code {error.code}") from error


def _define_metrics(sink: wandb.Run) -> None:
    sink.define_metric("step")
    for metric in METRICS.values():
        if metric.name == _TOKENS:  # an axis to choose in any chart
            sink.define_metric(metric.name)
            continue
        reduced = metric.reduction if metric.reduction in {"max", "mean"} else None
        sink.define_metric(metric.name, step_metric="step", summary=reduced)


def _set_config(sink: wandb.Run, values: Mapping[str, Any]) -> None:
    sink.config.update(values, allow_val_change=True)  # type: ignore[no-untyped-call]


def _known(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in payload.items() if value is not None}
