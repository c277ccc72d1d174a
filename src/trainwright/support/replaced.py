"""What somebody put in the place of a function or a class of the trainer's module: read when it is used.

Libraries patch the module (`transformers.trainer.get_scheduler = mine`), and the original's trainer reads each name of
its module anew. Ours has these names in many modules; `current` asks here for each of `USED`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from trainwright.errors import TrainwrightWarning, warn_caller

T = TypeVar("T")

# Names of the module that a run of ours uses for the same as the original's.
USED = frozenset(
    {
        "BatchRebalanceSampler",
        "CallbackHandler",
        "DEFAULT_CALLBACKS",
        "DEFAULT_PROGRESS_CALLBACK",
        "DataCollatorWithPadding",
        "EvalLoopOutput",
        "EvalPrediction",
        "LabelSmoother",
        "LengthGroupedSampler",
        "PredictionOutput",
        "PrinterCallback",
        "RandomSampler",
        "RemoveColumnsCollator",
        "SequentialSampler",
        "TrainOutput",
        "TrainerControl",
        "TrainerMemoryTracker",
        "TrainerState",
        "_parse_optim_args",
        "align_special_tokens",
        "apply_liger_kernel",
        "can_return_loss",
        "default_compute_objective",
        "default_data_collator",
        "denumpify_detensorize",
        "enable_full_determinism",
        "find_labels",
        "get_last_checkpoint",
        "get_parameter_names",
        "get_reporting_integration_callbacks",
        "get_scheduler",
        "is_optimizer_factory",
        "nested_detach",
        "rotate_checkpoints",
        "set_seed",
        "speed_metrics",
    }
)
# Classes that the trainer's module defines for others, or imports for the types alone.
_NOT_CALLED = ("PreTrainedModel", "Trainer", "TrainerCallback", "TrainingArguments")

_replaced: dict[str, Any] = {}
_before: dict[tuple[str, str], Any] = {}  # (module, name) -> value before the first replacement
_ABSENT: Any = object()


def current(name: str, ours: T) -> T:
    """Returns what stands under a name of the trainer's module now: `ours` unless somebody replaced it.

    Args:
        name: one of `USED`.
        ours: value of the name in this package, or None to ask only for a replacement.
    """
    return _replaced.get(name, ours) if _replaced else ours


class ReplaceableModule(ModuleType):
    """Class of a trainer's module: remembers the names that are assigned, and warns of those that are not used."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            return super().__setattr__(name, value)
        before = _before.setdefault((self.__name__, name), getattr(self, name, _ABSENT))
        super().__setattr__(name, value)
        if value is before:
            _replaced.pop(name, None)
            return None
        _replaced[name] = value
        is_called = isinstance(before, (type, FunctionType)) and name not in _NOT_CALLED
        if is_called and name not in USED:
            warn_caller(
                f"{self.__name__}.{name} was replaced, but Trainwright's trainer does this in another way and does not "
                "call it. Override a method of the trainer instead, or pass your own object to it.",
                TrainwrightWarning,
            )
        return None

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _replaced.pop(name, None)


def watch(module: ModuleType) -> Callable[[], None]:
    """Uses what is assigned to a module from now on, and returns a function that ends that."""
    kind = type(module)
    module.__class__ = ReplaceableModule

    def end() -> None:
        module.__class__ = kind
        for place, name in [key for key in _before if key[0] == module.__name__]:
            del _before[place, name]
            _replaced.pop(name, None)

    return end
