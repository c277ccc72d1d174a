"""Checks the saved state of an optimizer: for NaN before a checkpoint is committed, against the run after it is loaded.

A checkpoint with such NaN has finite weights, but the first step after a resume would break them. It is marked, not
refused: a resume with True or "auto" uses a checkpoint without a mark, and one named by the user is loaded. Infinity is
valid, since some optimizers begin with it.

A loaded state without any values is refused. Whatever a run may have written is used, with a warning if it is unusual:
a parameter has no state as long as it got no gradient, and fewer updates if it got none in some steps.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainwright._types import OPTIMIZER_NAME, SCALER_NAME, counted
from trainwright.errors import CheckpointError
from trainwright.support.tensor_tree import has_finite_values

logger = logging.getLogger(__name__)

# Optimizers that keep values for each parameter, and count its updates as `step` if they count them.
KNOWN = (
    "bitsandbytes.",
    "torch.optim.",
    "torchao.",
    "trainwright.optim.adamw_bf16.",
    "trainwright.optim.own_optimizers.Muon",
    "transformers.optimization.Adafactor",
)
MAX_SHOWN = 3  # names in a message
# Tensors of at most this many values are joined before they are tested, and at most this many tensors at a time.
SMALL = 4096
JOINED = 1024

Pieces = Callable[[Path], Iterable[tuple[str, str, torch.Tensor]]]  # directory -> file in it, name of tensor, values
Tested = Mapping[Path, str | None]  # file -> name of a tensor with NaN in the values written into it, or None


def find_nan(folder: Path, *, shards: Pieces, tested: Tested | None = None) -> tuple[str, str] | None:
    """Returns the first file with NaN in an optimizer's state, and the tensor's name; None if there is none.

    Args:
        folder: a staged checkpoint. None is also returned if its optimizer is missing or cannot be read as plain
            tensors.
        shards: reads the pieces of a sharded optimizer.
        tested: files that need not be read back, which takes longer than writing them if they have many tensors.
    """
    path = folder / OPTIMIZER_NAME
    if tested is not None and path in tested:
        name = tested[path]
        return None if name is None else (path.name, name)
    if path.is_file():
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # no room for a mapping, or the user's own format
        except (MemoryError, OSError, RuntimeError, pickle.UnpicklingError):
            return None
        name = find_nan_name(saved)
        return None if name is None else (path.name, name)
    return next(((at, name) for at, name, one in shards(folder) if _has_nan(one)), None)


def find_nan_name(saved: Any) -> str | None:
    """Returns the name of a tensor with NaN in an optimizer's `state_dict`; None if there is none.

    Args:
        saved: of any optimizer; one in another form than torch's has no names, and is not tested.
    """
    state = saved.get("state") if isinstance(saved, Mapping) else None
    small: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in _tensors(state, "state"):
        if type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.numel() <= SMALL:
            small[tensor.dtype, tensor.device].append((name, tensor))
        elif _has_nan(tensor):
            return name
    for (dtype, _), named in small.items():
        if not dtype.is_floating_point:
            continue
        for start in range(0, len(named), JOINED):
            joined = named[start : start + JOINED]
            if _has_nan(torch.cat([tensor.detach().reshape(-1) for _, tensor in joined])):
                return next(name for name, tensor in joined if _has_nan(tensor))
    return None


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in nested dictionaries and lists, with their paths."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors(one, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, one in enumerate(value):
            yield from _tensors(one, f"{name}.{i}")


def _has_nan(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return False
    try:
        return math.isnan(tensor.max().item())  # the maximum is NaN if any value is; makes no copy
    except (NotImplementedError, RuntimeError):  # quantized, or another type without a maximum
        return False


# -- after loading -----------------------------------------------------------------------------------------------------


def check_loaded_state(
    optimizer: Any,
    folder: Path,
    *,
    num_steps: int,
    count_skipped: Callable[[], int],
    names: Mapping[torch.Tensor, str],
) -> None:
    """Compares the state that an optimizer loaded with the run that wrote it; logs what is unusual.

    Args:
        optimizer: of any package; one that is not known is not judged.
        folder: the checkpoint, for messages.
        num_steps: steps that its run had made.
        count_skipped: returns how many of them updated nothing; called only if the state has fewer updates.
        names: of the parameters.

    Raises:
        CheckpointError: there is no state for any parameter, although the optimizer keeps some.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    trained = [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
    _check_finite(inner, folder / OPTIMIZER_NAME, names)
    if not trained or not _keeps_state(inner):
        return
    path = folder / OPTIMIZER_NAME
    has_scaler = (folder / SCALER_NAME).is_file()
    missing = [parameter for parameter in trained if not inner.state.get(parameter)]
    if len(missing) == len(trained) and not has_scaler and num_steps > count_skipped():
        raise CheckpointError(
            f"{path} has no state of {type(inner).__name__} for any parameter after {counted(num_steps, 'step')}, so "
            "the run cannot continue as it was. Resume from another checkpoint, or begin a new run from the weights: "
            "load the model from that directory and call train() without resume_from_checkpoint."
        )
    if len(trained) > len(missing) > 0 and not isinstance(inner, torch.optim.LBFGS):
        logger.info(  # no warning: models with unused parameters, and experts without tokens, have this at each resume
            "%s has no state for %d of %s (%s): %s begins anew there. That is right for parameters that had no "
            "gradient yet; otherwise use another checkpoint.",
            path,
            len(missing),
            counted(len(trained), "parameter"),
            _shown_names(missing, names),
            type(inner).__name__,
        )
    _check_counts(inner, path, num_steps, count_skipped=lambda: num_steps if has_scaler else count_skipped())


def _check_finite(optimizer: Any, path: Path, names: Mapping[torch.Tensor, str]) -> None:
    """Logs a warning if a state has NaN; the weights would have it after the next step."""
    for parameter, state in getattr(optimizer, "state", {}).items():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if isinstance(value, torch.Tensor) and not has_finite_values(value, allows_infinity=True):
                logger.warning(
                    "%s has NaN in %s of %s, which the next step brings into the weights. Use another checkpoint.",
                    path,
                    key,
                    names.get(parameter, "a parameter"),
                )
                return


def _keeps_state(optimizer: Any) -> bool:
    """Returns whether an optimizer certainly has a state for each parameter that it has updated."""
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if not name.startswith(KNOWN) or not isinstance(optimizer, torch.optim.Optimizer):
        return False
    return not isinstance(optimizer, torch.optim.SGD) or all(group["momentum"] for group in optimizer.param_groups)


def _check_counts(
    optimizer: torch.optim.Optimizer, path: Path, num_steps: int, *, count_skipped: Callable[[], int]
) -> None:
    """Logs a warning if the updates that a state counts are not those of the run, or differ between parameters."""
    steps = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    if not steps or set(steps) == {num_steps}:
        return
    if len(set(steps)) == 1 and num_steps - count_skipped() <= steps[0] <= num_steps:
        return
    found = f"{min(steps):.0f}" if min(steps) == max(steps) else f"{min(steps):.0f} to {max(steps):.0f}"
    is_usual = min(steps) < max(steps) == num_steps  # some parameters had no gradient in some steps
    logger.log(
        logging.INFO if is_usual else logging.WARNING,
        "%s counts %s updates of a parameter, and its run had made %s. They are used as they are: they set the size of "
        "the next updates. That is right if some parameters had no gradient in some steps, or if it was used before "
        "that run; otherwise use another checkpoint.",
        path,
        found,
        counted(num_steps, "step"),
    )


def _shown_names(parameters: list[torch.Tensor], names: Mapping[torch.Tensor, str]) -> str:
    shown = [names.get(parameter, "without a name") for parameter in parameters[:MAX_SHOWN]]
    return ", ".join(shown) + (", ..." if len(parameters) > MAX_SHOWN else "")
