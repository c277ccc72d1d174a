"""A run that ends while a checkpoint is on its way to the disk behind training's back: by SIGKILL, or by a signal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from trainwright.checkpoint.store import CheckpointStore, verified

from .._support import forked

# Imports once and forks a run for each case. The writing thread itself sends the signal, at a place of its work.
SCRIPT = """
import json, os, signal, sys, threading, time
from pathlib import Path
import accelerate, safetensors.torch, torch, transformers.data.data_collator, transformers.optimization
from trainwright import Trainer, TrainingArguments
from trainwright.checkpoint import store
from trainwright.checkpoint.manifest import Manifest

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    def forward(self, x, labels=None):
        return {"loss": (self.layer(x) - 1).pow(2).mean()}

def strike(owner, name, number, at):
    original, count = getattr(owner, name), 0
    def call(*args, **kwargs):
        nonlocal count
        if threading.current_thread().name == "checkpoint-writer":
            count += 1
            if count == at:
                os.kill(os.getpid(), number)
                time.sleep(0.3)  # a signal that asks is heard by the main thread, while this goes on
        return original(*args, **kwargs)
    setattr(owner, name, call)

PLACES = {"safetensors": (safetensors.torch, "save_file"), "torch": (torch, "save"),
          "digests": (store, "describe_files"), "manifest": (Manifest, "write"),
          "flush": (store, "flush"), "rename": (Path, "rename")}

def live(folder, place, number, at):
    torch.manual_seed(0)
    if place:
        strike(*PLACES[place], number, at)
    args = TrainingArguments(output_dir=folder, use_cpu=True, disable_tqdm=True, save_steps=2, max_steps=6,
                             logging_steps=1, per_device_train_batch_size=2, learning_rate=0.1,
                             save_total_limit=2, seed=5)
    generator = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(8, generator=generator)} for _ in range(12)]
    trainer = Trainer(model=Model(), args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")))
    safetensors.torch.save_file(trainer.model.state_dict(), Path(folder) / "end.safetensors")

statuses = {}
for name, case in json.loads(sys.argv[1]).items():
    process = os.fork()
    if process == 0:
        sys.stdout = sys.stderr
        try:
            live(*case)
        except SystemExit as error:
            os._exit(error.code)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    statuses[name] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
print(json.dumps(statuses))
"""
KILLED = ["safetensors-2", "torch-1", "digests-2", "manifest-2", "flush-1", "rename-2"]  # in the first or second save
SIGKILL = 9
SIGTERM = 15
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks"),
]


def run(cases: dict[str, tuple[Any, ...]]) -> dict[str, int]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    done = forked.run(["-c", SCRIPT, json.dumps(cases)], env=environment, timeout=140)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert 1 not in found.values(), done.stderr
    return found


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int], dict[str, list[int]]]:
    """Every case ended once and was started again; (directory, how the first life ended, what it left)."""
    root = tmp_path_factory.mktemp("lives")
    struck = {name: (str(root / name), name.split("-")[0], SIGKILL, int(name.split("-")[1])) for name in KILLED}
    struck["asked"] = (str(root / "asked"), "flush", SIGTERM, 1)
    first = run({"through": (str(root / "through"), "", 0, 0), **struck})
    left = {}
    for name in struck:
        steps = CheckpointStore(root / name).steps()
        left[name] = [step for step in steps if verified(CheckpointStore(root / name).path(step))]
    run({name: (str(root / name), "", 0, 0) for name in struck})
    return root, first, left


def same_end(root: Path, name: str) -> bool:
    one, other = (safetensors.torch.load_file(root / n / "end.safetensors") for n in (name, "through"))
    return all(torch.equal(one[key], other[key]) for key in other)


@pytest.mark.parametrize("name", KILLED)
def test_killed_behind_training_s_back_and_resumed_to_the_same_weights(name: str, lives: Any) -> None:
    root, first, left = lives
    assert first[name] == -SIGKILL
    assert left[name] == ([] if name.endswith("-1") else [2])  # each place is passed once in a save
    assert same_end(root, name)
    assert [path.name for path in (root / name).iterdir() if path.name.startswith(".")] == []


def test_a_save_under_way_when_a_signal_asks_is_finished(lives: Any) -> None:
    root, first, left = lives
    assert first["asked"] == 128 + SIGTERM
    assert 2 in left["asked"]
    assert same_end(root, "asked")
