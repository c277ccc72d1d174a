"""Arguments with some values exchanged, as a trial of a search trains with them. Those given stay as they are.

Which values are tried is not its business; what they must be is: the name of a field, of its type, and one that a run
may differ in from the next.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from trainwright._types import python_number
from trainwright.config import rules
from trainwright.config.construct import refuse
from trainwright.config.help import ALIASES
from trainwright.config.legacy import unknown
from trainwright.config.normalise import normalise
from trainwright.config.ranges import RANGES

# Settled when a trainer is made, or the same for all trials because they share it.
SETTLED = frozenset(
    """
    output_dir overwrite_output_dir logging_dir report_to run_name project disable_tqdm log_level log_level_replica
    push_to_hub hub_model_id hub_token hub_strategy resume_from_checkpoint use_cpu local_rank deepspeed fsdp fsdp_config
    ddp_backend ddp_timeout max_train_time save_every slurm_requeue save_failure skip_memory_metrics pad_to_multiple_of
    label_names place_model_on_device hang_timeout
    """.split()  # noqa: SIM905 -- a line for each name would hide the file
)


def varied(args: Any, values: Mapping[str, Any]) -> Any:
    """A copy of `args` with these values, brought to the one form that values have and held against the rules.

    Raises:
        ArgumentError: values that are out of range, or that contradict each other.
    """
    changed = copy.copy(args)
    for name, value in vars(args).items():
        if isinstance(value, (dict, list)):
            setattr(changed, name, copy.deepcopy(value))
    for name, value in values.items():
        setattr(changed, name, converted(args, name, value))
        if name in ALIASES:
            setattr(changed, ALIASES[name], getattr(changed, name))
    if hasattr(type(args), "takes_old_names"):  # arguments of transformers keep their own form
        refuse([*normalise(changed), *rules.violations(changed)])
    return changed


def problem_of_name(args: Any, name: str) -> str | None:
    """Why this cannot be varied; None if it can."""
    names = [field.name for field in dataclasses.fields(args) if field.init]
    if name not in names:
        return unknown(name, names)
    if name in SETTLED:
        return f"{name} is settled when the trainer is made, so trials cannot differ in it. Set it in the arguments."
    return None


def problem_of_value(args: Any, name: str, value: Any) -> str | None:
    """Why a field cannot hold this, as far as its type tells; None if it can."""
    try:
        converted(args, name, value)
    except ValueError as error:
        return str(error)
    return None


def converted(args: Any, name: str, value: Any) -> Any:
    """A value as its field holds it: numbers of libraries become Python's, whole fields get whole numbers.

    Raises:
        ValueError: it is of another kind.
    """
    value = python_number(value)
    kinds = _kinds(args, name)
    is_plain = kinds & {"bool", "int", "float", "str"}
    if value is None or isinstance(value, Enum) or not is_plain:
        return value
    if isinstance(value, bool):
        if "bool" in kinds:
            return value
    elif isinstance(value, (int, float)):
        if kinds & {"int", "float"}:
            return _number(name, value, is_whole="float" not in kinds or (name in RANGES and RANGES[name].whole))
        if "bool" in kinds and value in (0, 1):
            return bool(value)
    elif isinstance(value, str) == ("str" in kinds) or not kinds & {"bool", "int", "float"}:
        return value
    wanted = " or ".join(word for word in ("bool", "int", "float", "str") if word in kinds)
    raise ValueError(f"{name}={value!r} is of type {type(value).__name__}, and {name} takes {wanted}.")


def _number(name: str, value: float, *, is_whole: bool) -> float:
    """Whole for a whole field, a fraction too: spaces of Ray draw seeds from a range of numbers."""
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is not a finite number.")
    return int(value) if is_whole else float(value)


def _kinds(args: Any, name: str) -> set[str]:
    """The words of a field's type."""
    text = next((str(field.type) for field in dataclasses.fields(args) if field.name == name), "")
    return set(re.findall(r"\w+", text))
