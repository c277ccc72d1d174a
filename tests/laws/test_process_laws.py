"""What every engine must hold under a launcher, with each number of processes that it is made for."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from .._support.two_processes import Done, run

ANYWHERE = ["whole", "fsdp full_shard", "fsdp shard_grad_op", "zero 2", "zero 3"]
BACKENDS = {1: ANYWHERE, 2: [*ANYWHERE, "tensor"], 4: ["tensor + fsdp"]}  # by number of processes
CASES = [(processes, backend) for processes, backends in BACKENDS.items() for backend in backends]
HALVES = [(processes, backend) for processes, backend in CASES if backend.startswith(("whole", "fsdp"))]
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
pytestmark = [pytest.mark.process, pytest.mark.timeout(400), pytest.mark.slow]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Done]:
    @functools.cache
    def launched(processes: int) -> Done:
        folder = tmp_path_factory.mktemp("laws")
        backends = [name for name in BACKENDS[processes] if HAS_DEEPSPEED or not name.startswith("zero")]
        return run(
            Path(__file__).with_name("processes.py"),
            *backends,
            folder=folder,
            processes=processes,
            timeout_s=180,
            environment={"DS_ACCELERATOR": "cpu"},
        )

    return launched


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("processes", "backend"), CASES)
def test_a_window_is_the_batch_of_all_processes(
    processes: int, backend: str, parts: int, launch: Callable[[int], Done]
) -> None:
    """One update by all rows: the norm that clips it is the one of the whole, and so are the weights after it."""
    if backend.startswith("zero") and not HAS_DEEPSPEED:
        pytest.skip("deepspeed is not installed")
    done = launch(processes)
    alone = done.told[0]["alone"]
    for told in done.told:
        assert told[f"{backend}: {parts}"]["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert told[f"{backend}: {parts}"]["applied"] is True
    assert done.told[0][f"{backend}: {parts}"]["weights"] == pytest.approx(alone["weights"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("processes", "backend"), HALVES)  # the others have no fp16 on the CPU
def test_an_overflow_in_one_process_skips_the_update_in_all(
    processes: int, backend: str, launch: Callable[[int], Done]
) -> None:
    for told in launch(processes).told:
        assert told[f"{backend}: skipped"] == {"applied": False, "same": True}
