"""What every test stands on: one thread, no network, no process group, no leftovers."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["tests._support.stores", "tests._support.tiers"]

# Before torch is imported anywhere: it reads the number of threads once.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "disabled",
}
# On a busy machine any example may take long; what hangs has the limit of its test.
hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")
# A run keeps ignoring what its process ignored from its start, and a shell starts background jobs without Ctrl-C.
for _signal in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, signal.default_int_handler if _signal == signal.SIGINT else signal.SIG_DFL)
# A launcher's or a user's settings would change what a run does.
_LAUNCHER = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HF_TOKEN"}
for _name in [n for n in os.environ if n in _LAUNCHER or n.startswith(("ACCELERATE_", "FSDP_", "TRAINWRIGHT_"))]:
    del os.environ[_name]


# Tests in tests/gpu run on the CPU then, so that on a GPU only the device is new: `make gpu-rehearsal`.
_REHEARSAL = os.environ.get("REHEARSAL") == "1"


@pytest.fixture(autouse=True)
def _hermetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each test in an empty directory of its own, and put environment and log level back afterwards."""
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield
    # A trainer sets its own level, as the original does; setting one empties the caches of all loggers.
    for name, level in (("trainwright", logging.NOTSET), ("transformers", logging.WARNING)):
        if (logger := logging.getLogger(name)).level != level:
            logger.setLevel(level)
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available() and not (_REHEARSAL and item.path.parent.name == "gpu"):
            pytest.skip("needs a CUDA device")
