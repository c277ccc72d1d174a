"""What every engine must hold under a launcher, with one process and with two."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from .._support.two_processes import Done, run

BACKENDS = ["whole", "fsdp full_shard", "fsdp shard_grad_op", "zero 2", "zero 3"]
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
pytestmark = [pytest.mark.process, pytest.mark.timeout(400), pytest.mark.slow]


@pytest.fixture(scope="module", params=[1, 2])
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("laws")
    backends = [name for name in BACKENDS if HAS_DEEPSPEED or not name.startswith("zero")]
    return run(Path(__file__).with_name("processes.py"), *backends, folder=folder, processes=request.param,
               timeout_s=180, environment={"DS_ACCELERATOR": "cpu"})  # fmt: skip


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_is_the_batch_of_all_processes(backend: str, parts: int, done: Done) -> None:
    """One update by all rows: the norm that clips it is the one of the whole, and so are the weights after it."""
    if backend.startswith("zero") and not HAS_DEEPSPEED:
        pytest.skip("deepspeed is not installed")
    alone = done.told[0]["alone"]
    for told in done.told:
        assert told[f"{backend}: {parts}"]["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert told[f"{backend}: {parts}"]["applied"] is True
    assert done.told[0][f"{backend}: {parts}"]["weights"] == pytest.approx(alone["weights"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS[:3])  # DeepSpeed has no fp16 on the CPU
def test_an_overflow_in_one_process_skips_the_update_in_all(backend: str, done: Done) -> None:
    for told in done.told:
        assert told[f"{backend}: skipped"] == {"applied": False, "same": True}
