"""task=serve: a merged model behind an OpenAI-compatible server, until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mens_exp.artifacts.outputs import refuse_changed_outputs
from mens_exp.errors import SetupError
from mens_exp.export.serving import serving
from mens_exp.layout.cached import hash_weights
from mens_exp.tasks.cancellation import Cancelled

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run

__all__ = ["serve"]


def serve(config: RunConfig, run: Run) -> None:
    """Start the server, say how to ask it, and wait; Ctrl-C and SIGTERM are its usual end.

    Raises:
        SetupError: the server ended by itself.
        Problems: a file of the model is not what its run wrote.
    """
    assert config.path is not None, "validation has asked for it"
    model = Path(config.path)
    refuse_changed_outputs(model / "config.json", *sorted(model.glob("*.safetensors")))
    run.manifest.inputs.update(subject=str(model), base_weights_sha256=hash_weights(model))
    console = Console()
    asked = config.serve
    try:
        with serving(model, host=asked.host, port=asked.port, token_env=asked.token_env) as server:
            run.manifest.results.update(url=server.url, model=server.model)
            run.save()
            console.print(f"Serving {server.model} at {server.url}; Ctrl-C ends it.")
            console.print(server.curl, soft_wrap=True, markup=False, highlight=False)
            code = server.process.wait()
    except (Cancelled, KeyboardInterrupt):
        console.print("Stopped.")
        return
    raise SetupError(
        "the server ended by itself",
        where="task=serve",
        found=f"exit code {code}; its own words stand above",
    )
