"""Separate process that sends a run to W&B: ``python -m mens_exp.training.wandb_sending <order>``.

Everything is read from the run's JSON record and sent under the run's own id with its original
timestamps, so data that the service already has from any attempt is not added again. If the service
is slow, fails or does not answer, the calling process (`Sender`) waits no longer than it chose to.
wandb's files and environment variables are isolated.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mens_exp.artifacts import host
from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.artifacts.host import is_alive, run_lock
from mens_exp.artifacts.manifest import Destination, Manifest, Status, delivery_at, note_delivery
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import events_after, read_events
from mens_exp.config.logger import WandbLogger
from mens_exp.errors import MensError, SetupError
from mens_exp.training.wandb_names import display_name, id_of
from mens_exp.training.wandb_rendering import (
    EventFeed,
    artifact_of,
    base_of,
    config_entries,
    config_of,
    made_by,
    mirror_settings,
    set_config,
    settings_of,
    summary_of,
)
from mens_exp.training.wandb_tables import panels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import wandb

# The user's identity and the server address. Every other WANDB_ variable would override the
# configuration (WANDB_MODE, WANDB_RUN_ID, WANDB_SWEEP_ID, …), so it is hidden from wandb.
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


@contextmanager
def contained(staging: Path) -> Iterator[None]:
    """Confine wandb's files to one directory, and undo its changes to this process.

    wandb reads its staging directory only from the environment, exports the address of its service
    there, and replaces `sys.exit` and `sys.excepthook` permanently.

    Args:
        staging: an absolute path.
    """
    saved = {name: value for name, value in os.environ.items() if _is_wandb(name)}
    hooks = {"exit": sys.exit, "excepthook": sys.excepthook}
    for name in saved.keys() - _ACCOUNT:
        del os.environ[name]
    os.environ |= {
        "WANDB_ARTIFACT_DIR": str(staging / "artifacts"),
        "WANDB_CACHE_DIR": str(staging / "cache"),
        "WANDB_DATA_DIR": str(staging / "data"),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",  # also suppresses the account prompt
    }
    try:
        yield
    finally:
        vars(sys).update(hooks)
        for name in filter(_is_wandb, list(os.environ)):
            del os.environ[name]
        os.environ |= saved


def server_address() -> str:
    """Return the address of the service from the environment or W&B's settings files."""
    import wandb

    settings = wandb.Settings()
    settings.update_from_system_settings()
    settings.update_from_env_vars(dict(os.environ))
    return str(settings.base_url)


def require_account(server: str) -> None:
    """Check for the user's credentials, without a prompt or a connection.

    Raises:
        SetupError: there are no credentials.
    """
    from wandb.sdk.lib import wbauth

    found = wbauth.authenticate_session(
        host=server, source="mens_exp", prompt=False, update_session=False
    )
    if found is None:
        raise SetupError(
            "No API key configured",
            where="W&B",
            found=f"no account for {server}",
            expected="a machine that is logged in",
            remedy="wandb login, or set WANDB_API_KEY",
        )


def stop_service() -> None:
    """Stop wandb's service process, so that the next run of a sweep starts its own.

    Raises:
        MensError: it crashed.
    """
    import wandb

    if wandb.run is not None:  # other code has a run open in this process
        return
    try:
        wandb.teardown(exit_code=0)
    except SystemExit as error:  # raised by wandb if its process crashed
        raise MensError("the W&B process crashed", found=f"exit code {error.code}") from error


def _is_wandb(name: str) -> bool:
    return name.lstrip("_").startswith("WANDB_")


