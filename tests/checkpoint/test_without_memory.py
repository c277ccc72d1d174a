"""Saves in a process that may take no more memory: they are written at once, through buffers of a few MB."""

from __future__ import annotations

import errno
import mmap
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from trainwright.checkpoint import manifest
from trainwright.checkpoint.manifest import describe_file, digest
from trainwright.checkpoint.store import ANY_WEIGHTS, CheckpointStore, verified

from .._support.small import make_trainer, module
from .._support.subprocesses import run_python

SAVING = {"save_strategy": "steps", "save_steps": 4, "num_train_epochs": 1, "log_level": "warning"}

# 64 MB of weights, and room for 24 MB more from the end of each step until the next one begins and its save is written.
# The limit is one of addresses, so it also counts mappings of files.
LIMITED = """
import resource, sys, threading
from pathlib import Path
import torch
import safetensors.torch, transformers.data.data_collator, transformers.optimization, xxhash
from trainwright import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4096, 4096, bias=False)
    def forward(self, x, labels=None):
        return {"loss": self.layer(x).pow(2).mean()}

class Limits(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), resource.RLIM_INFINITY))

    def on_step_begin(self, args, state, control, **kwargs):
        for thread in threading.enumerate():
            if thread.name == "checkpoint-writer":
                thread.join()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

torch.set_num_threads(1)
args = TrainingArguments(sys.argv[1], use_cpu=True, disable_tqdm=True, max_steps=4, save_steps=2, report_to="none",
                         optim="sgd", per_device_train_batch_size=1, learning_rate=1e-6)
data = [{"x": torch.ones(4096)}] * 4
Trainer(model=Model(), args=args, train_dataset=data, callbacks=[Limits]).train()
"""


@pytest.mark.more
@pytest.mark.process
@pytest.mark.costly
def test_a_run_under_a_limit_of_addresses_saves_and_goes_on(tmp_path: Path) -> None:
    done = run_python("-c", LIMITED, str(tmp_path))
    assert "Training pauses while a file of a checkpoint is written" in done.stderr
    assert CheckpointStore(tmp_path).steps() == [2, 4]
    for step in (2, 4):
        assert verified(tmp_path / f"checkpoint-{step}")


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_the_digest_of_a_file_that_cannot_be_mapped_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 20_000)
    expected = describe_file(path)
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert describe_file(path) == expected
    assert expected[manifest.DIGEST] == digest(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_weights_that_cannot_be_mapped_are_looked_at_all_the_same(
    error: Exception, value: float, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = torch.ones(600_000, dtype=dtype)
    last[-1] = value
    weights = {"a": torch.ones(3, 5, dtype=dtype), "count": torch.ones(4, dtype=torch.int64), "last": last}
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    expected = ANY_WEIGHTS.find(tmp_path)
    assert expected == (None if value == 1.0 else ("model.safetensors", "last"))

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(safetensors, "safe_open", fail)
    assert ANY_WEIGHTS.find(tmp_path) == expected


def test_where_no_thread_can_be_started_the_save_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "checkpoint-writer":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    make_trainer(tmp_path, model=module(), **SAVING).train()
    assert "Training pauses while a checkpoint is written: can't start new thread" in caplog.text
    assert CheckpointStore(tmp_path).steps() == [4, 7]
    assert verified(tmp_path / "checkpoint-7")
