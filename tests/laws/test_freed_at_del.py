"""When a trainer goes out of scope, its model and optimizer are freed at once, without a garbage collection.

A cycle through a trainer keeps the memory of a model until the collector runs, which may be long after the next model
is made. Each way of using a trainer is tried with the collector switched off; the first training of a process in a
fresh one, since what it imports may keep it.
"""

from __future__ import annotations

import gc
import json
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from trainwright import TrainerCallback

from .._support.small import accuracy, data, make_trainer, module
from .._support.subprocesses import run_python
from .freed_in_fresh_process import ROWS

SCRIPT = Path(__file__).with_name("freed_in_fresh_process.py")

Use = Callable[[Any], None]
SAVES = {"save_strategy": "steps", "save_steps": 1}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": data.vectors(4)}


class Counts(TrainerCallback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1


class At(TrainerCallback):
    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.act()


def fails() -> None:
    raise ZeroDivisionError


def terminated() -> None:
    signal.raise_signal(signal.SIGTERM)


def constructed(trainer: Any) -> None:
    trainer.create_optimizer()


def trained(trainer: Any) -> None:
    trainer.train()


def trained_twice(trainer: Any) -> None:
    trainer.train()
    trainer.train()


def resumed(trainer: Any) -> None:
    trainer.args.save_strategy = "steps"
    trainer.args.save_steps = 1
    trainer.train()
    trainer.args.max_steps = 4
    trainer.train(resume_from_checkpoint=True)


def evaluated(trainer: Any) -> None:
    trainer.create_optimizer()
    trainer.evaluate(data.vectors(4))


def predicted(trainer: Any) -> None:
    trainer.create_optimizer()
    trainer.predict(data.vectors(4))


def failed(trainer: Any) -> None:
    trainer.add_callback(At(fails))
    with suppress(ZeroDivisionError):
        trainer.train()


def interrupted(trainer: Any) -> None:
    trainer.add_callback(At(terminated))
    with suppress(SystemExit):
        trainer.train()


def refused(trainer: Any) -> None:
    trainer.create_optimizer()
    with suppress(ValueError):
        trainer.train(resume_from_checkpoint="nowhere")


def driven(trainer: Any) -> None:
    for step in trainer.steps():
        for batch in step.batches:
            step.backward(step.model(**batch)["loss"])
        step.update()


def driven_and_left(trainer: Any) -> None:
    for step in trainer.steps():
        for batch in step.batches:
            step.backward(step.model(**batch)["loss"])
        step.update()
        if step.number == 2:
            break


def stepped(trainer: Any) -> None:
    while trainer.fit_step() is not None:
        pass


def stepped_and_left(trainer: Any) -> None:
    trainer.fit_step()


def searched(trainer: Any) -> None:
    trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-3)},
        n_trials=2,
        backend="optuna",
        direction="minimize",
    )


USES: dict[str, Use] = {
    "constructed": constructed,
    "train": trained,
    "train twice": trained_twice,
    "resume": resumed,
    "evaluate": evaluated,
    "predict": predicted,
    "error": failed,
    "interrupt": interrupted,
    "refused": refused,
    "steps": driven,
    "steps, left": driven_and_left,
    "fit_step": stepped,
    "fit_step, left": stepped_and_left,
}
WITH: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no guards": {"on_nonfinite": "ignore", "incidents": False},
    "guards": {"on_nonfinite": "rollback", "on_spike": "rollback", "incidents": True, "rollback_every": 2},
    "ledger": {"ledger": True, "incidents": True},
    "callbacks": {"callbacks": [Counts()], "report_to": "tensorboard"},
    "saves and evaluates": {**SAVES, **EVALUATES, "save_async": True, "compute_metrics": accuracy},
    "journal": {"journal": True, "output_dir_wait_s": 1},
    "accumulation": {"gradient_accumulation_steps": 2, "auto_find_batch_size": True, "save_on_exception": True},
}


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def watched(trainer: Any) -> dict[str, weakref.ref[Any]]:
    """Weak references to what must die with a trainer."""
    parts = {"trainer": trainer, "model": trainer.model, "optimizer": trainer.optimizer}
    parts["weight"] = next(trainer.model.parameters())
    return {name: weakref.ref(part) for name, part in parts.items() if part is not None}


def left_alive(folder: Path, use: Use, **settings: Any) -> list[str]:
    trainer = make_trainer(folder, **{"model": module(), "max_steps": 3, **settings})
    use(trainer)
    seen = watched(trainer)
    del trainer
    end = time.monotonic() + (5 if "report_to" in settings else 0)
    while time.monotonic() < end and any(reference() is not None for reference in seen.values()):
        time.sleep(0.01)  # the thread of a tracker may still send something
    return [name for name, reference in seen.items() if reference() is not None]


# A run that is under way holds its trainer, and the trainer holds it; nothing says that it is over.
UNDER_WAY = "trainer -> its run -> fit_step's generator, which waits within the run -> trainer"


def rows() -> Iterator[Any]:
    for name, use in USES.items():
        for kind, settings in WITH.items():
            if name.startswith("steps") and settings.get("auto_find_batch_size"):  # refused, see "refused"
                continue
            marks = [pytest.mark.xfail(strict=True, reason=UNDER_WAY)] if name == "fit_step, left" else []
            yield pytest.param(use, settings, id=f"{name}, {kind}", marks=marks)


@pytest.mark.costly
@pytest.mark.one_in(3)  # every use and all settings, in a third of their pairs
@pytest.mark.parametrize(("use", "settings"), list(rows()))
def test_all_is_freed_at_del(use: Use, settings: dict[str, Any], no_collection: None, tmp_path: Path) -> None:
    assert left_alive(tmp_path, use, **settings) == []


def test_all_is_freed_after_a_search(no_collection: None, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    parts = {"model": None, "model_init": lambda: module(), **EVALUATES}
    assert left_alive(tmp_path, searched, **parts) == []


@pytest.mark.more
@pytest.mark.process
@pytest.mark.timeout(200)
@pytest.mark.parametrize("row", ROWS)
def test_all_is_freed_after_the_first_training_of_a_process(row: str, tmp_path: Path) -> None:
    done = run_python(str(SCRIPT), row, str(tmp_path), timeout_s=180)
    told = [line.removeprefix("ALIVE ") for line in done.stdout.splitlines() if line.startswith("ALIVE ")]
    assert [json.loads(line) for line in told] == [[]]