STAGING = ".sync-"  # name prefix of a sender's staging directory
_AT_WORK: list[subprocess.Popen[bytes]] = []  # senders that are no longer waited for


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A request to send a run or a sweep.

    Attributes:
        module: the module that sends it, run as a process.
        path: directory of a run or a sweep.
        record: file that records what has arrived.
        lock: lock file, held while sending.
        to: the destination.
        timeout_s: seconds without a new event of the run before sending is abandoned.
        run_id: id of the W&B run; None uses the one in the record.
        uses: inputs of the run: artifact kind, and directory of the run that made it.
        follows: process id and start time of a run that is still open; None for a closed one.
    """

    module: str
    path: str
    record: str
    lock: str
    to: Destination
    timeout_s: float
    run_id: str | None = None
    uses: list[tuple[str, str]] = field(default_factory=list)
    follows: tuple[int, float] | None = None

    def text(self) -> str:
        """Serialize the order for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse the result of :meth:`text`."""
        told: dict[str, Any] = json.loads(text)
        told["to"] = Destination(*told["to"])
        told["uses"] = [(kind, path) for kind, path in told["uses"]]
        told["follows"] = None if told["follows"] is None else tuple(told["follows"])
        return cls(**told)


class Sender:
    """A sending process in its own session; it may outlive the process that started it."""

    def __init__(self, order: Order, log: Path) -> None:
        """Start sending.

        Args:
            order: what to send.
            log: file for the output of the process.

        Raises:
            OSError: the system cannot start another process.
        """
        self._order = order
        why = "it was being sent, and nothing says that all of it arrived"
        note_delivery(Path(order.record), order.to, why=why)
        with log.open("ab") as output:
            command = ["-m", order.module, order.text()]
            self._process = host.spawn_python(command, output=output)

    def wait_for(self, wait_s: float) -> str | None:
        """Wait up to ``wait_s`` seconds for the process to end; let it continue after that.

        Returns:
            The reason for a failure; None if the run arrived or is still being sent.
        """
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            _AT_WORK.append(self._process)
            return None
        return self._outcome()

    def ended(self, wait_s: float) -> str | None:
        """Wait up to ``wait_s`` seconds for the process to end, then kill it.

        Returns:
            The reason for a failure; None if the run arrived.
        """
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.kill()
            why = f"the service did not take it within {wait_s:g} s"
            note_delivery(Path(self._order.record), self._order.to, why=why)
            return why
        return self._outcome()

    def kill(self) -> None:
        """Kill the process together with W&B's own, and remove its staged files."""
        try:
            if sys.platform == "win32":
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has already ended
        self._process.wait()
        for staging in Path(self._order.path).glob(f"{STAGING}*"):
            shutil.rmtree(staging, ignore_errors=True)

    def _outcome(self) -> str | None:
        found = delivery_at(Path(self._order.record), self._order.to)
        code = self._process.returncode
        if code == 0 and found is not None and found["digest"] is not None:
            return None
        why = None if found is None else found["why"]
        return why or f"its process ended with {code}"


def digest_of(run: Path) -> str:
    """Return the current digest of a run: that of its manifest, which hashes the rest.

    Raises:
        MensError: there is no manifest.
    """
    manifest = run / "manifest.json"
    if not manifest.is_file():
        raise MensError("no run to send", where=str(run))
    return digest({"manifest": sha256_file(manifest)})


_NICE = 10
_LOOK_S = 1.0  # polling interval for the record of an open run
_AGAIN_S = 30.0  # delay before retrying a service that did not answer
_INIT_S = 90.0  # W&B's own default
_OWN = ("group", "name", "tags", "notes", "system_metrics", "git", "requirements", "console")


def main(arguments: list[str]) -> int:
    """Send one run; the outcome is written to the order's record.

    Returns:
        0, or 3 if it did not arrive.
    """
    order = Order.read(arguments[0])
    if order.follows is not None and sys.platform != "win32":
        os.nice(_NICE)  # training has priority
    return carry_out(order, lambda staging: _send(order, staging))


def carry_out(order: Order, send: Callable[[Path], str]) -> int:
    """Run a send function and record the outcome.

    Args:
        order: what to send.
        send: sends it, given a staging directory, and returns the digest of what was sent.

    Returns:
        0, or 3 if it has not arrived.
    """
    record = Path(order.record)
    try:
        with (
            run_lock(Path(order.lock)),
            _cleared(Path(order.path)),
            tempfile.TemporaryDirectory(prefix=STAGING, dir=order.path) as staging,
            contained(Path(staging).absolute()),
        ):
            try:
                digest = send(Path(staging).absolute())
            finally:
                stop_service()
    except Exception as error:  # noqa: BLE001  # any failure goes to the record
        text = " ".join(str(error).split())
        note_delivery(record, order.to, why=f"{type(error).__name__}: {text}"[:500])
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201  # its log
        return 3
    note_delivery(record, order.to, digest=digest)
    return 0


@contextmanager
def _cleared(path: Path) -> Iterator[None]:
    """Remove the staged files of a sender that was killed."""
    for staging in path.glob(f"{STAGING}*"):
        shutil.rmtree(staging, ignore_errors=True)
    yield


