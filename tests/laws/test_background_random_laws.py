"""Work in the background draws no global random number: what happens there changes no bit of a training."""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from trainwright import Trainer, TrainerCallback, TrainingArguments
from trainwright.capabilities.mirror import lease
from trainwright.capabilities.mirror.process_client import ProcessClient
from trainwright.capabilities.mirror.remote import RemoteStore
from trainwright.capabilities.mirror.sources import find_newest, keeping_random_state
from trainwright.checkpoint.store import CheckpointStore
from trainwright.trackers.own_random import give_own_random

from .._support.small import differing, weights
from .._support.stores import STORES, gcs_server, missing_packages, s3_server

FAILING = {"s3": s3_server, "gs": gcs_server}
WAIT_S = 60.0
NUM_STEPS = 4


def noisy(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator that draws from all global generators."""
    noise = random.random() + np.random.rand() + torch.rand(()).item()
    return {name: torch.stack([torch.as_tensor(one[name]) for one in samples]) + noise for name in samples[0]}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.body(x).squeeze(-1), labels)}


class WaitForFailures(TrainerCallback):
    """Goes on after each step once the store has failed again, and its client has begun to wait."""

    def __init__(self, failures: Path) -> None:
        self.failures = failures
        self.seen = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        until = time.monotonic() + WAIT_S
        while (size := self.failures.stat().st_size if self.failures.exists() else 0) == self.seen:
            assert time.monotonic() < until, "the store did not fail"
            time.sleep(0.01)
        self.seen = size
        time.sleep(0.05)


def trained(folder: Path, url: str | None, *callbacks: TrainerCallback) -> tuple[Any, Any]:
    """Returns the weights after a run, and the states of the global generators."""
    args = TrainingArguments(
        output_dir=str(folder),
        checkpoint_mirror=url,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        max_steps=NUM_STEPS,
        save_steps=2,
        seed=3,
    )
    data = [{"x": [float(i % 5), 1.0, float(i % 3), 0.5], "labels": float(i % 2)} for i in range(32)]
    torch.manual_seed(0)
    trainer = Trainer(model=Model(), args=args, train_dataset=data, data_collator=noisy, callbacks=list(callbacks))
    trainer.train()
    return weights(trainer.model), (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )


@pytest.mark.process
@pytest.mark.parametrize("name", ["s3", pytest.param("gs", marks=pytest.mark.slow)])  # gcsfs waits 1 to 2 s each time
def test_a_store_that_fails_in_the_background_changes_no_random_number(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := missing_packages(name):
        pytest.skip(f"needs {', '.join(missing)}")
    expected, expected_states = trained(tmp_path / "without", None)
    failures = tmp_path / "failures"
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    new_server: Callable[[Path], AbstractContextManager[dict[str, str]]] = FAILING[name]
    with new_server(failures) as environment:
        os.environ.update(environment)  # each test gets its own environment back
        with STORES[name].url() as url:
            found, states = trained(tmp_path / "with", url, WaitForFailures(failures))
            steps = [one.step for one in RemoteStore(url).manifests()]
    assert not differing(found, expected)
    assert states == expected_states
    assert steps[0] == NUM_STEPS
    assert failures.stat().st_size >= NUM_STEPS


@pytest.mark.process
@pytest.mark.parametrize("name", ["s3", "gs", "az"])
def test_no_client_that_copies_is_in_the_process_that_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    account = "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=Zm9v;BlobEndpoint=http://127.0.0.1:1/a;"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", account)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    for package in STORES[name].packages:
        pytest.importorskip(package)
    store = RemoteStore(f"{name}://bucket/run", is_apart=True)
    try:
        assert isinstance(store._fs, ProcessClient)
    finally:
        store.close()


@pytest.mark.process
def test_a_resume_from_a_store_that_fails_changes_no_random_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client in the process that trains tries again, and draws."""
    if missing := missing_packages("s3"):
        pytest.skip(f"needs {', '.join(missing)}")
    # A tracker in an earlier test of this process may have given it a generator of its own.
    monkeypatch.setattr(importlib.import_module("botocore.retryhandler"), "random", random)
    failures = tmp_path / "failures"
    with s3_server(failures) as environment:
        os.environ.update(environment)  # each test gets its own environment back
        with STORES["s3"].url() as url:
            state = random.getstate()
            with keeping_random_state():
                for number in range(3):
                    RemoteStore(url).overwrite(f"object-{number}", b"")
                assert random.getstate() != state, "the client has not drawn"
            assert random.getstate() == state
            find_newest(CheckpointStore(tmp_path), url, why_not=lambda found: None)
            assert random.getstate() == state


def test_what_a_module_binds_in_other_ways_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("aclient")
    source = """
import random as dice
from random import Random, uniform as between

def wait(draw=dice.random, *, at_most=2.0):
    return draw() + between(0.0, at_most)

class Retries:
    def __init__(self, draw=dice.random):
        self.draw = draw

def shuffled(values):
    dice.shuffle(values)
    return values

mine = Random(0)
"""
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, "aclient", module)
    module.Retries.__module__ = "aclient"
    give_own_random(["aclient"])
    before = random.getstate()
    module.wait()
    module.Retries().draw()
    assert sorted(module.shuffled([1, 2, 3])) == [1, 2, 3]
    assert random.getstate() == before
    assert module.mine.random() == random.Random(0).random()  # a generator of its own stays as it is
