"""Runs that evaluate beside training, for the laws: the same settings, an evaluator that answers when it is told to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainwright import EarlyStoppingCallback, Trainer, TrainerCallback
from trainwright.capabilities.async_evaluation.process import opened
from trainwright.capabilities.async_evaluation.requests import EvaluationRequest, Requests, Result
from trainwright.checkpoint.rng import unchanged_random_states
from trainwright.run.thaw import thaw

from ...contract import doubles

STEPS = 8
EVERY = 2
CLOCKS = ("_runtime", "_per_second")
BEST = {"metric_for_best_model": "mae", "greater_is_better": False, "load_best_model_at_end": True}
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "eval_strategy": "steps",
    "eval_steps": EVERY,
    "save_strategy": "steps",
    "save_steps": EVERY,
    "logging_steps": EVERY,
    "preflight": False,
    "incidents": False,
    "per_device_eval_batch_size": 3,
    **BEST,
}


def errors(prediction: Any) -> dict[str, float]:
    return {"mae": float(abs(prediction.predictions - prediction.label_ids).mean())}


def noisy(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Draws at random, as a collator that masks tokens does."""
    x = torch.stack([sample["x"] for sample in samples])
    return {"x": x + torch.randn_like(x) / 10, "labels": torch.tensor([sample["labels"] for sample in samples])}


class GatedErrors:
    """A metric that kills its process, or waits for a file, the first times that it is computed."""

    def __init__(self, folder: Path, *, deaths: int = 0) -> None:
        self.folder = folder
        self.deaths = deaths

    def __call__(self, prediction: Any) -> dict[str, float]:
        for number in range(self.deaths):
            mark = self.folder / f"death-{number}"
            if os.getpid() != int((self.folder / "run").read_text()) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return errors(prediction)


class Heard(TrainerCallback):
    """Notes each evaluation: the step it belongs to, and the steps that were trained when the run heard of it."""

    def __init__(self) -> None:
        self.trained = 0
        self.evaluations: list[tuple[int, int, dict[str, float]]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trained = state.global_step + 1

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.evaluations.append((state.global_step, self.trained, timeless(metrics)))


class Held(TrainerCallback):
    """Evaluates a request at once, in this process, and hands the result over some steps later.

    It stands in for the child process. While the run waits, steps pass for it.
    """

    def __init__(self, delay: int = 1) -> None:
        self.delay = delay
        self.now = 0
        self.results: list[tuple[int, str, Result]] = []
        self.most_open = 0
        self.is_gone = False
        self.is_stopped = False
        self.lost: set[int] = set()  # steps without a result
        self.never = False  # no result comes

    def instead_of(self, freeze: Callable[[Path], None], requests: Requests, **how: Any) -> Held:
        self.requests = requests
        self.path = requests.folder.parent / "frozen.pt"
        freeze(self.path)
        return self

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.now = state.global_step

    def start(self) -> None: ...

    def find_problem(self, seconds: float) -> str | None:
        return ""

    def submit(self, request: EvaluationRequest) -> None:
        if request.step in self.lost:
            result: Result | None = Result(missing="it was lost")
        else:
            with unchanged_random_states(), opened(self.path, thaw) as evaluate:
                evaluate(request.name)
            place = self.requests.place(request.name)
            result = Result.read(place)
            if self.never:
                (place / "result.json").unlink()
        assert result is not None
        self.results.append((self.now + self.delay, request.name, result))
        self.most_open = max(self.most_open, self.num_open)

    def take(self) -> list[tuple[str, Result]]:
        if self.never:
            return []
        found = [(name, result) for when, name, result in self.results if when <= self.now]
        self.results = [one for one in self.results if one[0] > self.now]
        return found

    def wait(self, seconds: float) -> None:
        self.now += 1

    @property
    def num_open(self) -> int:
        return len(self.results) if self.never else sum(when > self.now for when, *_ in self.results)

    def stop(self) -> None:
        self.is_stopped = True


def timeless(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.endswith(CLOCKS)}


def evaluations(trainer: Any) -> list[dict[str, Any]]:
    """Returns what the record has of evaluations, in the order of steps."""
    found = [timeless(one) for one in trainer.state.log_history if any(name.startswith("eval_") for name in one)]
    return sorted(found, key=lambda one: one["step"])


def make(folder: Path, cls: type[Trainer] | None = None, **settings: Any) -> tuple[Any, Heard]:
    """Returns a trainer of these settings; `callbacks`, `compute_metrics` and such are parts of it."""
    names = ("callbacks", "compute_metrics", "data_collator", "eval_dataset", "model", "train_dataset")
    parts = {name: settings.pop(name) for name in names if name in settings}
    heard = Heard()
    parts["callbacks"] = [heard, *parts.get("callbacks", ())]
    parts = {"compute_metrics": errors, "eval_dataset": doubles.samples(10), **parts}
    return doubles.trainer(folder, cls, settings=SETTINGS | settings, **parts), heard


def stops_early() -> EarlyStoppingCallback:
    """Stops at the second evaluation: no metric improves by so much."""
    return EarlyStoppingCallback(1, early_stopping_threshold=100.0)


def until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)
