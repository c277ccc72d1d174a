"""Every older name of an argument: what it means today, or why it is refused and what does the job instead.

`OLD_NAMES` is the whole truth; the functions below only read it. Names that are fields again (`logging_dir`, ...) are
listed as honoured and pass through untouched.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainwright.config.enums import OptimizerNames
from trainwright.errors import LegacyNameWarning, did_you_mean

Given = Mapping[str, Any]  # Any: the values of arguments, of all types


class OldName(Protocol):
    """What becomes of one older name."""

    @property
    def advice(self) -> str: ...

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        """Today's names and values. Raises ValueError with the reason where there is none."""
        ...


@dataclass(frozen=True)
class Renamed:
    new: str
    convert: Callable[[Any], Any] = lambda value: value
    note: str = ""

    @property
    def advice(self) -> str:
        return f"use {self.new}{self.note}"

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        return {} if value is None else {self.new: self.convert(value)}


@dataclass(frozen=True)
class Switch:
    """An older bool that is one value of a field today."""

    new: str
    value: str
    also: tuple[Any, ...] = ()  # other ways to say the same

    @property
    def advice(self) -> str:
        return f"use {self.new}={self.value!r}"

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        return {self.new: self.value} if value and given.get(self.new) not in self.also else {}


@dataclass(frozen=True)
class Entry:
    """An older argument that is one entry of a dict-valued field today."""

    new: str
    key: str
    unset: tuple[Any, ...] = (None,)

    @property
    def advice(self) -> str:
        return f"use {self.new}={{{self.key!r}: ...}}"

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        if value in self.unset:
            return {}
        rest = given.get(self.new) or {}
        if isinstance(rest, str) and rest.startswith("{"):
            rest = json.loads(rest)
        if not isinstance(rest, Mapping):
            raise ValueError(f"it cannot be added to {self.new}={rest!r}; write it there, under {self.key!r}")
        return {self.new: {**rest, self.key: value}}


@dataclass(frozen=True)
class Item:
    """An older bool that is one item of a list-valued field today."""

    new: str
    item: str

    @property
    def advice(self) -> str:
        return f"use {self.new}=[{self.item!r}]"

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        rest = given.get(self.new) or []
        items = rest.split() if isinstance(rest, str) else list(rest)
        return {self.new: [*items, self.item]} if value and self.item not in items else {}


@dataclass(frozen=True)
class Refused:
    """Has no meaning today. Values that asked for nothing are accepted."""

    harmless: tuple[Any, ...]
    reason: str
    instead: str

    @property
    def advice(self) -> str:
        return f"leave it out ({self.reason}; {self.instead})"

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        if value not in (None, *self.harmless):
            raise ValueError(f"{self.reason}. Instead: {self.instead}")
        return {}


@dataclass(frozen=True)
class Accepted:
    """Any value is right: what it asked for happens by itself."""

    reason: str

    @property
    def advice(self) -> str:
        return f"leave it out ({self.reason})"

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Honoured:
    """A field here, though no longer one of transformers."""

    advice: str = "it is a field here"

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Organization:
    """The owner's part of hub_model_id; the name comes from there or from output_dir."""

    advice: str = "use hub_model_id='owner/name'"

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        if value is None:
            return {}
        name = given.get("hub_model_id") or given.get("push_to_hub_model_id")
        name = name or Path(given.get("output_dir") or "trainer_output").name
        return {"hub_model_id": name if "/" in name else f"{value}/{name}"}


TAKING_IN = (Entry, Item, Organization)  # their meaning holds what was there before


def _share(ratio: float) -> float:
    """A ratio of all steps, as warmup_steps takes it: there, 1 would be one step."""
    if not 0 <= ratio <= 1:
        raise ValueError("it is a share of all steps and lies between 0 and 1; write a number of steps as warmup_steps")
    return min(ratio, math.nextafter(1.0, 0.0))


_APEX = "NVIDIA's Apex is not used; torch has mixed precision of its own"
_SHARDED = "FairScale is not used; torch shards models itself"
_NATIVE = ("auto", "cuda_amp", "cpu_amp", "amp")

