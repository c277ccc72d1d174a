"""The process that evaluates for a run: what it gets of the trainer, how it is started, and what it does.

`python -m trainwright.run.evaluation_process FOLDER` reads a trainer from FOLDER, which its parent has written there,
and evaluates the requests that are named on its standard input (`extensions/async_evaluation`). It is the trainer of
the run without optimizer and training data: hooks, metrics and data are the user's, and it computes as the run does.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import queue
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from trainwright.callbacks.base import NO_LOGS, Logs, TrainerCallback
from trainwright.callbacks.flow import DefaultFlowCallback
from trainwright.checkpoint import rng
from trainwright.checkpoint.store import CheckpointStore
from trainwright.config import resolve
from trainwright.config.fields import value_of
from trainwright.config.protocol import Arguments
from trainwright.distributed.device import device_variables, kind_of, tf32_switches
from trainwright.distributed.world import without_launcher
from trainwright.errors import ArgumentError, ProcessFailedError
from trainwright.extensions.async_evaluation.evaluators import EvaluationProcess, Evaluator, Watchers
from trainwright.extensions.async_evaluation.extension import AsyncEvaluation
from trainwright.extensions.async_evaluation.requests import (
    EVALUATE,
    LOG,
    MAIN_PART,
    STATES_NAME,
    Request,
    Requests,
    Result,
)
from trainwright.loop.extension import Extension
from trainwright.run import build, checkpointing, train
from trainwright.run.build import NoSearch
from trainwright.run.internals import Internals
from trainwright.run.pickling import restore, state_of
from trainwright.run.run import Run
from trainwright.state.trainer_state import TrainerControl, TrainerState

AnyTrainer = Any  # a Trainer, or a subclass of the user's: the class is above this package

FROZEN_NAME = "trainer.pt"
WATCH = "watch"
# Settings of a process alone that only evaluates.
ALONE: dict[str, Any] = {
    "fsdp": False,
    "fsdp_config": None,
    "deepspeed": None,
    "parallelism_config": None,
    "report_to": [],
    "push_to_hub": False,
    "disable_tqdm": True,
    "eval_async": False,
    "auto_find_batch_size": False,
    "include_num_input_tokens_seen": "no",  # the run counts them
    "hang_timeout": 0.0,
}
ON_ANOTHER_KIND: dict[str, Any] = {"fp16": False, "tf32": None}  # which a CPU does not compute with
IGNORED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")  # they are the run's, which ends this process


# -- in the run --------------------------------------------------------------------------------------------------------


def extension_of(trainer: AnyTrainer, run: Run, folder: str) -> Extension:
    """Returns the extension of a run that evaluates in another process.

    Args:
        trainer: of the run.
        run: which is about to begin.
        folder: where it writes.
    """
    args = trainer.args

    def make_evaluator(requests: Requests) -> Evaluator:
        if value_of(args, "eval_async") == WATCH:
            return Watchers(requests)
        return started_process(trainer, requests, device=str(value_of(args, "eval_device")))

    def rotate() -> None:
        """Deletes checkpoints that were only kept for their evaluations."""
        store = CheckpointStore(folder)
        steps = store.owned_by(run.run_id)
        if steps and args.should_save:
            best = run.progress.state.best_global_step
            kept = run.extensions.kept_steps()
            checkpointing.rotate(store, args, run_id=run.run_id, newest=max(steps), best=best, kept=kept)

    return AsyncEvaluation(
        folder,
        Internals(trainer).engine,
        trainer,
        make_evaluator=make_evaluator,
        skips=value_of(args, "eval_queue") == "skip",
        is_timed=resolve.checkpoint(args).max_train_s is not None,
        rotate=rotate,
    )


def started_process(trainer: AnyTrainer, requests: Requests, *, device: str) -> EvaluationProcess:
    """Returns the process that evaluates for a trainer, to be started.

    Args:
        trainer: whose model is not wrapped yet.
        requests: of the run.
        device: "cpu", or an accelerator with its number.

    Raises:
        ArgumentError: a part of the trainer cannot be handed over.
    """
    scratch = Path(tempfile.mkdtemp(prefix="trainwright-evaluation-"))  # of this user alone
    try:
        write_frozen(frozen(trainer, requests, device=device), scratch / FROZEN_NAME)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    environment = without_launcher(os.environ) | device_variables(device)
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    command = [sys.executable, "-m", "trainwright.run.evaluation_process", str(scratch)]
    return EvaluationProcess(command, environment, scratch=scratch, requests=requests)


def frozen(trainer: AnyTrainer, requests: Requests, *, device: str) -> dict[str, Any]:
    """Returns what another process needs to evaluate as this trainer does."""
    args = copy.copy(trainer.args)
    is_on_cpu = not kind_of(device).is_accelerator
    settings = ALONE | {"use_cpu": is_on_cpu}
    if is_on_cpu and kind_of(args.device).is_accelerator:
        settings |= ON_ANOTHER_KIND
    for name, value in settings.items():
        if hasattr(args, name):
            setattr(args, name, value)
    args._n_gpu = 0 if is_on_cpu else 1
    nothing: dict[str, Any] = dict.fromkeys(
        ("train_dataset", "optimizer", "lr_scheduler", "optimizer_cls_and_kwargs", "model_init")
    )
    copied = build.with_parts(
        trainer,
        **nothing,
        args=args,
        model_wrapped=trainer.model,
        checkpoint_items={},
        _extensions=[],
        _search=NoSearch(),
    )
    state = state_of(copied) | {
        "callbacks": [DefaultFlowCallback],
        "state": replace(trainer.state, log_history=[]),
        "control": None,
    }
    return {
        "class": type(trainer),
        "trainer": state,
        "folder": str(requests.folder.parent.absolute()),
        "device": device,
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "tf32": [getattr(owner, name) for owner, name in tf32_switches()],
    }


def write_frozen(values: dict[str, Any], path: Path) -> None:
    """Writes them for the other process; ArgumentError names a part of the trainer that cannot be written."""
    pickler = best_pickler()
    try:
        torch.save(values, path, pickle_module=pickler, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        if isinstance(error, OSError):
            raise
        name, reason = _culprit(values["trainer"]["attributes"], pickler) or ("trainer", error)
        install = "" if pickler is not pickle else ", or install cloudpickle (pip install 'trainwright[eval-async]')"
        raise ArgumentError(
            f"eval_async=True hands the trainer to another process, and its {name} cannot be pickled: {reason!r}. Make "
            f"it of functions and classes at the top of a module, without open files, locks or lambdas{install}; or "
            "set eval_async=False."
        ) from error


def best_pickler() -> ModuleType:
    """Returns cloudpickle where it is installed, which also takes functions of a script and lambdas; else pickle."""
    try:
        import cloudpickle
    except ImportError:
        return pickle
    found: ModuleType = cloudpickle
    return found


def _culprit(attributes: dict[str, Any], pickler: ModuleType) -> tuple[str, Exception] | None:
    """Returns the name of the attribute that cannot be pickled, and the error."""
    for name, value in attributes.items():
        try:
            torch.save(value, io.BytesIO(), pickle_module=pickler, pickle_protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            return name, error
    return None


# -- in the process ----------------------------------------------------------------------------------------------------


class EventRecorder(TrainerCallback):
    """Keeps the logs and the ends of evaluations in their order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def on_log(
        self, args: Arguments, state: TrainerState, control: TrainerControl, logs: Logs = NO_LOGS, **kwargs: object
    ) -> None:
        """Keeps a log."""
        self.events.append((LOG, dict(logs)))

    def on_evaluate(
        self, args: Arguments, state: TrainerState, control: TrainerControl, metrics: Logs = NO_LOGS, **kwargs: object
    ) -> None:
        """Keeps the metrics of one evaluation set."""
        self.events.append((EVALUATE, dict(metrics)))


