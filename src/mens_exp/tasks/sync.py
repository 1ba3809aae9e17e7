"""task=sync: send to W&B what it has not yet, run by run, in the order in which they were made."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mens_exp.artifacts.run_lock import holder
from mens_exp.artifacts.sync_record import delivery_at
from mens_exp.errors import MensError, RequestError, SetupError
from mens_exp.report import wording
from mens_exp.tasks.sync_parcels import Parcel, parcels
from mens_exp.training.wandb_environment import contained, require_account, server_address
from mens_exp.training.wandb_order import Sender

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run

__all__ = ["sync"]

_KNOWN = "known"


def sync(config: RunConfig, run: Run) -> None:
    """Send every run and sweep that the path names, and stop at the first that does not arrive.

    Raises:
        SetupError: there is no account, or the service did not take a run; all that were sent stay
            sent, and the same command goes on with the rest.
        RequestError: nothing at the path has anything to send.
    """
    assert config.path is not None, "validation has asked for it"
    console = Console()
    with tempfile.TemporaryDirectory() as staging, contained(Path(staging)):
        server = server_address()
        require_account(server)
    found = parcels(config.path.split(","), config.sync, server)
    if not found.parcels and not found.left_out:
        raise RequestError(
            "no run here has anything to send",
            where="path",
            found=config.path,
            expected="runs that trained, merged, evaluated or compared, or a sweep",
        )
    run.manifest.inputs["runs"] = [one.order.path for one in found.parcels]
    run.manifest.facts["server"] = server
    counts = run.manifest.results
    counts |= {"sent": 0, "known": 0, "left_out": found.left_out, "not_sent": []}
    for path, reason in found.left_out.items():
        console.print(f"left out: {wording.visible(path)}: {reason}", soft_wrap=True, markup=False)
    for place, parcel in enumerate(found.parcels):
        why = _send(parcel, config.sync.timeout_s)
        if why == _KNOWN:
            counts["known"] += 1
        elif why is None:
            counts["sent"] += 1
        else:
            counts["not_sent"] = [one.order.path for one in found.parcels[place:]]
            raise _not_taken(parcel, server, why, len(found.parcels) - place)
        _say(console, parcel, place + 1, len(found.parcels), is_known=why == _KNOWN)


def _send(parcel: Parcel, timeout_s: float) -> str | None:
    """Send one, unless the service has it.

    Returns:
        Why it has not arrived; None where it has, and ``known`` where it had before.
    """
    order = parcel.order
    at_work = holder(Path(order.lock))
    if at_work is not None:
        return f"process {at_work[0]} is sending it"
    known = delivery_at(Path(order.record), order.to)
    if known is not None and known["digest"] == parcel.digest():
        return _KNOWN
    with tempfile.NamedTemporaryFile() as log:
        sender = Sender(order, Path(log.name))
        try:
            return sender.ended(timeout_s)
        except BaseException:  # Ctrl-C: what was sent so far is not sent again
            sender.kill()
            raise


def _say(console: Console, parcel: Parcel, number: int, total: int, *, is_known: bool) -> None:
    what = "is there already" if is_known else "sent"
    path = wording.visible(os.path.relpath(parcel.order.path))
    console.print(f"[{number}/{total}] {parcel.what} {path} {what}", soft_wrap=True, markup=False)


def _not_taken(parcel: Parcel, server: str, why: str, left: int) -> MensError:
    return SetupError(
        "W&B did not take it",
        where=parcel.order.path,
        found=f"{server}: {why}",
        expected=f"a service that answers; not sent: {left} of what was asked for",
        remedy="run the same command again when it does: what was sent is not sent twice",
    )
