from __future__ import annotations

import pytest
from record import Better, Figure, Machine, Run, Size

COMMIT = "0123456789" * 4


@pytest.fixture(scope="session")
def figure_of():
    """Return a figure; by default 100 tokens/s, half of its reference, in one round."""

    def made(**changed):
        plain = Figure(
            name="speed",
            value=100,
            unit="tokens/s",
            better=Better.HIGHER,
            lowest=None,
            highest=None,
            reference="GEMM",
            reference_value=200,
            ratio=0.5,
        )
        return Figure(**{**plain, **changed})

    return made


@pytest.fixture(scope="session")
def machine_of():
    """Return a machine; by default one without unknown values."""

    def made(**changed):
        plain = Machine(
            cpu="EPYC",
            instruction_set="AVX512",
            cores=2,
            threads=2,
            memory_gib=24.0,
            load_1min=0.1,
            os="Linux 6",
        )
        return Machine(**{**plain, **changed})

    return made


@pytest.fixture(scope="session")
def run_of(figure_of, machine_of):
    """Return a run of one figure without unknown values."""

    def made(**changed):
        plain = Run(
            utc="2026-01-02T03:04:05.678Z",
            command="python benchmarks/throughput.py",
            size=Size.FULL,
            commit=COMMIT,
            dirty=False,
            machine=machine_of(),
            versions={"torch": "2.13.0"},
            unknown={},
            note="",
            figures=[figure_of()],
        )
        return Run(**{**plain, **changed})

    return made
