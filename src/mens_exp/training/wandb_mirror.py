"""Weights & Biases mirror, rendered from the JSON record of a run while it runs.

The mirror itself contacts no service. It is stored in the run directory and can be viewed with
``wandb leet <run>/wandb``. With ``logger.mode=online`` a separate process sends the record as it
grows, so that the service can neither delay nor fail training; ``task=sync`` sends what is left
over. `WandbMirror.start` imports wandb, and nothing does so earlier, so that ``logger=none`` does
not pay for the import.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import psutil

from mens_exp.artifacts.manifest import Destination, Status
from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.logger import WandbMode
from mens_exp.errors import MensError, SetupError
from mens_exp.training.wandb_names import display_name, id_of
from mens_exp.training.wandb_rendering import (
    EventFeed,
    config_entries,
    config_of,
    made_by,
    set_config,
    settings_of,
    summary_of,
)
from mens_exp.training.wandb_sending import (
    Order,
    Sender,
    contained,
    require_account,
    server_address,
    stop_service,
)
from mens_exp.training.wandb_tables import panels

if TYPE_CHECKING:
    from collections.abc import Sequence

    import wandb

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.telemetry import Event
    from mens_exp.config.logger import WandbLogger
    from mens_exp.config.root import RunConfig
    from mens_exp.training.module import RunRecord

_SENDER = "mens_exp.training.wandb_sending"
_PATIENCE_S = 600.0  # for a sender, after the end of the run; unverified guess


class WandbMirror:
    """Mirrors the run's JSON record in W&B, and nothing else."""

    def __init__(
        self,
        *,
        logger: WandbLogger,
        run: RunRecord,
        uses: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Store what to mirror; nothing is imported or started yet.

        Args:
            logger: the configured sink.
            run: the open run.
            uses: the run's inputs, as pairs of artifact kind and path of the run that made it; an
                upload links the two runs.
        """
        self._logger = logger
        self._uses = list(uses)
        self._run = run
        self._sink: wandb.Run | None = None
        self._feed: EventFeed | None = None
        self._sender: Sender | None = None
        self._started = False
        self._config: dict[str, Any] = {}  # resolved, once the mirror is open

    @property
    def id(self) -> str:
        """Id of the W&B run, which a resumed attempt continues."""
        return id_of(self._run.dir, self._run.manifest)

    @property
    def sink(self) -> wandb.Run:
        """The open W&B run.

        Raises:
            MensError: the mirror has not started, or has ended.
        """
        if self._sink is None:
            raise MensError("the W&B mirror is not open", where="logger", found=self.id)
        return self._sink

    def start(self) -> None:
        """Start wandb, replay past events and follow new ones; later calls do nothing.

        Raises:
            SetupError: wandb did not start.
        """
        if self._started:
            return
        self._started = True
        try:
            with contained(self._run.dir.wandb.absolute()):
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

    def _open(self) -> None:
        import wandb

        run, server = self._run, None
        if self._logger.mode is WandbMode.online:
            server = server_address()
            require_account(server)
        events = read_events(run.dir.telemetry)
        config, drawn = (
            config_of(run.dir, run.manifest, events),
            config_entries(run.dir, run.manifest),
        )
        self._config = config
        settings = settings_of(
            self._logger, run.dir, run.manifest, config, self.id, process=os.getpid()
        )
        shown = {**config, **drawn}
        self._sink = wandb.init(settings=wandb.Settings(**settings), config=shown)
        run.after_close(self._close)
        self._feed = EventFeed(self._sink, drawn)
        for record in events:
            self._mirror(record)
        run.telemetry.subscribe(self._mirror, "wandb")
        if server is not None:
            self._sender = Sender(self._order(server), run.dir.sync_log)

    def _order(self, server: str) -> Order:
        me, run_dir = psutil.Process(), self._run.dir
        entity = self._logger.entity or os.environ.get("WANDB_ENTITY")  # an agent sets it too
        return Order(
            module=_SENDER,
            path=str(run_dir.path.absolute()),
            record=str(run_dir.sync.absolute()),
            lock=str(run_dir.sync_lock.absolute()),
            to=Destination(server, entity, self._logger.project),
            run_id=self.id,
            timeout_s=_PATIENCE_S,
            follows=(me.pid, me.create_time()),
            uses=self._uses,
        )

    def _mirror(self, record: Event) -> None:
        if self._feed is not None and self._sink is not None:
            self._feed.take(record)

    def _close(self, manifest: Manifest) -> None:
        if self._sink is None:
            return
        exit_code = 0 if manifest.status == Status.SUCCEEDED else 1
        with contained(self._run.dir.wandb.absolute()), ExitStack() as stack:
            stack.callback(self._end, exit_code=exit_code)
            self._mirror_results(self._sink, manifest)
        why = None if self._sender is None else self._sender.wait_for(self._logger.wait_s)
        if why is not None:
            raise MensError(
                "not sent to W&B", found=why, remedy=f"task=sync path={self._run.dir.path}"
            )

    def _mirror_results(self, sink: wandb.Run, manifest: Manifest) -> None:
        if manifest.facts:
            set_config(sink, {"facts": manifest.facts})
        assert self._feed is not None, "it is there with the sink"
        self._feed.log_last(panels(self._run.dir), summary_of(self._run.dir, manifest))
        name = display_name(self._logger, self._run.dir, manifest, self._config)
        if name != sink.name:  # a study names itself at its end
            sink.name = name
        for artifact in made_by(self._run.dir, manifest):
            sink.log_artifact(artifact)

    def _end(self, *, exit_code: int) -> None:
        sink, self._sink = self._sink, None
        with contained(self._run.dir.wandb.absolute()), ExitStack() as stack:
            stack.callback(stop_service)
            if sink is not None:
                sink.finish(exit_code=exit_code)


def mirror(config: RunConfig, run: RunRecord, uses: Sequence[tuple[str, str]] = ()) -> None:
    """Start the mirror of a task that does not train, if it is configured; it ends with the run.

    Args:
        config: the whole configuration.
        run: the open run; an upload reads group, name and links from its manifest.
        uses: as for :class:`WandbMirror`.

    Raises:
        SetupError: wandb did not start.
    """
    if config.wandb is not None:
        run.save()
        WandbMirror(logger=config.wandb, run=run, uses=uses).start()
