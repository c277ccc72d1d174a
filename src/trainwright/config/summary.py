"""Arguments for people: as plain values, by group, differences from defaults or checkpoint, a run in a few lines."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import lru_cache
from pathlib import PurePath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from trainwright._types import JSONObject, counted
from trainwright.config import resolve
from trainwright.config.accelerator import AcceleratorConfig
from trainwright.config.coerce import coerce, verbosity
from trainwright.config.enums import word
from trainwright.config.fields import (
    ALIASES,
    GROUPS,
    SETTINGS,
    batching_fields,
    read_defaults,
    redeclared_fields,
    was_asked_for,
)
from trainwright.config.plans import StepPlan
from trainwright.config.protocol import Arguments
from trainwright.config.setting import HERE, PER_START
from trainwright.distributed.world import runs_in_kubeflow
from trainwright.support.html_table import html_section, html_table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VERBS = (("logs", "logging"), ("evaluates", "eval"), ("saves", "save"))
SIMPLE = (str, int, float, bool, type(None))
COMPARED = (*SIMPLE, list, dict, AcceleratorConfig)


def plain(value: Any) -> Any:  # Any: a tree of whatever arguments hold
    """Returns `value` as strings, numbers, lists and dicts; anything that cannot be converted is unchanged."""
    if type(value) in SIMPLE:  # nearly all of them
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, type):
        return value
    for method in ("to_dict", "to_json"):
        if callable(convert := getattr(value, method, None)):
            return plain(convert())
    return str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value


def as_plain(args: DataclassInstance) -> JSONObject:
    """Returns all arguments as plain values, with marks in the place of tokens."""
    values = {name: getattr(args, name) for name in _names(type(args))}
    for name, value in values.items():
        if name.endswith("_token") or type(value) not in SIMPLE:
            values[name] = stand_in(name, plain(value))
    return values


@lru_cache(maxsize=8)
def _names(kind: type[DataclassInstance]) -> tuple[str, ...]:
    """Returns the names of the arguments of a class."""
    return tuple(field.name for field in fields(kind) if field.init)


def stand_in(name: str, value: Any) -> Any:
    """`value`, or for a token the mark that is written in its place."""
    return f"<{name.upper()}>" if name.endswith("_token") else value


def grouped(kind: type) -> dict[str, list[Field[Any]]]:
    """The fields of a dataclass by the title of the group that brought them; a subclass' own under its name."""
    by_name = {field.name: field for field in fields(kind) if field.init}
    groups: dict[str, list[Field[Any]]] = {}
    for owner in reversed(kind.__mro__):
        for name in inspect.get_annotations(owner):
            if name in by_name:
                groups.setdefault(vars(owner).get("group", owner.__name__), []).append(by_name.pop(name))
    return groups


def differing(args: DataclassInstance) -> JSONObject:
    """Returns the arguments that differ from their defaults, as plain values, with marks in the place of tokens.

    Serves transformers' arguments too. An alias that repeats its new name is omitted.
    """
    result = {}
    for field, default in _settled_defaults(type(args), verbosity(), runs_in_kubeflow()):
        value = getattr(args, field.name)
        if value is default or (
            type(value) is type(default) and type(value) in COMPARED and value == default
        ):  # nearly all of them
            continue
        repeats = field.name in ALIASES and value == getattr(args, ALIASES[field.name])
        same = default is not MISSING and _comparable(value) == _comparable(default)
        if field.init and not repeats and not same:
            result[field.name] = stand_in(field.name, plain(value))
    return result


def describe(args: DataclassInstance, *, plan: Sequence[str] = ()) -> str:
    """Returns all arguments as text: the plan, the values that differ from the defaults, then all, by group."""
    lines = [f"{type(args).__name__}(", *(f"  # {line}" for line in plan), "", "  # differs from the defaults"]
    lines += [f"  {name}={value!r}," for name, value in differing(args).items()] or ["  # (nothing)"]
    for title, values in values_by_group(args).items():
        lines += ["", f"  # {title}", *(f"  {name}={value!r}," for name, value in values.items())]
    return "\n".join([*lines, ")"])


def describe_html(args: DataclassInstance, *, plan: Sequence[str] = ()) -> str:
    """Returns the same as HTML: values that differ from the defaults, then all, folded by group."""
    rows = [(name, repr(value)) for name, value in differing(args).items()]
    groups = [
        html_section(title, html_table((name, repr(value)) for name, value in values.items()), is_folded=True)
        for title, values in values_by_group(args).items()
    ]
    return html_section(
        type(args).__name__,
        html_table(line.split(maxsplit=1) for line in plan),
        html_section("differs from the defaults", html_table(rows) or " (nothing)"),
        html_section("all arguments", *groups, is_folded=True),
    )


def values_by_group(args: DataclassInstance) -> dict[str, JSONObject]:
    """Returns the plain values of all fields by the title of their group, with marks in the place of tokens."""
    values = {field.name: getattr(args, field.name) for field in fields(args)}
    return {
        title: {
            field.name: None if (value := values[field.name]) is None else stand_in(field.name, plain(value))
            for field in members
        }
        for title, members in grouped(type(args)).items()
    }


