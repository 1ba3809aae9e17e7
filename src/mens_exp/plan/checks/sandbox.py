"""Whether the programs of a suite can be executed as the configuration asks."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from mens_exp.config.sandbox import BubblewrapSandbox, ExecutingSandbox
from mens_exp.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield the tools that are missing; whether they isolate is probed when the suite begins."""
    if not config.suite.executes or not isinstance(config.sandbox, ExecutingSandbox):
        return
    needed = {"prlimit": "util-linux"}
    if isinstance(config.sandbox, BubblewrapSandbox):
        needed |= {"bwrap": "bubblewrap", "setpriv": "util-linux"}
    missing = {name: package for name, package in needed.items() if shutil.which(name) is None}
    if missing:
        yield SetupError(
            f"suite={config.suite.name} executes programs, and cannot here",
            where="sandbox",
            found=f"no {', '.join(sorted(missing))}",
            expected=" and ".join(sorted(needed)),
            remedy=f"apt-get install {' '.join(sorted(set(missing.values())))}; or sandbox=none, "
            "which measures what needs no execution",
        )
