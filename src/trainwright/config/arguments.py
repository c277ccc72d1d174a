"""TrainingArguments: the settings of a run, with transformers' names. Their fields are in fields/, group by group.

Construction translates older names (deprecated.py), brings every value to one form (coerce.py) and
refuses contradictions (rules/). It imports neither torch nor transformers and works on any machine: settings that
depend on hardware, data or model are checked when training starts. Nothing in the library writes to arguments after
that.

Each dataclass, and each subclass, has a generated `__init__`, which does not exist yet while the class body runs. It is
therefore wrapped when the class makes its first instance (`TrainingArguments.__new__`). A hand-written `__init__` is
not wrapped; the arguments it passes to ours are translated there.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, cast

from trainwright.config import resolve, rules, summary
from trainwright.config.aliases import Translation
from trainwright.config.behaviour import get_behaviour
from trainwright.config.coerce import DICT_FIELDS, coerce, verbosity
from trainwright.config.fields import (
    ASKED_FOR,
    POSITIONS,
    SETTINGS,
    GenerationFields,
    OlderFields,
    OurFields,
    SharedFields,
    changed_fields,
    read_defaults,
    shadowed_fields,
)
from trainwright.config.protocol import Arguments
from trainwright.config.setters import Setters
from trainwright.distributed.process_group import start_alone, start_group
from trainwright.distributed.world import ParallelMode, World, barrier, configured_precision
from trainwright.errors import ArgumentError, UnknownArgumentError

if TYPE_CHECKING:
    from typing import Self

    import torch

LEVELS = {"detail": 10, "debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


PENDING = "_translation"  # attribute of an instance under construction: problems with its argument names


class FieldSignature:
    """For `__signature__` of a class: the parameters of its `__init__`, which a `__new__` would hide from inspect."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        of_init = inspect.signature(owner.__init__)  # type: ignore[misc]  # of the class itself, not of a subclass
        return of_init.replace(parameters=list(of_init.parameters.values())[1:])


def accept_old_names(kind: type) -> None:
    """Wrap the generated `__init__` of `kind`, once. Does nothing to one written by hand, or inherited."""
    init = vars(kind).get("__init__")
    if init is None or hasattr(init, "accepts_old_names") or "__dataclass_fields__" not in vars(kind):
        return
    if set(inspect.signature(init).parameters) - {"self"} == {field.name for field in fields(kind) if field.init}:
        kind.__init__ = _accepting(kind, init)  # type: ignore[misc]  # replacing it is the purpose


