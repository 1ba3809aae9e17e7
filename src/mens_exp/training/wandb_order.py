"""Sending to W&B from a process of its own: what it is told, and how it is waited for.

Whatever the service does, answer slowly, with errors or not at all, the process that asked for it
only ever waits as long as it chose to.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from mens_exp.artifacts import own_process
from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.artifacts.sync_record import Destination, delivery_at, note_delivery
from mens_exp.errors import MensError

__all__ = ["STAGING", "Order", "Sender", "digest_of"]

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
            self._process = own_process.spawn(command, output=output)

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
