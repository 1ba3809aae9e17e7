from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# These tests were written for this Triton; a CUDA build of torch brings its own.
PACKAGES = ("liger-kernel==0.8.5", "triton==3.9.0")


def test_the_kernels_agree_with_torch_in_tritons_interpreter(installed):
    """Every test of interpreted_liger.py passes, in float32."""
    paths = [str(installed("liger", *PACKAGES)), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    file = str(HERE / "interpreted_liger.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
