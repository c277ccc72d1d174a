"""Parameters that get gradients only after the optimizer was made: not trained, not by all processes, or in new groups.

A checkpoint lists the parameter groups by name if the optimizer has others than it was made with, so that a resume can
make them before it loads their states.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from trainwright._types import counted
from trainwright.config.plans import FIND_UNUSED_FIELD
from trainwright.errors import CheckpointError
from trainwright.optim import schedules
from trainwright.support.door import read_json

logger = logging.getLogger(__name__)

SHOWN = 3  # names in a message
GROUPS_NAME = "parameter_groups.json"
MAX_BYTES = 64 << 20


class LateParameters:
    """Finds them where a run has time to look: at the beginning of an epoch, and at a log if they were frozen before.

    A parameter that required a gradient when training began counts as known: an optimizer of the user's may leave it
    out.

    Args:
        model: the user's module, once its optimizer is made.
        reaches_new: gradients of such a parameter are averaged over processes.
    """

    def __init__(self, model: nn.Module, *, reaches_new: bool) -> None:
        self._known = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._reaches_new = reaches_new

    @property
    def is_unfrozen(self) -> bool:
        """True if a parameter that was frozen when training began requires a gradient."""
        return True in [parameter.requires_grad for parameter in self._frozen]

    def check(self, model: nn.Module, optimizer: Any, step: int) -> None:
        """Logs a warning for each such parameter, once; `step` is the last finished one."""
        late = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in self._known
        }
        if not late:
            return
        self._known |= late.keys()
        trained = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
        idle = [name for name, parameter in late.items() if id(parameter) not in trained]
        if idle:
            logger.warning(
                "Not trained: %s, found after step %d, and no parameter group has %s. Where you set requires_grad or "
                "add the module, call optimizer.add_param_group({'params': [...]}) too; or leave requires_grad=True "
                "until training begins, and freeze in on_train_begin.",
                _describe(idle),
                step,
                "it" if len(idle) == 1 else "them",
            )
        apart = [name for name in late if name not in idle]
        if apart and not self._reaches_new:
            logger.warning(
                "Not averaged over processes, each of which trains weights of its own: %s, found after step %d. Leave "
                "requires_grad=True until training begins, and freeze in on_train_begin, with %s=True.",
                _describe(apart),
                step,
                FIND_UNUSED_FIELD,
            )


def _describe(names: Iterable[str]) -> str:
    found = list(names)
    shown = ", ".join(found[:SHOWN]) + (", ..." if len(found) > SHOWN else "")
    require = "requires" if len(found) == 1 else "require"
    return f"{counted(len(found), 'parameter')} ({shown}) {require} a gradient only since the optimizer was made"


# -- in a checkpoint ---------------------------------------------------------------------------------------------------


def has_groups(folder: Path) -> bool:
    """Returns whether a checkpoint lists parameter groups."""
    return (folder / GROUPS_NAME).is_file()


def save_groups(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Writes the names of the parameters in each group; nothing if the optimizer holds other tensors."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    if all(name is not None for group in groups for name in group):
        (folder / GROUPS_NAME).write_text(json.dumps({"groups": groups}), encoding="utf-8")


def restore_groups(model: nn.Module, optimizer: Any, scheduler: Any, folder: Path) -> None:
    """Adds the parameter groups that a checkpoint lists and the optimizer lacks; their parameters require gradients.

    Raises CheckpointError if the model lacks a parameter.
    """
    if not has_groups(folder):
        return
    found = read_json(folder / GROUPS_NAME, max_bytes=MAX_BYTES)
    groups: Any = found.get("groups") if isinstance(found, dict) else None
    is_read = isinstance(groups, list) and all(isinstance(group, list) for group in groups)
    if not is_read or not all(isinstance(name, str) for group in groups for name in group):
        raise CheckpointError(f"{folder / GROUPS_NAME} cannot be read as lists of names.")
    named = dict(model.named_parameters())
    for names in groups[len(optimizer.param_groups) :]:
        if missing := [name for name in names if name not in named]:
            raise CheckpointError(
                f"{folder} was written after {', '.join(missing[:SHOWN])} had been added to the model in training, and "
                "this model lacks them. Add them before train() to resume."
            )
        parameters = [named[name].requires_grad_(True) for name in names]
        optimizer.add_param_group({"params": parameters})
    schedules.follow_groups(optimizer, scheduler)
