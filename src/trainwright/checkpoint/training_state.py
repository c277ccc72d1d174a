"""Files of a checkpoint besides the weights: writes and reads optimizer, schedule, scaler, arguments, items."""

from __future__ import annotations

import json
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.utils.serialization
from torch.optim import Optimizer

from trainwright._types import (
    OPTIMIZER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINING_ARGS_JSON_NAME,
    TRAINING_ARGS_NAME,
    JSONObject,
    StateDict,
    replacing,
    write_text,
)
from trainwright.checkpoint.deferred_io import IMMEDIATE, FileSink
from trainwright.checkpoint.optimizer_check import find_nan_name
from trainwright.checkpoint.rng import numpy_globals
from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError, CheckpointError
from trainwright.support.hooks import Stateful

logger = logging.getLogger(__name__)

MAX_NUMBER = 1e300  # of a setting of an optimizer
# States of torch's optimizers that have a number for each weight.
SHAPED_AS_PARAMETER = (
    "acc_delta",
    "ax",
    "exp_avg",
    "exp_avg_sq",
    "exp_inf",
    "grad_avg",
    "max_exp_avg_sq",
    "momentum_buffer",
    "prev",
    "square_avg",
    "step_size",
    "sum",
)
MAX_STEPS = 1 << 53  # more have no exact float
PLAIN = (bool, int, float, complex, str, type(None), torch.Size, torch.dtype)
Items: TypeAlias = Mapping[str, Stateful]  # the user's objects by name


def save_optimizer(
    state: StateDict, folder: Path, *, sink: FileSink = IMMEDIATE, tested: dict[Path, str | None] | None = None
) -> None:
    """Writes an optimizer's `state_dict` through a sink, which may write it later.

    Args:
        state: whole, on any device.
        folder: of the checkpoint.
        sink: writes now, or copies now and writes later.
        tested: gets the file, and the name of a tensor with NaN or None, when it is written; None: nothing is tested.
    """

    def write(copied: StateDict) -> None:
        if tested is not None:
            tested[folder / OPTIMIZER_NAME] = find_nan_name(copied)
        # Without the checksums inside the file: they are slow, and the manifest has a better one.
        with torch.utils.serialization.config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            torch.save(copied, folder / OPTIMIZER_NAME)

    sink.put(state, write)


def save_scheduler(scheduler: Stateful, folder: Path) -> None:
    """Writes the state of a learning-rate schedule."""
    torch.save(scheduler.state_dict(), folder / SCHEDULER_NAME)


def load_optimizer(
    optimizer: Optimizer, folder: Path, *, load: Callable[[Optimizer, StateDict], None], holds_parts: bool = False
) -> None:
    """Loads the state of an optimizer with `load`; shapes of parameter shards (`holds_parts`) are not checked.

    Raises CheckpointError if the file is missing, or its optimizer is of another kind: a new optimizer at the full rate
    would silently ruin a run.
    """
    _check_is_there(folder, OPTIMIZER_NAME)
    state = load_plain(folder / OPTIMIZER_NAME)
    try:
        _check_same_settings(optimizer, state)
        if not holds_parts:
            _check_same_shapes(optimizer, state)
        load(optimizer, state)
        if not holds_parts:
            _lay_out_as_parameters(optimizer)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise CheckpointError(
            f"The optimizer state in {folder / OPTIMIZER_NAME} does not fit this {type(optimizer).__name__}: {error}. "
            "Resume with the same optim and the same trainable parameters as before, or from another checkpoint."
        ) from error


def load_scheduler(scheduler: Stateful, folder: Path) -> None:
    """Loads the state of a learning-rate schedule; CheckpointError if its file is missing or holds another state."""
    _check_is_there(folder, SCHEDULER_NAME)
    state = load_plain(folder / SCHEDULER_NAME)
    try:
        _check_schedule(state)
        scheduler.load_state_dict(state)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise CheckpointError(
            f"{folder / SCHEDULER_NAME} does not fit this {type(scheduler).__name__}: {error}. "
            "Resume with the schedule of before, or from another checkpoint."
        ) from error


def _check_schedule(state: StateDict) -> None:
    """Raises ValueError for counts and rates, by the names of torch's schedules, that none of them writes."""
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}")
    for key in ("last_epoch", "_step_count"):
        if key in state and not (type(state[key]) is int and -1 <= state[key] < MAX_STEPS):
            raise ValueError(f"{key} is {str(state[key])[:40]!r}")
    for key in ("base_lrs", "_last_lr"):
        rates = state.get(key, [])
        if not isinstance(rates, list) or not all(isinstance(rate, (int, float, torch.Tensor)) for rate in rates):
            raise ValueError(f"{key} is not a list of rates")
        if not all(math.isfinite(rate) for rate in rates):
            raise ValueError(f"{key} has a rate that is not finite")


