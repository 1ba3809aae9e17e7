"""The environment of a process as W&B's client sees it, and the place of the client's files."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mens_exp.errors import MensError, SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["contained", "require_account", "server_address", "stop_service"]

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
