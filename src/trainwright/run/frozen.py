"""The parts of a trainer that evaluate in another process, as a file. `thaw.py` reads it there."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from trainwright.callbacks.flow import DefaultFlowCallback
from trainwright.config import resolve
from trainwright.config.fields import assign
from trainwright.distributed.device import get_kind, tf32_switches
from trainwright.errors import ArgumentError
from trainwright.run.internals import Internals
from trainwright.run.pickling import make_state

AnyTrainer = Any  # a Trainer, or a subclass of the user's: the class is above this package

# Settings of a process alone that only evaluates.
ALONE: dict[str, Any] = {
    **resolve.WITHOUT_BACKEND,
    "report_to": [],
    "push_to_hub": False,
    "disable_tqdm": True,
    "auto_find_batch_size": False,
    "include_num_input_tokens_seen": "no",  # the run counts them
    "hang_timeout": 0.0,
}
ON_ANOTHER_KIND: dict[str, Any] = {"fp16": False, "tf32": None}  # which a CPU does not compute with


def freeze(
    trainer: AnyTrainer,
    path: Path,
    *,
    folder: str,
    device: str,
    settings: Mapping[str, Any],
    asked_by: str,
    instead: str,
) -> None:
    """Writes the parts of a trainer that another process needs to evaluate as it does, before the model is wrapped.

    Args:
        trainer: of the run.
        path: the file.
        folder: where the run writes.
        device: "cpu", or an accelerator with its number.
        settings: arguments that are others in the process.
        asked_by: the setting or call that needs the other process.
        instead: what works without it.

    Raises:
        ArgumentError: a part of the trainer cannot be handed over.
    """
    values = frozen(trainer, folder=folder, device=device, settings=settings)
    write_frozen(values, path, asked_by=asked_by, instead=instead)


def frozen(trainer: AnyTrainer, *, folder: str, device: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of this trainer that another process needs to evaluate as it does."""
    args = copy.copy(trainer.args)
    is_on_cpu = not get_kind(device).is_accelerator
    assign(args, ALONE | {"use_cpu": is_on_cpu} | dict(settings))
    if is_on_cpu and get_kind(trainer.args.device).is_accelerator:
        assign(args, ON_ANOTHER_KIND)
    args._n_gpu = 0 if is_on_cpu else 1
    nothing: dict[str, Any] = dict.fromkeys(
        ("train_dataset", "optimizer", "lr_scheduler", "optimizer_cls_and_kwargs", "model_init")
    )
    copied = Internals(trainer).copied_for_evaluation(
        **nothing, args=args, model_wrapped=trainer.model, checkpoint_items={}
    )
    state = make_state(copied) | {
        "callbacks": [DefaultFlowCallback],
        "state": replace(trainer.state, log_history=[]),
        "control": None,
    }
    return {
        "class": type(trainer),
        "trainer": state,
        "folder": str(Path(folder).absolute()),
        "device": device,
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "tf32": [getattr(owner, name) for owner, name in tf32_switches()],
    }


def write_frozen(values: dict[str, Any], path: Path, *, asked_by: str, instead: str) -> None:
    """Writes them for the other process; ArgumentError names a part of the trainer that cannot be written.

    Args:
        values: entries for the other process; `trainer` is the state of the trainer.
        path: the file.
        asked_by: the setting or call that needs the other process.
        instead: what works without it.
    """
    pickler = best_pickler()
    try:
        torch.save(values, path, pickle_module=pickler, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        if isinstance(error, OSError):
            raise
        name, reason = _culprit(values["trainer"]["attributes"], pickler) or ("trainer", error)
        install = "" if pickler is not pickle else ", or install cloudpickle (pip install cloudpickle)"
        raise ArgumentError(
            f"{asked_by} hands the trainer to another process, and its {name} cannot be pickled: {reason!r}. Make "
            f"it of functions and classes at the top of a module, without open files, locks or lambdas{install}; or "
            f"{instead}."
        ) from error


def best_pickler() -> ModuleType:
    """Returns cloudpickle if it is installed, which also takes functions of a script and lambdas; else pickle."""
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