def _all_defaults(kind: type) -> JSONObject:
    """Returns the defaults of all fields, including fields that a class of transformers lacks."""
    defaults: JSONObject = {}
    for group in GROUPS:
        defaults |= read_defaults(group)
    return {**defaults, **read_defaults(kind)}


@lru_cache(maxsize=8)
def _settled_defaults(kind: type, level: int, in_kubeflow: bool) -> list[tuple[Field[Any], Any]]:
    """Fields with defaults in the form that construction brings them to there (None -> "trainer_output", ...)."""
    own = {name: one for name, one in read_defaults(kind).items() if name in redeclared_fields(kind)}
    settled = {**_coerced(_all_defaults(kind), kind), **own}
    return [(field, settled.get(field.name, MISSING)) for field in fields(kind)]


def _coerced(values: JSONObject, kind: type) -> JSONObject:
    """Returns the values of fields in the form of construction; without fields that a subclass declares itself."""
    own = redeclared_fields(kind)
    namespace = SimpleNamespace(**{name: value for name, value in values.items() if name not in own})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        coerce(cast(Arguments, namespace))
    return vars(namespace)


def _derived(args: DataclassInstance) -> set[str]:
    """Returns the fields that were not chosen: construction derives their values from the chosen fields."""
    chosen = {field.name: getattr(args, field.name) for field in fields(args) if was_asked_for(args, field.name)}
    derived = _coerced({**_all_defaults(type(args)), **chosen}, type(args))
    own = redeclared_fields(type(args))
    others = [field.name for field in fields(args) if field.name not in chosen and field.name not in own]
    return {name for name in others if _comparable(getattr(args, name)) == _comparable(derived.get(name))}


def _comparable(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, dict) and "even_batches" in value:  # the original's drops this key from its own instances
        return {key: inner for key, inner in value.items() if key != "use_configured_state"}
    return value


def run_summary(
    args: Arguments,
    plan: StepPlan,
    state: Any,
    *,
    device: Any,
    num_replicas: int,
    batch_size: int | None = None,
    optimizer: str = "",
    schedule: str = "",
    idle: Collection[str] = (),
) -> list[str]:
    """Returns a line each for batch, length, optimizer and schedule, and a line for other non-default settings.

    `batch_size` is the number of samples in a micro-batch of a device; None if the arguments give it. `optimizer` and
    `schedule` describe those that the arguments do not name. `idle` are settings without effect, of which a warning was
    shown.
    """
    size = _batch(args)
    num_samples = plan.total_batch_size
    if batch_size is not None:
        size = str(batch_size)
        num_samples = batch_size * plan.micro_batches * num_replicas * max(args.n_gpu, 1)
    total = f"{', about' if batching_fields(args) else ' ='} {counted(num_samples, 'sample')} a step"
    batch = f"{size} per device x {plan.micro_batches} accumulated x {_replicas(args, num_replicas)}{total}"
    warmup = counted(args.get_warmup_steps(plan.max_steps), "warm-up step")
    updates = f"{optimizer or _optimizer(args)}, {schedule or _lr_schedule(args, warmup)}, on {device}"
    lines = _lines(args, batch=batch, length=_length(args, plan), updates=updates, steps=state)
    summarized = {name for name, one in SETTINGS.items() if one.summarized} | set(idle)
    summarized |= _derived(cast("DataclassInstance", args))
    kind: type = type(args)
    taken = redeclared_fields(kind)
    # TRL's "auto" may have become None, which has no effect.
    summarized |= {name for name in taken if getattr(args, name) is None}
    others = [f"{name}={value!r}" for name, value in differing(args).items() if name not in summarized]
    if others:
        lines.append(f"settings  {', '.join(others)}")
    if used := [name for name in taken if getattr(args, name) not in (None, False)]:
        lines.append(f"own       {', '.join(used)}: as {kind.__name__} declares it, not as Trainwright does")
    return lines


def _optimizer(args: Arguments) -> str:
    return f"{word(args.optim)}, learning rate {args.learning_rate:g}"


def _lr_schedule(args: Arguments, warmup: str) -> str:
    return f"{word(args.lr_scheduler_type)} after {warmup}"


def own_optimizer(optimizer: Any, *, has_own_schedule: bool) -> str:
    """Returns the optimizer of a user in words: its class, and the rates from which the schedule starts, if known."""
    groups = getattr(optimizer, "param_groups", ())
    found = [group.get("initial_lr", None if has_own_schedule else group.get("lr")) for group in groups]
    rates = sorted({float(rate) for rate in found if rate is not None})
    name = type(optimizer).__name__
    if not rates:
        return name
    if len(rates) == 1:
        return f"{name}, learning rate {rates[0]:g}"
    return f"{name}, learning rates {rates[0]:g} to {rates[-1]:g}"