def _accepting(kind: type, init: Callable[..., None]) -> Callable[..., None]:
    names = [field.name for field in fields(kind) if field.init]
    by_name_only = {*OlderFields.settings, *OurFields.settings}
    positions = [*POSITIONS, *(name for name in names if name not in POSITIONS and name not in by_name_only)]

    @functools.wraps(init)
    def accept(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(positions):
            raise TypeError(f"{kind.__name__} takes {len(positions)} arguments by position, {len(args)} were given")
        if twice := sorted(set(positions[: len(args)]) & set(kwargs)):
            raise TypeError(f"{kind.__name__} got {', '.join(twice)} by position and by name")
        known = dict.fromkeys(names) | read_defaults(kind)
        given = {**dict(zip(positions, args, strict=False)), **kwargs}
        translation = Translation(given)
        if not given.keys() <= known.keys():
            from trainwright.config.deprecated import translate

            translation = translate(given, known)
        vars(self)[PENDING] = translation
        try:
            init(self, **translation.given)
            finish(self, [])  # for a subclass whose __post_init__ does not call ours
        finally:
            vars(self).pop(PENDING, None)

    accept.accepts_old_names = True  # type: ignore[attr-defined]
    return accept


def finish(instance: Any, problems: Sequence[str]) -> None:
    """Raise one error for the problems with the names of the call and for `problems`."""
    translation = vars(instance).pop(PENDING, None) or Translation({})
    kind = UnknownArgumentError if translation.has_unknown else ArgumentError
    rules.refuse([*translation.problems, *problems], kind=kind)


def as_arguments(args: Any) -> Arguments:
    """Returns arguments with the types that fields have after construction."""
    return cast(Arguments, args)


def start_zero3(args: TrainingArguments) -> Any:  # transformers' HfDeepSpeedConfig
    """Has transformers make models in parts if the arguments ask for ZeRO-3: parts need a process group."""
    config = resolve.zero3_config(as_arguments(args))
    if config is None:
        return None
    from trainwright.config import zero3_init

    world = args._start_process_group(even_alone=True)
    return zero3_init.mark(config, on_cpu=world.device.type == "cpu")


class Assignable(property):
    """A computed attribute that can be assigned, as a plain attribute of the original can."""

    name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_assigned_{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None and self.name in vars(instance):
            return vars(instance)[self.name]
        return super().__get__(instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = value


@dataclass(repr=False)
class TrainingArguments(Setters, OurFields, OlderFields, SharedFields):
    """All settings of a training run. `output_dir` comes first; give the others by name."""

    __signature__ = FieldSignature()
    takes_old_names: ClassVar[bool] = True  # for parsers
    default_optim: ClassVar[str] = "adamw_torch_fused"
    _VALID_DICT_FIELDS: ClassVar[list[str]] = list(DICT_FIELDS)  # subclasses of other libraries extend it

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # Any: as __init__, which is generated
        for kind in cls.__mro__:
            if issubclass(kind, TrainingArguments):
                accept_old_names(kind)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        vars(self)[ASKED_FOR] = changed_fields(self)
        problems = coerce(as_arguments(self))
        finish(self, problems + rules.violations(as_arguments(self)))
        if "mixed_precision" in self.__dataclass_fields__:  # a field of a subclass, which the original sets here, too
            compute = vars(TrainingArguments)["mixed_precision"].fget
            self.mixed_precision = compute(self)
        vars(self)["_zero_init"] = start_zero3(self)

    if not TYPE_CHECKING:  # a checker would take any name to be an attribute

        def __getattr__(self, name: str) -> Any:  # called for missing attributes, such as older names
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            from trainwright.config import deprecated

            return deprecated.read_older_name(self, name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self.__dataclass_fields__ and not name.startswith("_"):
                from trainwright.config import deprecated

                if name in deprecated.OLD_NAMES:
                    return deprecated.assign_older_name(self, name, value)
            if PENDING in vars(self) and name in shadowed_fields(type(self)) and value == SETTINGS[name].default:
                return  # a property or a value of the subclass, which the generated constructor would replace
            object.__setattr__(self, name, value)

    # -- device and processes --------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """This process among its peers."""
        return resolve.read_world(as_arguments(self))

    def _start_process_group(self, *, even_alone: bool = False) -> World:
        """Starts the run's process group, if there is none (`even_alone`: also for one process), and only here."""
        world = resolve.read_world(as_arguments(self))
        if world.world_size > 1:
            start_group(world, backend=self.ddp_backend, timeout=self.ddp_timeout_delta)
        elif even_alone:
            start_alone(world.device.type, backend=self.ddp_backend, timeout=self.ddp_timeout_delta)
        return world

    @Assignable
    def distributed_state(self) -> Any:  # accelerate's PartialState: its type would load accelerate
        """accelerate's record of this process among its peers, made when it is first asked for."""
        from accelerate import PartialState

        self._start_process_group()
        return PartialState(cpu=self.use_cpu)

    @Assignable
    def fsdp_plugin_args(self) -> dict[str, Any] | None:
        """Settings of FSDP as the original's trainer hands them to accelerate; None without FSDP."""
        if not self.fsdp:
            return None
        from trainwright.config.fsdp_config import plugin_arguments

        config: Any = self.fsdp_config or {}
        return plugin_arguments(config)

    @Assignable
    def hf_deepspeed_config(self) -> Any:  # transformers' HfDeepSpeedConfig
        """Under ZeRO-3, the object that makes transformers partition new models while these arguments exist."""
        return vars(self).get("_zero_init")

    @Assignable
    def deepspeed_plugin(self) -> Any:  # accelerate's DeepSpeedPlugin
        """accelerate's settings of DeepSpeed; None without it."""
        return None

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return resolve.read_world(as_arguments(self)).device

    @property
    def n_gpu(self) -> int:
        """Devices that this process drives: above one only without a distributed launcher; 0 on the CPU."""
        return int(
            vars(self).get("_n_gpu", resolve.read_world(as_arguments(self)).n_gpu)
        )  # scripts set it to use one GPU of several

    @property
    def parallel_mode(self) -> ParallelMode:
        return resolve.read_world(as_arguments(self)).mode_with(self.n_gpu)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return resolve.read_world(as_arguments(self)).world_size

    @property
    def process_index(self) -> int:
        """Number of this process among all, from 0."""
        return resolve.read_world(as_arguments(self)).process_index

    @property
    def local_process_index(self) -> int:
        """Number of this process on its node, from 0."""
        return resolve.read_world(as_arguments(self)).local_process_index

    @property
    def train_batch_size(self) -> int:
        """Samples per process and forward pass in training."""
        return self.per_device_train_batch_size * max(1, self.n_gpu)

    @property
    def eval_batch_size(self) -> int:
        """Samples per process and forward pass in evaluation."""
        return self.per_device_eval_batch_size * max(1, self.n_gpu)

    @property
    def should_log(self) -> bool:
        """Returns True if this process shows messages at `log_level`."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Returns True if this process writes checkpoints."""
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    @property
    def place_model_on_device(self) -> bool | None:
        """For subclasses: whether the trainer moves the model to the device (None: it decides)."""
        return None

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Runs the block in the main process while the others wait; then in the others.

        Args:
            local: the main process of each node, not of all nodes.
            desc: not used.

        Yields:
            Nothing.
        """
        world = self._start_process_group()
        is_main = (world.local_process_index if local else world.process_index) == 0
        try:
            if not is_main:
                barrier()
            yield
        finally:
            if is_main:
                barrier()

    # -- derived from the fields -----------------------------------------------------------------------------------

    @Assignable
    def mixed_precision(self) -> str:
        """Precision of autocast: "fp16", "bf16", or the setting of `accelerate launch` ("no" without it)."""
        if self.fp16 and not get_behaviour(self).autocasts_fp16_on_cpu and self.device.type == "cpu":
            return "no"
        if self.fp16:
            return "fp16"
        return "bf16" if self.bf16 else configured_precision()

    @property
    def ddp_timeout_delta(self) -> timedelta:
        return timedelta(seconds=self.ddp_timeout)

    def get_process_log_level(self) -> int:
        """Returns the level of Python's logging for this process; "passive" leaves it as it is."""
        level = self.log_level if self.should_log else self.log_level_replica
        return verbosity() if level == "passive" else LEVELS[level]

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Returns the number of warm-up steps.

        Args:
            num_training_steps: optimizer steps of the run, of which `warmup_steps` below 1 is a share.
        """
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    # -- written out -----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as plain values, with marks in the place of tokens."""
        return summary.as_plain(self)

    def to_json_string(self) -> str:
        """Returns `to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Returns all fields as numbers, bools and strings, with the batch sizes per process, for trackers."""
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {name: value if type(value) in (bool, int, float, str) else str(value) for name, value in values.items()}

    def __str__(self) -> str:
        return summary.describe(self, plan=summary.arguments_summary(as_arguments(self)))

    def _repr_html_(self) -> str:
        return summary.describe_html(self, plan=summary.arguments_summary(as_arguments(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in summary.differing(self).items())})"


@dataclass(kw_only=True, repr=False)
class Seq2SeqTrainingArguments(GenerationFields, TrainingArguments):
    """TrainingArguments for Seq2SeqTrainer."""
