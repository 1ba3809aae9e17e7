"""Send a run to W&B: ``python -m mens_exp.training.wandb_sending <order>``, a process of its own.

Everything comes from the run's JSON record, and goes under the run's own id with the times at which
it happened: what the service has already, from whatever attempt, is not added again. Whatever the
service does, answer slowly, with errors or not at all, the process that asked for it (`Sender`)
waits only as long as it chose to. wandb's files and environment are contained.
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
from mens_exp.config.trainer import WandbLogger
from mens_exp.errors import MensError, SetupError
from mens_exp.training.wandb_names import display_name, id_of
from mens_exp.training.wandb_rendering import (
    EventFeed,
    artifact_of,
    base_of,
    beside_config,
    config_of,
    made_by,
    set_config,
    settings_of,
    summary_of,
    tables,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import wandb

# Who the user is and where the server stands. Every other WANDB_ variable would change what
# the configuration says (WANDB_MODE, WANDB_RUN_ID, WANDB_SWEEP_ID, …), so wandb never sees it.
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
    """Keep wandb's files in one directory, and undo what it does to this process.

    wandb reads where to stage from the environment only, exports the address of its service
    there, and replaces `sys.exit` and `sys.excepthook` for good.

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
        "WANDB_SILENT": "true",  # also what keeps wandb from asking for an account
    }
    try:
        yield
    finally:
        vars(sys).update(hooks)
        for name in filter(_is_wandb, list(os.environ)):
            del os.environ[name]
        os.environ |= saved


def server_address() -> str:
    """Return where the service stands, as the environment or W&B's own settings files say."""
    import wandb

    settings = wandb.Settings()
    settings.update_from_system_settings()
    settings.update_from_env_vars(dict(os.environ))
    return str(settings.base_url)


def require_account(server: str) -> None:
    """Look for credentials of this machine's user, without a prompt and without a connection.

    Raises:
        SetupError: there are none.
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
    """Stop wandb's process, so that the next run of a sweep starts one with its own paths.

    Raises:
        MensError: it crashed.
    """
    import wandb

    if wandb.run is not None:  # somebody else's run lives in this process
        return
    try:
        wandb.teardown(exit_code=0)
    except SystemExit as error:  # how wandb says that its process crashed
        raise MensError("the W&B process crashed", found=f"exit code {error.code}") from error


def _is_wandb(name: str) -> bool:
    return name.lstrip("_").startswith("WANDB_")


STAGING = ".sync-"  # begins the name of a directory that a sender stages files in
_AT_WORK: list[subprocess.Popen[bytes]] = []  # senders that nobody waits for any more


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """An order to send a run or a sweep.

    Attributes:
        module: that sends it, run as a process.
        path: directory of a run, or of a sweep.
        record: the file that notes what has arrived.
        lock: held while it is sent.
        to: where it goes.
        timeout_s: that may pass after the last news of the run before sending is given up.
        run_id: of the W&B run; None for what the record says.
        uses: what it was made from: kind of artifact, and the directory of the run that made it.
        follows: the process whose run is still open, and when it started; None for a closed one.
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
        """Spell it for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """Read what :meth:`text` spelled."""
        told: dict[str, Any] = json.loads(text)
        told["to"] = Destination(*told["to"])
        told["uses"] = [(kind, path) for kind, path in told["uses"]]
        told["follows"] = None if told["follows"] is None else tuple(told["follows"])
        return cls(**told)


class Sender:
    """A process that sends, in a session of its own: it may outlive the one that asked for it."""

    def __init__(self, order: Order, log: Path) -> None:
        """Start sending.

        Args:
            order: what is to be sent.
            log: where the process prints.

        Raises:
            OSError: the system starts no further process.
        """
        self._order = order
        why = "it was being sent, and nothing says that all of it arrived"
        note_delivery(Path(order.record), order.to, why=why)
        with log.open("ab") as output:
            command = ["-m", order.module, order.text()]
            self._process = host.spawn_python(command, output=output)

    def settled(self, wait_s: float) -> str | None:
        """Wait a while for its end, and let it go on after that.

        Returns:
            Why it has not arrived; None where it has, or where it is still being sent.
        """
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            _AT_WORK.append(self._process)
            return None
        return self._outcome()

    def ended(self, wait_s: float) -> str | None:
        """Wait for its end, and end it where it takes longer.

        Returns:
            Why it has not arrived; None where it has.
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
        """End it, and W&B's own process with it, and remove what it had staged."""
        try:
            if sys.platform == "win32":
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended
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
    """Return the digest of a run as it stands: that of its manifest, which hashes the rest.

    Raises:
        MensError: there is no manifest.
    """
    manifest = run / "manifest.json"
    if not manifest.is_file():
        raise MensError("there is no run to send", where=str(run))
    return digest({"manifest": sha256_file(manifest)})


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
            run_lock(Path(order.lock)),
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