def _lines(args: Arguments, *, batch: str, length: str, updates: str, steps: Any) -> list[str]:
    precision = "full precision" if args.mixed_precision == "no" else f"{args.mixed_precision} autocast"
    return [
        f"batch     {batch}",
        f"length    {length}",
        f"optimizer {updates} in {precision}",
        f"schedule  {', '.join(f'{verb} {_schedule(args, steps, name)}' for verb, name in VERBS)}",
    ]


def _replicas(args: Arguments, number: int) -> str:
    if args.n_gpu > 1:
        return f"{args.n_gpu} devices of one process"
    if number == args.world_size:
        return counted(number, "process")
    return f"{number} {'group' if number == 1 else 'groups'} of {counted(args.world_size // number, 'process')}"


def arguments_summary(args: Arguments) -> list[str]:
    """The same lines as far as arguments alone tell: the number of samples is not known to them."""
    micro_batches = resolve.micro_batches(args)
    total = f" = {counted(args.per_device_train_batch_size * micro_batches * args.world_size, 'sample')} a step"
    processes = counted(args.world_size, "process")
    batch = (
        f"{_batch(args)} per device x {micro_batches} accumulated x {processes}{'' if batching_fields(args) else total}"
    )
    warmup = counted(args.warmup_steps, "warm-up step")
    if 0 < args.warmup_steps < 1:
        warmup = f"a warm-up of {args.warmup_steps:g} of all steps"
    length = counted(args.max_steps, "step") if args.max_steps > 0 else counted(args.num_train_epochs, "epoch")
    updates = f"{_optimizer(args)}, {_lr_schedule(args, warmup)},"
    return _lines(args, batch=batch, length=length, updates=updates, steps=args)


def _batch(args: Arguments) -> str:
    batching = resolve.plan_batches(args)
    return str(args.per_device_train_batch_size) if batching is None else batching.text


def _length(args: Arguments, plan: StepPlan) -> str:
    if plan.has_open_end:
        return f"until the data ends, {counted(args.num_train_epochs, 'pass')} over data of unknown length"
    if args.max_steps > 0:
        is_idle = args.num_train_epochs != 3.0 and was_asked_for(args, "num_train_epochs")
        idle = f", so num_train_epochs={args.num_train_epochs} has no effect" if is_idle else ""
        return f"{counted(plan.max_steps, 'step')}, by max_steps{idle}"
    each = f"{counted(plan.steps_per_epoch, 'step')} over {counted(plan.num_examples, 'sample')}"
    return f"{counted(plan.max_steps, 'step')}, {counted(args.num_train_epochs, 'epoch')} of {each}"


def _schedule(args: Arguments, steps_of: object, name: str) -> str:
    kind = word(getattr(args, f"{name}_strategy"))
    steps = getattr(steps_of, f"{name}_steps")
    if kind == "steps" and steps is not None and steps < 1:
        return f"every {steps:g} of all steps"
    return {"no": "never", "epoch": "every epoch", "best": "at each best evaluation"}.get(
        kind, "every step" if steps == 1 else f"every {steps} steps"
    )


# -- differences from the arguments of the checkpoint that a run resumes from ------------------------------------------

FUSED = ("_fused", "_torch")  # variants of one optimizer; their states are the same
FOLLOW_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """An argument with another value now than in the checkpoint."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} {self.before!r} -> {self.now!r}: {_effect(self.name)}"


def _effect(name: str) -> str | None:
    """Returns the meaning of a change of a field; a field of a subclass takes effect."""
    return SETTINGS[name].on_resume if name in SETTINGS else HERE


def diff_args(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[SettingDifference]:
    """The arguments that both have, with different values, in the order of the fields."""
    return [
        SettingDifference(name, before[name], value)
        for name, value in now.items()
        if name in before and _effect(name) is not PER_START and not _is_same(before[name], value)
    ]


def impossible_changes(found: list[SettingDifference], *, has_own_optimizer: bool) -> Iterator[str]:
    """Differences that no resume can carry out, in words."""
    for one in found:
        if one.name == "optim" and not has_own_optimizer and _family(one.before) != _family(one.now):
            yield (
                f"optim={one.now!r}, and the checkpoint holds the state of optim={one.before!r}, which means nothing "
                f"to another optimizer. Resume with optim={one.before!r}, or start a new run from the checkpoint's "
                "weights."
            )
        crosses = [value in FOLLOW_EVALUATIONS for value in (one.before, one.now)]
        if one.name == "lr_scheduler_type" and one.before != one.now and any(crosses):
            yield (
                f"lr_scheduler_type={one.now!r}, and the checkpoint was written under {one.before!r}: of these two one "
                f"counts evaluations, or both do in their own way. Resume with lr_scheduler_type={one.before!r}."
            )


def _family(optimizer: object) -> str:
    name = str(optimizer)
    for suffix in FUSED:
        name = name.removesuffix(suffix)
    return name


def _is_same(before: object, now: object) -> bool:
    """Compares numbers, texts, lists and dicts; JSON has no tuples and does not distinguish int from float."""
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)):
        return len(before) == len(now) and all(map(_is_same, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_is_same(before[key], now[key]) for key in before)
    if isinstance(before, bool) or isinstance(now, bool):
        return before is now
    return bool(before == now)