def save_json(state: JSONObject, path: Path) -> None:
    """Writes values as JSON; no file if there are none."""
    if state:
        path.write_text(json.dumps(state), encoding="utf-8")


# -- items: named objects of the user --------------------------------------------------------------------------------


def read_items(trainer: Any) -> Items:  # any trainer
    """Returns the trainer's `checkpoint_items`; an attribute of a subclass with another meaning has none."""
    items = getattr(trainer, "checkpoint_items", {})
    return items if isinstance(items, Mapping) else {}


def collect_item_states(items: Items) -> dict[str, StateDict]:
    """Returns the states of items by name; ArgumentError for a state that a checkpoint cannot store."""
    states = {}
    for name, item in items.items():
        if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
            raise ArgumentError(
                f"checkpoint_items[{name!r}] is a {type(item).__name__}; an item needs state_dict() and "
                "load_state_dict(state)."
            )
        states[name] = item.state_dict()
        check_plain_state(states[name], f"checkpoint_items[{name!r}].state_dict()")
    return states


def check_plain_state(value: object, place: str) -> None:
    """Raises ArgumentError for values that torch's weights-only loading would refuse when the checkpoint is read."""
    if isinstance(value, dict):
        for key, inner in value.items():
            check_plain_state(inner, f"{place}[{key!r}]")
    elif type(value) in (list, tuple):
        for number, inner in enumerate(value):  # type: ignore[arg-type]
            check_plain_state(inner, f"{place}[{number}]")
    elif type(value) not in (torch.Tensor, torch.nn.Parameter, *PLAIN):
        raise ArgumentError(
            f"{place} is a {type(value).__name__}. A checkpoint is read without running code, so a state may only "
            "contain tensors, numbers, strings and None, in dicts, lists and tuples. Convert it, for example with "
            "torch.from_numpy."
        )


def load_items(items: Items, states: Mapping[str, StateDict], folder: Path) -> None:
    """Restores items from their states in the checkpoint `folder`; items without a state are logged.

    Raises CheckpointError if a state does not fit its item.
    """
    missing = sorted(items.keys() - states.keys())
    unknown = sorted(states.keys() - items.keys())
    if missing:
        logger.warning(
            "%s has no state for the checkpoint items %s, which keep their current state.",
            folder,
            ", ".join(missing),
        )
    if unknown:
        logger.warning(
            "%s has states for checkpoint items that this trainer does not have; they are ignored: %s.",
            folder,
            ", ".join(unknown),
        )
    for name in states.keys() & items.keys():
        try:
            items[name].load_state_dict(states[name])
        except Exception as error:
            raise CheckpointError(
                f"The state of checkpoint item {name!r} in {folder} does not fit: {error!r}."
            ) from error


# -- reading ---------------------------------------------------------------------------------------------------------


def _check_is_there(folder: Path, name: str) -> None:
    if not (folder / name).is_file():
        raise CheckpointError(
            f"{folder} has no {name}, so training cannot continue from it (was it written with save_only_model?). "
            "To start a new run from its weights, load the model from that directory and call train() without "
            "resume_from_checkpoint."
        )


def _check_same_settings(optimizer: Optimizer, state: StateDict) -> None:
    """Raises ValueError if the state is of another kind: its groups lack a setting, or have one of another type."""
    for mine, saved in zip(optimizer.param_groups, state.get("param_groups", ()), strict=False):
        lacking = sorted(set(mine) - set(saved) - {"initial_lr"})
        if lacking:
            raise ValueError(f"the state has no {', '.join(lacking)}, so it belongs to another optimizer")
        if not _has_torch_state(optimizer):
            continue
        of_number = {"initial_lr": 0.0} if "initial_lr" in saved else {}
        for name, value in {**mine, **of_number}.items():
            if name in saved and name != "params" and not _is_alike(value, saved[name]):
                raise ValueError(f"{name} is {str(saved[name])[:40]!r}")


def _has_torch_state(optimizer: Optimizer) -> bool:
    """Returns False for optimizers with states of their own kinds: projected, quantised."""
    return type(getattr(optimizer, "optimizer", optimizer)).__module__.startswith("torch.optim")