class RequestedEvaluation:
    """Evaluates the requests of a run.

    Args:
        trainer: of the run, without what only training needs.
        requests: of the run.
    """

    def __init__(self, trainer: AnyTrainer, requests: Requests) -> None:
        self._trainer = trainer
        self._requests = requests

    def __call__(self, name: str) -> None:
        """Evaluates a request, and writes its result; errors are those of the evaluation."""
        request = self._requests.read(name)
        if request is None:
            raise ProcessFailedError(f"{self._requests.place(name)} has no request that can be read.")
        recorder = EventRecorder()
        self._trainer.add_callback(recorder)
        try:
            metrics = self._evaluate(request)
        finally:
            self._trainer.remove_callback(recorder)
        Result(events=tuple(recorder.events), metrics=metrics).write(self._requests.place(name))

    def _evaluate(self, request: Request) -> dict[str, Any]:
        trainer = self._trainer
        place = self._requests.place(request.name)
        state = trainer.state
        state.global_step = request.step
        state.epoch = request.epoch
        state.max_steps = request.max_steps
        state.log_history.clear()
        keys = None if request.ignore_keys is None else list(request.ignore_keys)
        states = rng.load(place / STATES_NAME)
        metrics: dict[str, Any] = {}
        for prefix in request.parts:
            trainer._load_from_checkpoint(str(place / prefix))
            rng.restore(states)
            if prefix == MAIN_PART:
                metrics |= trainer._evaluate(None, keys, skip_scheduler=True)
            else:
                metrics |= trainer.evaluate(None, keys, metric_key_prefix=prefix)
        return metrics


