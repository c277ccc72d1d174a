"""AcceleratorConfig: the settings of accelerate that users may choose through the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from os import PathLike

from trainwright._types import JSONObject
from trainwright.errors import ArgumentError
from trainwright.support.counterparts import Counterpart
from trainwright.support.door import parse_json, read_settings

ACCUMULATION_KEYS = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")


@dataclass
class AcceleratorConfig(Counterpart, original="transformers.trainer_pt_utils"):
    """Settings handed to accelerate. The names are accelerate's.

    split_batches: the batch size given is the whole one, cut into equal parts for the processes.
    dispatch_batches: the main process reads the training data and sends the others their parts; a last batch that
        cannot be shared out evenly is filled up with samples of the first one. Otherwise each process reads for itself.
    even_batches: a tail that does not fill a batch of every process is split evenly among them; False: the first
        processes get full batches of it. Each sample counts once and all take the same number of steps either way.
    use_seedable_sampler: the order of samples follows from the seed alone.
    non_blocking: copy batches to the device without waiting (wants dataloader_pin_memory).
    gradient_accumulation_kwargs: settings of accelerate's GradientAccumulationPlugin. `num_steps` is another name of
        `gradient_accumulation_steps`: where both are given, they must be equal. `sync_each_batch` averages gradients
        in each micro-batch. `adjust_scheduler` and `sync_with_dataloader` have no effect, as in the original.
    use_configured_state: use the Accelerator or PartialState that was made before the arguments.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: JSONObject | None = None
    use_configured_state: bool = False

    def __post_init__(self) -> None:
        """Checks the names of accumulation settings, which accelerate would refuse only when the trainer is made."""
        accumulation = self.gradient_accumulation_kwargs or {}
        _refuse_unknown(accumulation, ACCUMULATION_KEYS, origin="gradient_accumulation_kwargs")

    @classmethod
    def from_dict(cls, given: JSONObject, origin: str = "accelerator_config") -> AcceleratorConfig:
        """Makes a configuration.

        Args:
            given: values by name of field.
            origin: source of the values, for the error.

        Raises:
            ArgumentError: a name is unknown.
        """
        _refuse_unknown(given, [field.name for field in fields(cls)], origin=origin)
        return cls(**given)

    @classmethod
    def from_json_file(cls, json_file: str | PathLike[str]) -> AcceleratorConfig:
        """Reads a configuration.

        Args:
            json_file: path of a file with a JSON object.

        Raises:
            OSError: it cannot be read.
            ArgumentError: a name is unknown.
        """
        given = parse_json(read_settings(json_file))
        return cls.from_dict(given, origin=str(json_file))

    @classmethod
    def of(cls, value: object) -> AcceleratorConfig:
        """From anything that `accelerator_config` takes: None, a dict, a path, or an object with these fields."""
        if isinstance(value, cls):
            return value
        if value is None:
            return cls()
        if isinstance(value, dict):
            return cls.from_dict(value)
        if is_dataclass(value) and not isinstance(value, type):
            # vars(), not asdict(): the original's class removes attributes from its own instances
            return cls.from_dict({k: v for k, v in vars(value).items() if k in cls.__dataclass_fields__})
        if isinstance(value, (str, PathLike)):
            return cls.from_json_file(value)
        raise ArgumentError(
            f"accelerator_config={value!r} is not one of: a dict, a JSON string, the path of a JSON file, an "
            "AcceleratorConfig instance (for a class, call it first)."
        )

    def to_dict(self) -> JSONObject:
        """Returns the values by name of field."""
        return asdict(self)


def _refuse_unknown(given: JSONObject, known: Sequence[str], *, origin: str) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise ArgumentError(f"{origin} has unknown keys {unknown}. Known: {', '.join(known)}.")