@contextmanager
def opened(
    order: Order, settings: Mapping[str, Any], config: Mapping[str, Any], staging: Path
) -> Iterator[wandb.Run]:
    """Open or resume a W&B run, and mark it as failed if the block raises.

    Raises:
        Exception: the service did not answer in time, or refused; wandb defines its own classes.
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
    """Keep sending a run that a user stopped in W&B; stopping the training is up to the agent."""


def _send(order: Order, staging: Path) -> str:
    """Send a run; if it is still open, follow it to its end first."""
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
    config, drawn = config_of(run, manifest, events), config_entries(run, manifest)
    logger = _logger(config, order)
    run_id = order.run_id or id_of(run, manifest)
    process = None if order.follows is None else order.follows[0]
    settings = settings_of(logger, run, manifest, config, run_id, process=process)
    sys.argv[1:] = manifest.overrides  # wandb shows the command line with logger.git
    with opened(order, settings, {**config, **drawn}, staging) as sink:
        feed = EventFeed(sink, drawn)
        _feed(order, run, feed, _Console(run) if logger.console else None)
        manifest = Manifest.read(run.manifest)
        if manifest.status is Status.STARTED:
            raise MensError(
                "the run has not ended", where=str(run.path), remedy="send it again when it has"
            )
        digest = digest_of(run.path)
        if manifest.facts:
            set_config(sink, {"facts": manifest.facts})
        feed.log_last(panels(run), summary_of(run, manifest))
        name = display_name(logger, run, manifest, config)
        if name != sink.name:  # a study names itself at its end
            sink.name = name
        _tie(order, run, manifest, sink, staging)
        sink.finish(exit_code=0 if manifest.status is Status.SUCCEEDED else 1)
    return digest


class _Console:
    """The run's output as its mirror keeps it, printed again so that W&B captures it here.

    Each attempt has one file, or none if its mirror did not keep the output.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._offsets: dict[Path, int] = {}

    def pass_on(self) -> None:
        """Print what is new."""
        for path in sorted(self._run.wandb.glob("offline-run-*/files/output.log")):
            offset = self._offsets.get(path, 0)
            text = path.read_bytes()[offset:]
            self._offsets[path] = offset + len(text)
            sys.stdout.write(text.decode("utf-8", "replace"))
            sys.stdout.flush()


def _feed(order: Order, run: RunDir, feed: EventFeed, console: _Console | None) -> None:
    """Feed every event, including those that arrive while the run is open."""
    offset = 0
    while True:
        is_open = order.follows is not None and _is_open(run, order.follows)
        events, offset = events_after(run.telemetry, offset)
        for event in events:
            feed.take(event)
        if console is not None:
            console.pass_on()
        if not is_open:  # checked before reading, so no event is missed
            return
        time.sleep(_LOOK_S)


def _tie(order: Order, run: RunDir, manifest: Manifest, sink: wandb.Run, staging: Path) -> None:
    """Link the run to its inputs and its outputs."""
    is_merged = any(kind == "merged" for kind, _ in order.uses)  # the merged model is its base then
    base = None if is_merged else base_of(manifest, staging)
    used = [artifact_of(kind, RunDir(Path(path))) for kind, path in order.uses]
    for artifact in (base, *used):
        if artifact is not None:
            sink.use_artifact(artifact)
    logged = [sink.log_artifact(artifact) for artifact in made_by(run, manifest)]
    for artifact in logged:
        artifact.wait(timeout=int(order.timeout_s) or 1)


def _logger(config: Mapping[str, Any], order: Order) -> WandbLogger:
    """Return the run's mirror settings for name, group and tags; else the defaults."""
    told = mirror_settings(config)
    own = {name: told[name] for name in _OWN if name in told}
    return WandbLogger(project=order.to.project, entity=order.to.entity, **own)


def _is_open(run: RunDir, process: tuple[int, float] | None) -> bool:
    """Return whether a run's record is open and its process is still alive to close it."""
    if process is None or not is_alive(*process):
        return False
    return Manifest.read(run.manifest).status is Status.STARTED


def _wait_while(holds: Callable[[], bool], at_most_s: float) -> None:
    end = time.monotonic() + at_most_s
    while holds() and time.monotonic() < end:
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