OLD_NAMES: dict[str, OldName] = {
    "evaluation_strategy": Renamed("eval_strategy"),
    "per_gpu_train_batch_size": Renamed("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Renamed("per_device_eval_batch_size"),
    "warmup_ratio": Renamed("warmup_steps", _share, note=" with a share below 1"),
    "no_cuda": Renamed("use_cpu"),
    "include_tokens_per_second": Switch("include_num_input_tokens_seen", "all", also=(True, "non_padding")),
    "torchdynamo": Renamed("torch_compile_backend"),
    "push_to_hub_token": Renamed("hub_token"),
    "push_to_hub_model_id": Renamed("hub_model_id"),
    "push_to_hub_organization": Organization(),
    "adafactor": Switch("optim", "adafactor"),
    "group_by_length": Switch("train_sampling_strategy", "group_by_length"),
    "include_inputs_for_metrics": Item("include_for_metrics", "inputs"),
    "tpu_metrics_debug": Item("debug", "tpu_metrics_debug"),
    "dispatch_batches": Entry("accelerator_config", "dispatch_batches"),
    "split_batches": Entry("accelerator_config", "split_batches", unset=(None, False)),
    "fsdp_min_num_params": Entry("fsdp_config", "min_num_params", unset=(None, 0)),
    "fsdp_transformer_layer_cls_to_wrap": Entry("fsdp_config", "transformer_layer_cls_to_wrap"),
    "save_safetensors": Refused((True,), "weights are written as safetensors only", "load them with safetensors"),
    "jit_mode_eval": Refused((False,), "evaluation does not trace with TorchScript", "torch_compile=True"),
    "use_ipex": Refused((False,), "IPEX is not used; torch itself is fast on Intel's devices", "bf16=True"),
    "fp16_opt_level": Refused(("O1", ""), _APEX, "fp16=True or bf16=True"),
    "half_precision_backend": Refused(_NATIVE, _APEX, "fp16=True or bf16=True"),
    "fp16_backend": Refused(_NATIVE, _APEX, "fp16=True or bf16=True"),
    "sharded_ddp": Refused((False, "", []), _SHARDED, "fsdp=True"),
    "mp_parameters": Refused(("",), "SageMaker's model parallelism is not used", "fsdp=True or deepspeed"),
    "use_mps_device": Accepted("MPS is found by itself; use_cpu=True turns it off"),
    "use_legacy_prediction_loop": Accepted("one loop serves evaluation and prediction"),
    "overwrite_output_dir": Honoured(),
    "logging_dir": Honoured(),
    "past_index": Honoured(),
    "tpu_num_cores": Honoured(),
    "ray_scope": Honoured(),
}

# How a command line reads the older names; the others are text.
OLD_FLAGS = frozenset(
    """
    no_cuda include_tokens_per_second adafactor group_by_length include_inputs_for_metrics tpu_metrics_debug
    dispatch_batches split_batches save_safetensors jit_mode_eval use_ipex use_mps_device use_legacy_prediction_loop
    """.split()  # noqa: SIM905
)
OLD_NUMBERS: dict[str, Callable[[str], float]] = {
    "per_gpu_train_batch_size": int,
    "per_gpu_eval_batch_size": int,
    "warmup_ratio": float,
    "fsdp_min_num_params": int,
}

OLD_VALUES = {("optim", "adamw_hf"): OptimizerNames.ADAMW_TORCH}
REFUSED_VALUES = {
    ("optim", "adamw_apex_fused"): f"{_APEX}, and a fused AdamW. Instead: optim='adamw_torch_fused'.",
}


@dataclass
class Translation:
    """Keyword arguments in today's names, and what could not be translated."""

    given: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    has_unknown: bool = False


def translate(given: Given, defaults: Given) -> Translation:
    """Replace older names in `given`; each warns once. `defaults`: all names that are fields, with their defaults.

    A field given at its default beside its older name does not contradict it: parsers and saved configurations list
    every field.
    """
    result = Translation({name: value for name, value in given.items() if name in defaults})
    for name in given:
        if name not in defaults and name not in OLD_NAMES:
            result.problems.append(unknown(name, [*defaults, *OLD_NAMES]))
            result.has_unknown = True
    for name, row in OLD_NAMES.items():
        if name in given and name not in defaults:
            problem = _translate_one(name, given, result.given, defaults)
            if problem is None:
                warnings.warn(f"{name} is an older name: {row.advice}.", LegacyNameWarning, stacklevel=3)
            else:
                result.problems.append(problem)
    return result


def _translate_one(name: str, original: Given, given: dict[str, Any], defaults: Given) -> str | None:
    """Write into `given` what one older name means; or say why that cannot be."""
    row, value = OLD_NAMES[name], original[name]
    try:
        meaning = row.meaning(value, {**original, **given})
    except ValueError as reason:
        return f"{name}={value!r} is refused: {reason}."
    for new, translated in meaning.items():
        default = defaults.get(new)
        present = given.get(new, default)
        if isinstance(row, TAKING_IN) or present in (default, translated):
            given[new] = translated
        elif translated != default:
            shown = "" if new.endswith("_token") else f" ({translated!r} and {present!r})"
            return f"{name} and {new} are given and differ{shown}. Keep {new}, its name today."
    return None


def unknown(name: str, known: Collection[str]) -> str:
    """The message for a name that is no argument, with the nearest one that is."""
    return f"{name} is not an argument.{did_you_mean(name, known)}"
