"""One batch of a sweep under a Hydra launcher plugin, in a separate process.

``python -m mens_exp.sweeps.plugin_batch <sweep> <batch> <job>…`` passes the jobs to the launcher of
an installed plugin (hydra-joblib-launcher, hydra-submitit-launcher, …) through Hydra's interface:
``setup`` and one ``launch``. The task function that the plugin runs, on any machine, starts the job
as a process like our other launchers, and logs its attempts for the sweep.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from mens_exp.artifacts.host import lock_holder
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import AttemptLog, SweepDir, SweepRecord
from mens_exp.sweeps.job import ACCEPT_CHANGES
from mens_exp.sweeps.slurm_task import environment_on_node, supervise
from mens_exp.tasks.run import CANCELLED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hydra.plugins.launcher import Launcher

_LOOK_S = 0.5
_BEAT_S = 5.0
SUBDIR = "hydra.sweep.subdir"


def main(arguments: Sequence[str]) -> int:
    """Launch one batch, and wait until the plugin has run all of it.

    Returns:
        0; the log of attempts states how each job ended.
    """
    parser = argparse.ArgumentParser(prog="python -m mens_exp.sweeps.plugin_batch")
    parser.add_argument("sweep", type=Path)
    parser.add_argument("batch", type=int)
    parser.add_argument("jobs", type=int, nargs="+")
    given = parser.parse_args(arguments)
    directory = SweepDir(given.sweep)
    record = SweepRecord.read(directory.record)
    jobs = {job["number"]: job for job in record.jobs}
    task = functools.partial(run_one, str(directory.path), given.batch, tuple(given.jobs))
    launcher = _launcher(record, directory, task)
    overrides = [
        [*jobs[number]["differs"], f"{SUBDIR}={jobs[number]['directory']}"] for number in given.jobs
    ]
    launcher.launch(overrides, initial_job_idx=0)
    return 0


def queue_id(plugin: str, batch: int) -> str:
    """Return the id prefix of a batch's attempts; the plugin's own id of the job follows."""
    return f"{plugin}:{batch}:"


class FrozenLoader(ConfigLoaderImpl):
    """Hydra's loader for jobs that were composed and frozen before any of them started."""

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """Return the sweep's configuration with the job's directory, without composing anything."""
        config = deepcopy(master_config)
        with open_dict(config):
            config.hydra.sweep.subdir = sweep_overrides[-1].partition("=")[2]
            config.hydra.overrides.task = sweep_overrides[:-1]
        return config


def _launcher(record: SweepRecord, directory: SweepDir, task: Any) -> Launcher:
    """Set up the plugin's launcher with the settings that the sweep was launched with."""
    from mens_exp.config.compose import compose

    option = f"hydra/launcher={record.launcher}"
    whole = compose([[option, f"hydra.sweep.dir={directory.path}"]])[0].whole
    assert whole is not None, "it was composed here"
    config = OmegaConf.create({"hydra": whole.hydra})
    with open_dict(config):
        config.hydra.launcher = record.launcher_settings
        config.hydra.output_subdir = None  # a job's directory has its own record
        OmegaConf.resolve(config.hydra.launcher)
    loader = FrozenLoader(config_search_path=create_config_search_path(None))
    context = HydraContext(config_loader=loader, callbacks=Callbacks(config))
    return Plugins.instance().instantiate_launcher(
        hydra_context=context, task_function=task, config=config
    )


def run_one(sweep: str, batch: int, numbers: Sequence[int], config: DictConfig) -> int:
    """Run one job; the plugin calls this function in a process of its choice.

    Args:
        sweep: directory of the sweep.
        batch: number of the batch.
        numbers: its job numbers, in the order in which they were passed to the plugin.
        config: Hydra's configuration, which is ignored; the job's is frozen in its directory.

    Returns:
        The exit code of the job; 130 if it was cancelled before it began.
    """
    del config
    theirs: Any = HydraConfig.get().job
    number = numbers[int(theirs.num)]
    directory = SweepDir(Path(sweep))
    record = SweepRecord.read(directory.record)
    job = next(one for one in record.jobs if one["number"] == number)
    run, log = RunDir(directory.path / job["directory"]), AttemptLog(directory.attempts(number))
    contact = _Contact(directory, number)
    while lock_holder(run.job_lock) is not None and not contact.is_unwanted:
        time.sleep(_LOOK_S)  # an attempt of an earlier batch is still running
    if contact.is_unwanted:
        return CANCELLED
    processes = job.get("processes", 1)
    try:
        ended = supervise(
            [str(run.path), *[ACCEPT_CHANGES] * (record.changes == "accept")],
            run.log,
            environment_on_node(record.threads, processes),
            log,
            processes=processes,
            queue_id=f"{queue_id(record.launcher, batch)}{theirs.get('id') or number}",
            signals=contact.signals,
        )
    except BaseException:  # such as the plugin's own time limit, in a signal handler
        log.ended(None, why=f"ended by {record.launcher}")
        raise
    log.ended(ended.exit_code, peak_rss_bytes=ended.peak_rss_bytes)
    return ended.exit_code if ended.exit_code is not None and ended.exit_code >= 0 else 1


class _Contact:
    """Files through which the sweep cancels a job and the job shows a heartbeat."""

    def __init__(self, directory: SweepDir, number: int) -> None:
        self._unwanted, self._alive = directory.unwanted(number), directory.alive(number)
        self._was, self._beat = False, 0.0

    @property
    def is_unwanted(self) -> bool:
        """Whether the sweep has cancelled the job."""
        return self._unwanted.exists()

    def signals(self) -> list[int]:
        """Touch the heartbeat; return, once, the signal that ends a cancelled job."""
        if time.monotonic() - self._beat >= _BEAT_S:
            self._alive.touch()
            self._beat = time.monotonic()
        if self._was or not self.is_unwanted:
            return []
        self._was = True
        return [signal.SIGTERM]


if __name__ == "__main__":
    # The plugin's workers import the task function by its module, which must not be `__main__`.
    from mens_exp.sweeps import plugin_batch  # noqa: PLW0406

    sys.exit(plugin_batch.main(sys.argv[1:]))