def _is_alike(mine: Any, saved: Any) -> bool:
    """Returns whether a setting of a group can take the place of another."""
    if mine is None or isinstance(mine, bool):  # a switch, which may be left to torch
        return saved is None or isinstance(saved, bool) or (mine is None and not isinstance(saved, torch.Tensor))
    if isinstance(mine, (int, float)) or (isinstance(mine, torch.Tensor) and mine.numel() == 1):
        return _is_number(saved)
    if isinstance(mine, (tuple, list)):
        return isinstance(saved, (tuple, list)) and len(saved) == len(mine) and all(map(_is_alike, mine, saved))
    return True


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return (
            value.numel() == 1 and value.device.type != "meta" and not value.is_complex() and _is_number(value.item())
        )
    return type(value) in (int, float) and abs(value) < MAX_NUMBER


def _check_same_shapes(optimizer: Optimizer, state: StateDict) -> None:
    """Raises ValueError if a state belongs to a parameter of another shape: a fused kernel reads beyond its end."""
    if not _has_torch_state(optimizer):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        for name, saved in state["state"].get(index, {}).items():
            if name == "step" and not (_is_number(saved) and saved >= 0):
                raise ValueError(f"step of parameter {index} is {str(saved)[:40]!r}")
            if name not in SHAPED_AS_PARAMETER or saved is None:
                continue
            if not isinstance(saved, torch.Tensor):
                raise ValueError(f"{name} of parameter {index} is a {type(saved).__name__}")
            if saved.shape != parameter.shape:
                raise ValueError(
                    f"{name} of parameter {index} is {tuple(saved.shape)} instead of {tuple(parameter.shape)}"
                )
            is_plain = saved.layout == torch.strided and saved.device.type != "meta"
            if not is_plain or saved.is_complex() != parameter.is_complex() or not _is_inexact(saved):
                raise ValueError(f"{name} of parameter {index} has numbers of another kind, {saved.dtype}")


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _lay_out_as_parameters(optimizer: Optimizer) -> None:
    """Gives each state the memory format of its parameter: fused kernels go through both in the order of the memory.

    A model may be in channels_last now and was not when it was saved, or the other way round.
    """
    for parameter, values in optimizer.state.items():
        for name in SHAPED_AS_PARAMETER:
            saved = values.get(name)
            if not isinstance(saved, torch.Tensor) or saved.shape != parameter.shape or not _is_inexact(saved):
                continue
            if saved.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=saved.dtype, device=saved.device).copy_(saved)


def save_scaler(accelerator: object, folder: Path) -> None:
    """Writes the state of an accelerator's gradient scaler, if there is one."""
    scaler: Stateful | None = getattr(accelerator, "scaler", None)
    if scaler is not None:
        torch.save(scaler.state_dict(), folder / SCALER_NAME)


def load_scaler(accelerator: object, folder: Path) -> None:
    """Loads the state of an accelerator's gradient scaler, if both exist."""
    scaler: Stateful | None = getattr(accelerator, "scaler", None)
    if scaler is not None and (folder / SCALER_NAME).is_file():
        scaler.load_state_dict(load_plain(folder / SCALER_NAME))


def load_data_position(path: Path) -> StateDict:
    """Reads the part of a stream's or a user's dataloader's position that is not in the manifest's cursor."""
    with torch.serialization.safe_globals(numpy_globals()):
        position: StateDict = load_plain(path)
    if not isinstance(position, dict):
        raise CheckpointError(f"{path} has no data position: it is a {type(position).__name__}.")
    return position


def save_arguments(args: Arguments, folder: Path) -> None:
    """Writes the arguments as JSON, and in the file that other readers load with torch; neither has tokens.

    We never read the second. It is a dict, with the values as attributes too, so it opens without this package.
    """
    values = json.loads(args.to_json_string())
    write_text(folder / TRAINING_ARGS_JSON_NAME, json.dumps(values, indent=2, sort_keys=True))
    # The only class with attributes that torch loads with `weights_only=True`.
    shown = OrderedDict((name, None if name.endswith("_token") else value) for name, value in values.items())
    vars(shown).update((name, value) for name, value in shown.items() if not hasattr(shown, name))
    with replacing(folder / TRAINING_ARGS_NAME) as beside:  # a link of that name is replaced, not followed
        _save(shown, beside)


def _save(value: object, path: Path) -> None:
    """Writes with torch.save, to an open file: given a path, it would write the name into the file."""
    with path.open("wb") as file:
        torch.save(value, file)


def check_readable(path: Path) -> None:
    """Reads a file's description of its tensors, but not their values; CheckpointError if it cannot be read."""
    if path.suffix != ".safetensors":
        load_plain(path, device="meta")
        return
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as weights: {error}") from error


def load_plain(path: Path, device: str = "cpu") -> StateDict:
    """Reads a file of `torch.save` without running code; CheckpointError if it has anything but plain values."""
    try:
        return cast(StateDict, torch.load(path, map_location=device, weights_only=True))
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as plain tensors and numbers: {error}") from error
