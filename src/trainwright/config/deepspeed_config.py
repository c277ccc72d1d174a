"""DeepSpeed's configuration, with "auto" values from the arguments; those in `LATE` are filled in by the engine."""

from __future__ import annotations

import base64
import binascii
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainwright._types import JSONObject
from trainwright.errors import ArgumentError
from trainwright.support.door import MAX_SETTINGS, parse_json, read_json

AUTO = "auto"
SEQUENCE_SIZE = "sequence_parallel_size"  # DeepSpeed's name of `sp_size`
# Place in the configuration -> argument that says the same.
FIELDS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "per_device_train_batch_size x gradient_accumulation_steps x processes with their own batches",
    SEQUENCE_SIZE: "parallelism_config.sp_size",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1, adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
MADE_IF_MISSING = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
    "gradient_clipping",
)
LATE = (
    "scheduler.params.total_num_steps",
    "scheduler.params.warmup_num_steps",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)
OF_SEQUENCES = ("train_batch_size", "data_parallel_size", SEQUENCE_SIZE)  # sizes that follow from one another
PLAIN = {"scheduler.params.warmup_min_lr": 0, "fp16.auto_cast": False}  # values of "auto"


def read(config: Mapping[str, Any] | str) -> JSONObject:
    """A configuration from a dict, a file, or the base64 text that some launchers make of one; or ArgumentError."""
    if not isinstance(config, str):
        return copy.deepcopy(dict(config))
    try:
        if Path(config).is_file():
            return dict(read_json(config, max_bytes=MAX_SETTINGS))
        return dict(parse_json(base64.urlsafe_b64decode(config)))
    except (ValueError, binascii.Error, OSError) as error:
        raise ArgumentError(
            f"deepspeed={config!r} is not a file with a JSON object ({error}). Give the path of one, or a dict."
        ) from error


def sequence_size(config: Mapping[str, Any] | str) -> int:
    """Returns how many processes share a sequence (DeepSpeed's ALST); 1 if the configuration leaves it to others.

    Raises:
        ArgumentError: it is no whole number from 1 up.
    """
    size = read(config).get(SEQUENCE_SIZE, AUTO)
    if size == AUTO:
        return 1
    if not isinstance(size, (int, float)) or size < 1 or size != int(size):
        raise ArgumentError(
            f"{SEQUENCE_SIZE}={size!r} in the DeepSpeed configuration is not a whole number from 1 up, of processes "
            'that share a sequence. Write one there, or "auto" for that of parallelism_config.'
        )
    return int(size)


def settled(config: Mapping[str, Any] | str, values: Mapping[str, Any]) -> JSONObject:
    """Returns the configuration with "auto" values filled in from `values` (by place), except late ones."""
    made = read(config)
    problems = []
    for place, value in values.items():
        there = get(made, place)
        if there == AUTO or (there is None and place in MADE_IF_MISSING):
            put(made, place, value)
        elif there is not None and not _is_same(there, value):
            problems.append(f"{place}={there!r} in the configuration, and {FIELDS[place]} says {value!r}")
    if problems:
        raise ArgumentError(
            f"The DeepSpeed configuration contradicts the arguments: {'; '.join(problems)}. Change one of each pair, "
            'or write "auto" into the configuration.'
        )
    for place in [place for place in autos(made) if place in PLAIN]:
        put(made, place, PLAIN[place])
    if left := [place for place in autos(made) if place not in LATE]:
        raise ArgumentError(
            f'The DeepSpeed configuration has "auto" for entries that no argument sets: {", ".join(left)}. '
            "Write the values there."
        )
    return made


def filled_in(config: Mapping[str, Any], model: object, *, num_steps: int, num_warmup_steps: int) -> JSONObject:
    """Returns the configuration with the values that only the model and the length of the run decide.

    Raises:
        ArgumentError: a size follows from the model's `config.hidden_size`, which it does not have.
    """
    made = read(config)
    model_config = getattr(model, "config", None)
    sizes = getattr(model_config, "hidden_sizes", None) or [getattr(model_config, "hidden_size", None)]
    known: JSONObject = {
        "scheduler.params.total_num_steps": num_steps,
        "scheduler.params.warmup_num_steps": max(num_warmup_steps, 1),
    }
    if sizes[0] is not None:
        size = max(sizes)
        values = {
            "reduce_bucket_size": size * size,
            "stage3_prefetch_bucket_size": int(0.9 * size * size),
            "stage3_param_persistence_threshold": 10 * size,
        }
        known |= {f"zero_optimization.{name}": value for name, value in values.items()}
    for place in list(autos(made)):
        if place not in known:
            raise ArgumentError(
                f'The DeepSpeed configuration has "auto" at {place}, which follows from config.hidden_size, and '
                f"{type(model).__name__} has none. Write a number there."
            )
        put(made, place, known[place])
    return made


def autos(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Places that are still "auto"."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from autos(value, f"{prefix}{key}.")
        elif isinstance(value, str) and value == AUTO:
            yield prefix + key


def get(config: Mapping[str, Any], place: str) -> Any:
    """Returns the value at a dotted path; None if there is none."""
    value: Any = config
    for key in place.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def put(config: JSONObject, place: str, value: Any) -> None:
    """Sets a value at a place like "optimizer.params.lr"; sections that are missing are made."""
    *path, last = place.split(".")
    for key in path:
        config = config.setdefault(key, {})
    config[last] = value


def _is_same(one: Any, other: Any) -> bool:
    try:
        return one == other or bool(float(one) == float(other))  # also 1e-5 written as text
    except (TypeError, ValueError):
        return False
