"""Execute a notebook in a process whose sockets are separate from pytest's."""

from __future__ import annotations

import sys

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient


def main(source, target, folder, address):
    """Execute `source` in `folder` and write it with its outputs to `target`.

    Args:
        source: a notebook.
        target: where the executed one goes.
        folder: the kernel's working directory.
        address: start of the paths of the kernel's sockets; no network is used.
    """
    notebook = nbformat.read(source, as_version=4)
    kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=address)
    place = {"metadata": {"path": folder}}
    NotebookClient(notebook, km=kernel, timeout=300, resources=place).execute()
    nbformat.write(notebook, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
