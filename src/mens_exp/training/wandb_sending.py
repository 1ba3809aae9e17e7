"""Send a run to W&B: ``python -m mens_exp.training.wandb_sending <order>``, a process of its own.

Everything comes from the run's JSON record, and goes under the run's own id with the times at which
it happened: what the service has already, from whatever attempt, is not added again.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.run_lock import held, is_alive
from mens_exp.artifacts.sync_record import note_delivery
from mens_exp.artifacts.telemetry import events_after, read_events
from mens_exp.config.logger import WandbLogger
from mens_exp.errors import MensError
from mens_exp.training.wandb_artifacts import artifact_of, base_of, made_by
from mens_exp.training.wandb_environment import contained, stop_service
from mens_exp.training.wandb_events import EventFeed, set_config
from mens_exp.training.wandb_names import display_name, id_of
from mens_exp.training.wandb_order import STAGING, Order, digest_of
from mens_exp.training.wandb_rendering import (
    beside_config,
    config_of,
    settings_of,
    summary_of,
    tables,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import wandb

__all__ = ["carry_out", "main", "opened"]

_NICE = 10
_LOOK_S = 1.0  # between two looks at the record of an open run
_AGAIN_S = 30.0  # until a service that did not answer is asked again
_INIT_S = 90.0  # W&B's own default
_OWN = ("group", "name", "tags")


def main(arguments: list[str]) -> int:
    """Send one run; the order's record says what came of it.

    Returns:
        0, or 3 where it has not arrived.
    """
    order = Order.read(arguments[0])
    if order.follows is not None and sys.platform != "win32":
        os.nice(_NICE)  # the training goes first
    return carry_out(order, lambda staging: _send(order, staging))


def carry_out(order: Order, send: Callable[[Path], str]) -> int:
    """Let something be sent, and note what came of it.

    Args:
        order: what is to be sent.
        send: does it, given a directory to stage files in, and returns the digest of what was sent.

    Returns:
        0, or 3 where it has not arrived.
    """
    record = Path(order.record)
    try:
        with (
            held(Path(order.lock)),
            _cleared(Path(order.path)),
            tempfile.TemporaryDirectory(prefix=STAGING, dir=order.path) as staging,
            contained(Path(staging).absolute()),
        ):
            try:
                digest = send(Path(staging).absolute())
            finally:
                stop_service()
    except Exception as error:  # noqa: BLE001  # whatever it is, the record says it
        text = " ".join(str(error).split())
        note_delivery(record, order.to, why=f"{type(error).__name__}: {text}"[:500])
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201  # its log
        return 3
    note_delivery(record, order.to, digest=digest)
    return 0


@contextmanager
def _cleared(path: Path) -> Iterator[None]:
    """Remove what a sender that was killed had staged."""
    for staging in path.glob(f"{STAGING}*"):
        shutil.rmtree(staging, ignore_errors=True)
    yield


@contextmanager
def opened(
    order: Order, settings: Mapping[str, Any], config: Mapping[str, Any], staging: Path
) -> Iterator[wandb.Run]:
    """Open a W&B run, or go on with it, and end it as failed if the block raises.

    Raises:
        Exception: the service did not answer in time, or refused; wandb has classes of its own.
    """
    import wandb

    sink = wandb.init(
        settings=wandb.Settings(
            **{
                **settings,
                "mode": "online",
                "root_dir": str(staging),
                "project": order.to.project,
                "entity": order.to.entity,
                "init_timeout": min(_INIT_S, order.timeout_s),
                "finish_timeout": order.timeout_s,
                "finish_timeout_raises": True,
                "stop_fn": _go_on,
            }
        ),
        config=dict(config),
    )
    try:
        yield sink
    except BaseException:
        sink.finish(exit_code=1)
        raise


def _go_on() -> None:
    """Let a run that a user has stopped in W&B be sent to its end: an agent ends the training."""


def _send(order: Order, staging: Path) -> str:
    """Send a run, and where it is still open, follow it to its end first."""
    run = RunDir(Path(order.path))
    while order.follows is not None and _is_open(run, order.follows):
        try:
            return _sent(order, run, staging)
        except Exception as error:  # noqa: BLE001  # the service may be back before the run ends
            print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201  # its log
            _wait_while(lambda: _is_open(run, order.follows), _AGAIN_S)
    return _sent(order, run, staging)


def _sent(order: Order, run: RunDir, staging: Path) -> str:
    manifest = Manifest.read(run.manifest)
    events = read_events(run.telemetry) if run.telemetry.is_file() else []
    config, drawn = config_of(run, events), beside_config(run, manifest)
    logger = _logger(config, order)
    run_id = order.run_id or id_of(run, manifest)
    settings = settings_of(logger, run, manifest, config, run_id)
    with opened(order, settings, {**config, **drawn}, staging) as sink:
        feed = EventFeed(sink, drawn)
        _feed(order, run, feed)
        manifest = Manifest.read(run.manifest)
        if manifest.status is Status.STARTED:
            raise MensError(
                "the run has not ended", where=str(run.path), remedy="send it again when it has"
            )
        digest = digest_of(run.path)
        if manifest.facts:
            set_config(sink, {"facts": manifest.facts})
        feed.log_last(tables(run))
        sink.summary.update(summary_of(run, manifest))
        name = display_name(logger, run, manifest, config)
        if name != sink.name:  # a study names itself at its end
            sink.name = name
        _tie(order, run, manifest, sink, staging)
        sink.finish(exit_code=0 if manifest.status is Status.SUCCEEDED else 1)
    return digest


def _feed(order: Order, run: RunDir, feed: EventFeed) -> None:
    """Hand over every event, also those that come while the run is open."""
    offset = 0
    while True:
        is_open = order.follows is not None and _is_open(run, order.follows)
        events, offset = events_after(run.telemetry, offset)
        for event in events:
            feed.take(event)
        if not is_open:  # asked before the events were read: none was missed
            return
        time.sleep(_LOOK_S)


def _tie(order: Order, run: RunDir, manifest: Manifest, sink: wandb.Run, staging: Path) -> None:
    """Tie the run to what it was made from, and to what it made."""
    is_merged = any(kind == "merged" for kind, _ in order.uses)  # then that is its base
    base = None if is_merged else base_of(manifest, staging)
    used = [artifact_of(kind, RunDir(Path(path))) for kind, path in order.uses]
    for artifact in (base, *used):
        if artifact is not None:
            sink.use_artifact(artifact)
    logged = [sink.log_artifact(artifact) for artifact in made_by(run, manifest)]
    for artifact in logged:
        artifact.wait(timeout=int(order.timeout_s) or 1)


def _logger(config: Mapping[str, Any], order: Order) -> WandbLogger:
    """Return the mirror that the run had, for its name, group and tags; else one by default."""
    told = config.get("logger") or {}
    own = {name: told[name] for name in _OWN if told.get("sink") == "wandb" and name in told}
    return WandbLogger(project=order.to.project, entity=order.to.entity, **own)


def _is_open(run: RunDir, process: tuple[int, float] | None) -> bool:
    """Tell whether a run has not closed its record, and its process lives to do so."""
    if process is None or not is_alive(*process):
        return False
    return Manifest.read(run.manifest).status is Status.STARTED


def _wait_while(holds: Callable[[], bool], at_most_s: float) -> None:
    end = time.monotonic() + at_most_s
    while holds() and time.monotonic() < end:
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
