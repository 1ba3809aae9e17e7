"""Mark the tests of this directory, which need a CUDA device."""

from __future__ import annotations

import pytest
import torch

NO_CUDA = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device; on one, install a CUDA build of torch (README, 'A CUDA "
    "machine') and run: pytest -m gpu",
)


def pytest_itemcollected(item):
    """Mark the tests of this directory, and no others."""
    item.add_marker(pytest.mark.gpu)
    item.add_marker(NO_CUDA)