@contextmanager
def opened(path: Path) -> Iterator[RequestedEvaluation]:
    """Reads what `write_frozen` has written; within the context it evaluates as the run does while it trains."""
    # Written by the parent process into a directory that only this user can write to.
    values: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    torch.set_num_threads(values["threads"])
    torch.set_float32_matmul_precision(values["matmul_precision"])
    torch.set_default_dtype(values["dtype"])
    state: dict[str, Any] = values["trainer"]
    trainer = object.__new__(values["class"])
    restore(trainer, state | {"control": TrainerControl()})
    build.seed_everything(trainer.args)
    torch.use_deterministic_algorithms(values["is_deterministic"])
    for (owner, name), value in zip(tf32_switches(), values["tf32"], strict=True):
        setattr(owner, name, value)
    internals = Internals(trainer)
    wanted = values["device"]
    found = internals.engine.device
    if found.type != wanted.partition(":")[0]:
        raise ArgumentError(f"eval_device={wanted!r} is not there: the process that evaluates finds {str(found)!r}.")
    internals.adopt_model(trainer.model)
    internals.run.is_training = True  # evaluations within a training compute in its precision
    with train.patched_model(trainer):
        yield RequestedEvaluation(trainer, Requests(values["folder"]))


def main() -> None:
    """Evaluates until standard input ends, which it does with the run."""
    scratch = Path(sys.argv[1])
    for name in IGNORED_SIGNALS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what the user's code prints is no answer
    names: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            names.put(line.strip())
        shutil.rmtree(scratch, ignore_errors=True)  # the run may have been killed
        os._exit(0)

    def tell(**answer: object) -> None:
        answers.write(f"{json.dumps(answer)}\n")

    threading.Thread(target=read, daemon=True).start()
    try:
        with opened(scratch / FROZEN_NAME) as evaluate:
            tell(ready=True)
            while True:
                name = names.get()
                try:
                    evaluate(name)
                except Exception:
                    tell(failed=traceback.format_exc())
                else:
                    tell(done=name)
    except ArgumentError as error:
        tell(failed=str(error))
    except Exception:
        tell(failed=traceback.format_exc())


if __name__ == "__main__":
    main()
