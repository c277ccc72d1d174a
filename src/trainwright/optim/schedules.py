"""Learning-rate schedules, and rates and other settings of the optimizer after a resume.

The most frequent schedules equal transformers' bit for bit. They are implemented here because the module in
transformers imports PEFT and bitsandbytes with their dependencies: seconds and 60 MB before step 1 of a run that uses
none of them.

After a resume, changed settings take effect, and no rate jumps by itself.

**Another length.** A run of T0 steps is at step s0, and its new length is T1 steps. Its schedule is f0(s), a factor of
the base rate; the schedule of a fresh run of T1 steps is f1(s). Following f1 from s0 on would jump. So the run follows

    g(s) = f1(s) + (a - f1(s0)) * (T1 - s) / (T1 - s0)       if a is above f1(s0): the excess fades to 0, and the rate
                                                             never exceeds a, or f1 if that is higher
    g(s) = e + (f1(s) - e) * (a - e) / (f1(s0) - e)          if a is below f1(s0): f1, scaled so that it begins at a

with the current factor a = f0(s0) and the final factor e = f1(T1) (0 in the second line if a is below it). Both begin
at a and end at e. For a finished run (s0 >= T0), a is the factor of its last step, f0(T0 - 1): values of a schedule
beyond its end are not meant for training.

    linear, base 1e-3, T0 = 20, s0 = 20, T1 = 40: a = f0(19) = 1/20, f1(20) = 1/2, e = 0, so g(s) = f1(s) / 10:
    step 20 had 5e-5, step 21 has 5e-5, step 31 has 2.5e-5, step 41 would have 0. (f1 itself: step 21 at 5e-4.)

If the value of a schedule at s0 does not depend on the length (constant, inverse_sqrt, warm-up by steps), g is f1. The
schedule's state records the lengths of the run and the steps since which they apply, so a later resume follows g too.

**A cooldown** from step s0 to the end T1 takes the place of f1: g(s) = a * c((s - s0) / (T1 - s0)), with a as above and
c one of `COOLDOWNS`, which fall from 1 to 0. A cooldown of a constant rate equals `warmup_stable_decay` with as many
decay steps, to the bit. Sources: Hu et al. 2024 (MiniCPM); Hägele et al. 2024, who find 1-sqrt a little better than
linear.

**Another base rate** applies from here, at the position and with the shape of the schedule.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainwright.errors import ArgumentError, did_you_mean
from trainwright.support.replaced import current
from trainwright.support.signatures import read_parameters

if TYPE_CHECKING:
    from trainwright.config.protocol import Arguments

logger = logging.getLogger(__name__)

# Name -> factory: a function of transformers.optimization, or a class that takes the settings as parameters.
BUILDERS: dict[str, str] = {
    "linear": "get_linear_schedule_with_warmup",
    "cosine": "get_cosine_schedule_with_warmup",
    "cosine_with_restarts": "get_cosine_with_hard_restarts_schedule_with_warmup",
    "polynomial": "get_polynomial_decay_schedule_with_warmup",
    "constant": "get_constant_schedule",
    "constant_with_warmup": "get_constant_schedule_with_warmup",
    "inverse_sqrt": "get_inverse_sqrt_schedule",
    "reduce_lr_on_plateau": "get_reduce_on_plateau_schedule",
    "cosine_with_min_lr": "get_cosine_with_min_lr_schedule_with_warmup",
    "cosine_warmup_with_min_lr": "get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
    "warmup_stable_decay": "get_wsd_schedule",
    "greedy": "get_greedy_schedule",
}
FROM_THE_RUN = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "verbose")
# One of these must be there.
NEEDS = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
WITHOUT_OPTIONS = ("constant", "constant_with_warmup")  # transformers ignores them
REEXPORTED = ("Adafactor", "AdafactorSchedule", "GreedyLR", "get_scheduler", *BUILDERS.values())
Options = Mapping[str, object]
Factor = Callable[[int], float]
Build = Callable[[Optimizer, int], LRScheduler]
HORIZONS = "horizons"  # in the schedule's state: [[first step, length], ...], a cooldown as [first step, length, shape]
# Shape of a cooldown: share of it that is done -> factor of the rate at which it begins.
COOLDOWNS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "1-sqrt": lambda done: 1.0 - math.sqrt(done),
}

# Argument -> settings of a parameter group that it makes.
SETTINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("learning_rate", "lr_groups", "layerwise_lr_decay"), ("lr", "initial_lr")),
    "weight_decay": ("weight_decay",),
    "adam_beta1": ("betas", "beta1", "momentum"),
    "adam_beta2": ("betas", "beta2"),
    "adam_epsilon": ("eps",),
}
# Settings of a parameter group that an optimizer reads and never changes.
FIXED = (
    *("alpha", "amsgrad", "beta1", "betas", "dampening", "decoupled_weight_decay", "eps", "lr_decay", "maximize"),
    *("momentum", "nesterov", "rho", "weight_decay"),
)
CYCLED = ("beta1", "betas", "momentum")  # by a schedule, if its `cycle_momentum` is set
NOT_FROM_OPTIONS = ("params", "lr", "initial_lr", "weight_decay")
SHAPES = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
OF_RATES = {"learning_rate", "lr_groups", "layerwise_lr_decay", *SHAPES}
BASES = ("base_lrs", "_init_lrs")
BY_GROUP = ("lr_lambdas", "min_lrs", "max_lrs")  # further lists with an entry for each group
OF_PLATEAUS = (
    "mode",
    "factor",
    "patience",
    "threshold",
    "threshold_mode",
    "cooldown",
    "warmup",
    "min_lrs",
    "max_lrs",
    "eps",
    "window_size",
)


def make_schedule(
    name: str, optimizer: Optimizer, *, num_warmup_steps: int, num_training_steps: int, options: Options | None = None
) -> LRScheduler:
    """Makes the schedule that `lr_scheduler_type` names, with a warm-up from 0; `options` are `lr_scheduler_kwargs`."""
    name = str(getattr(name, "value", name))
    options = dict(options or {})
    steps = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    make: Any = current("get_scheduler", None)
    if name in FACTORS and not options and make is None:
        return lr_scheduler.LambdaLR(optimizer, partial(FACTORS[name], **steps))
    if make is None:
        from transformers.optimization import get_scheduler as make

    _check_options(name, options)
    made: LRScheduler = make(name, optimizer=optimizer, **steps, scheduler_specific_kwargs=options)
    return made


def schedule_for(args: Arguments, optimizer: Optimizer, num_training_steps: int) -> LRScheduler:
    """Makes the schedule of a run that many steps long."""
    bind_step(optimizer)
    return make_schedule(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.get_warmup_steps(num_training_steps),
        num_training_steps=num_training_steps,
        options=args.lr_scheduler_kwargs,
    )


def bind_step(optimizer: Optimizer) -> None:
    """Makes a method of whatever was assigned to `optimizer.step`, or to `step` of its class: schedules wrap methods.

    The wrapper of an earlier schedule is a function too, which the next schedule takes as it is.
    """
    step: Any = optimizer.step
    is_of_a_schedule = getattr(step, "__globals__", {}).get("__name__") == lr_scheduler.__name__
    if is_of_a_schedule or hasattr(step, "__func__"):
        return

    def bound(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    vars(optimizer)["step"] = MethodType(bound, optimizer)


def schedule_options(name: str) -> tuple[str, ...] | None:
    """Returns the names that `lr_scheduler_kwargs` may hold for a schedule; None if its function does not say."""
    import transformers.optimization

    classes = {"reduce_lr_on_plateau": ReduceLROnPlateau, "greedy": transformers.optimization.GreedyLR}
    made_by = classes.get(name) or getattr(transformers.optimization, BUILDERS[name])
    parameters = read_parameters(made_by)
    if parameters is None:
        return None
    return tuple(parameter for parameter in parameters if parameter not in FROM_THE_RUN)


def _check_options(name: str, options: Mapping[str, object]) -> None:
    known = schedule_options(name)
    if known is None:
        return
    for option in (option for option in options if option not in known):
        message = (
            f"lr_scheduler_kwargs names {option!r}, which lr_scheduler_type={name!r} does not take; it takes "
            f"{', '.join(known) or 'none'}.{did_you_mean(option, known, quoted=True)}"
        )
        if name not in WITHOUT_OPTIONS:
            raise ArgumentError(message)
        logger.warning("%s It has no effect.", message)
    needed = NEEDS.get(name, ())
    if needed and not any(options.get(option) is not None for option in needed):
        other = f" (or {needed[1]!r})" if needed[1:] else ""
        raise ArgumentError(f"lr_scheduler_type={name!r} needs lr_scheduler_kwargs={{{needed[0]!r}: ...}}{other}.")


def follows_metrics(scheduler: object) -> bool:
    """Returns True if a schedule is driven by evaluation results, `step(metric)`, and not by optimizer steps."""
    return isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"


def current_rate(scheduler: LRScheduler, optimizer: Optimizer) -> float:
    """Returns the learning rate of the first parameter group."""
    rate = optimizer.param_groups[0]["lr"] if follows_metrics(scheduler) else scheduler.get_last_lr()[0]
    return rate.item() if isinstance(rate, torch.Tensor) else rate


def set_rate(optimizer: Optimizer, scheduler: LRScheduler, rate: float) -> None:
    """Sets the learning rate of the first parameter group for the next step; the others keep their ratio to it.

    The schedule continues in proportion: its base rates change by the same factor. In a state of both the new rates are
    part of a checkpoint; `initial_lr`, by which a resume finds changed arguments, stays.

    Args:
        optimizer: of the run.
        scheduler: its schedule, which may follow a metric.
        rate: above 0. Where the rate is 0, as before the first step of a warm-up, it becomes the base rate.

    Raises:
        ArgumentError: a rate would leave the range of its type, so that the ratios were lost; nothing is changed.
    """
    scheduler = _plain(scheduler)
    groups = getattr(scheduler, "optimizer", optimizer).param_groups
    parts = [one for one in _parts(scheduler) if getattr(one, "base_lrs", None)]
    before = float(groups[0]["lr"]) or float(parts[0].base_lrs[0] if parts else 0.0)
    if before == 0.0:
        raise ArgumentError("the learning rate is 0, and so is its base rate.")
    factor = rate / before
    for value in [base for part in parts for base in part.base_lrs] + [group["lr"] for group in groups]:
        _check_scaled(value, factor, rate=rate)
    for part in parts:
        part.base_lrs = [base * factor for base in part.base_lrs]
    for group in groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(factor)
        else:
            group["lr"] = group["lr"] * factor
    state = scheduler.state_dict()
    if "_last_lr" in state:
        scheduler.load_state_dict({**state, "_last_lr": [float(group["lr"]) for group in groups]})


def _check_scaled(value: float | torch.Tensor, factor: float, *, rate: float) -> None:
    """Raises ArgumentError if a rate times a factor is infinite, or so small that the way back is none."""
    least = torch.finfo(value.dtype).tiny if isinstance(value, torch.Tensor) else sys.float_info.min
    scaled = float(value * factor)
    if not math.isfinite(scaled) or (scaled < least and float(value) != 0.0):
        raise ArgumentError(f"a rate of {rate:g} makes another rate {scaled:g}, which is out of range.")


def __getattr__(name: str) -> Any:  # a class or a function of transformers
    if name not in REEXPORTED:
        raise AttributeError(name)
    import transformers.optimization

    return getattr(transformers.optimization, name)


def flat(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """Returns 1 at each step: the rate stays as it is."""
    return 1.0


def constant(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """Returns a factor that stays at 1 after the warm-up."""
    return step / max(1, num_warmup_steps) if step < num_warmup_steps else 1.0


def linear(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """Returns a factor that falls linearly to 0 at the last step, after the warm-up."""
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))


def cosine(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """Returns a factor that falls to 0 along half a cosine (Loshchilov and Hutter, SGDR, 2017) after the warm-up."""
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


Factors = dict[str, Callable[..., float]]
FACTORS: Factors = {"linear": linear, "cosine": cosine, "constant": flat, "constant_with_warmup": constant}


# -- after a resume ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestedSettings:
    """Settings by the arguments: of each parameter group, and of the schedule."""

    groups: list[dict[str, Any]]  # values as torch keeps them
    schedule: dict[str, object]


def collect_settings(optimizer: Optimizer, scheduler: LRScheduler) -> RequestedSettings:
    """Copies the settings that follow from the arguments, before a checkpoint's states are loaded over them."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in getattr(optimizer, "param_groups", ())]
    return RequestedSettings(groups, {k: v for k, v in vars(_plain(scheduler)).items() if k in (*OF_PLATEAUS, *BASES)})


def changed_rate(optimizer: Optimizer, asked: RequestedSettings) -> tuple[float, float] | None:
    """Returns the first base rate that a loaded state changed: (loaded, requested); None if there is none."""
    for group, fresh in zip(getattr(optimizer, "param_groups", ()), asked.groups, strict=False):
        before = group.get("initial_lr")
        now = fresh.get("initial_lr")
        if before is not None and now is not None and float(before) != float(now):
            return float(before), float(now)
    return None


def find_unasked_settings(optimizer: Optimizer, scheduler: Any, asked: RequestedSettings) -> list[str]:
    """Describes the settings of parameter groups that differ from those asked for, after a resume applied its changes.

    A callback may have set them in the run that wrote the checkpoint; nothing else does.
    """
    is_cycled = any(getattr(part, "cycle_momentum", False) for part in _parts(_plain(scheduler)))
    names = [name for name in FIXED if not (is_cycled and name in CYCLED)]
    found = []
    for number, (group, fresh) in enumerate(zip(getattr(optimizer, "param_groups", ()), asked.groups, strict=False)):
        for name in names:
            if name in group and name in fresh and _as_numbers(group[name]) != _as_numbers(fresh[name]):
                found.append(f"{name}={group[name]!r} instead of {fresh[name]!r} in parameter group {number}")
    return found


def find_other_rates(optimizer: Optimizer, scheduler: Any) -> list[str]:
    """Describes the rates of parameter groups that differ from the last ones of their schedule."""
    plain = _plain(scheduler)
    rates = plain.get_last_lr() if hasattr(plain, "get_last_lr") else []
    groups = getattr(optimizer, "param_groups", ())
    pairs = [(float(group["lr"]), float(rate)) for group, rate in zip(groups, rates, strict=False) if "lr" in group]
    return [
        f"lr={mine:g} instead of {rate:g} in parameter group {number}"
        for number, (mine, rate) in enumerate(pairs)
        if not math.isclose(mine, rate, rel_tol=1e-5, abs_tol=1e-30)
    ]


def _as_numbers(value: Any) -> Any:
    """Returns a setting in a form that compares: tensors as numbers, lists as tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_as_numbers, value))
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def apply_changes(
    optimizer: Optimizer, scheduler: LRScheduler, asked: RequestedSettings, changed: Mapping[str, tuple[Any, Any]]
) -> None:
    """Applies changed settings, (before, now), after loading; the others keep their loaded values."""
    scheduler = _plain(scheduler)
    names = {name for argument in changed for name in SETTINGS.get(argument, ())}
    follows = follows_metrics(scheduler)
    for group, fresh in zip(getattr(optimizer, "param_groups", ()), asked.groups, strict=False):
        own = set(fresh) - set(NOT_FROM_OPTIONS) if "optim_args" in changed else set()
        group.update({name: fresh[name] for name in (names | own) & set(fresh) if not (follows and name == "lr")})
        if follows and "learning_rate" in changed:  # moved by evaluations: it keeps its ratio to the base rate
            before, now = changed["learning_rate"]
            group["lr"] = group["lr"] * now / before if before else fresh["lr"]
    if follows and "lr_scheduler_kwargs" in changed:
        vars(scheduler).update({k: v for k, v in asked.schedule.items() if k in OF_PLATEAUS})
    if "lr" in names:
        # Groups that were added in the run keep theirs.
        kept = _base_rates(scheduler)
        rates: dict[str, Any] = {base: values for base, values in asked.schedule.items() if base in BASES}
        vars(scheduler).update({k: [*values, *kept.get(k, [])[len(values) :]] for k, values in rates.items()})
    if isinstance(scheduler, lr_scheduler.LambdaLR) and changed.keys() & OF_RATES:
        _set_rates(scheduler)


def continue_towards(
    scheduler: LRScheduler, build: Build, *, before: int, now: int, is_new: bool = False, cooldown: str | None = None
) -> bool:
    """Continues a loaded schedule towards another length without a jump; returns whether the rate depends on it.

    `build` makes the schedule of a new run. One that `is_new` is not the checkpoint's: its lengths do not count.
    A `cooldown`, one of `COOLDOWNS`, begins here unless the loaded schedule is in it already, towards the same length.
    """
    scheduler = _plain(scheduler)
    if is_new:
        vars(scheduler).pop(HORIZONS, None)
    if is_new or not isinstance(scheduler, lr_scheduler.LambdaLR):
        return False
    horizons = [list(one) for one in getattr(scheduler, HORIZONS, None) or [[0, before]]]
    is_other = (horizons[-1][1], _shape(horizons[-1])) != (now, cooldown)
    if is_other and (cooldown is None or scheduler.last_epoch < now):  # a run that is at its end has nothing to cool
        horizons.append([scheduler.last_epoch, now] + ([] if cooldown is None else [cooldown]))
    if len(horizons) == 1:
        return False
    factors = [_factors(build, scheduler, one[1]) for one in horizons]
    course = factors[0]
    length = horizons[0][1]
    for (since, following, *_), shape, fresh in zip(horizons[1:], map(_shape, horizons[1:]), factors[1:], strict=True):
        course = [_continued(f0, f1, since, length, following, shape) for f0, f1 in zip(course, fresh, strict=True)]
        length = following
    here = scheduler.last_epoch
    depends = any(f(here) != g(here) or f(now - 1) != g(now - 1) for f, g in zip(factors[-2], factors[-1], strict=True))
    scheduler.lr_lambdas = list(course)
    setattr(scheduler, HORIZONS, horizons)
    _set_rates(scheduler)
    return depends or cooldown is not None


def _shape(horizon: Sequence[Any]) -> str | None:
    """Returns the shape of the cooldown that a horizon is; None if it follows the schedule."""
    return horizon[2] if len(horizon) > 2 else None


def _continued(f0: Factor, f1: Factor, since: int, before: int, now: int, shape: str | None) -> Factor:
    """Returns g of the file's head, with the `shape` of a cooldown or without; before step `since`, f0."""
    stands = f0(since if since < before else max(before - 1, 0))
    if shape is not None:
        falls = COOLDOWNS[shape]
        return lambda s: f0(s) if s < since else stands * max(falls(min((s - since) / (now - since), 1.0)), 0.0)
    fresh = f1(since)
    end = f1(now)
    if stands == fresh or since >= now:
        return lambda s: f1(s) if s >= since else f0(s)
    floor = end if stands >= end < fresh else 0.0

    def course(s: int) -> float:
        if s < since:
            return f0(s)
        if stands > fresh:
            fading = (stands - fresh) * max(now - s, 0) / (now - since)
            return min(f1(s) + fading, max(stands, f1(s)))
        return floor + (f1(s) - floor) * (stands - floor) / (fresh - floor)

    return course


def _factors(build: Build, scheduler: lr_scheduler.LambdaLR, length: int) -> list[Factor]:
    """Returns the schedule of a new run of `length` steps, one factor for each group."""
    rate = scheduler.optimizer.defaults.get("lr", scheduler.base_lrs[0])
    made = cast(lr_scheduler.LambdaLR, build(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate), length))
    return list(made.lr_lambdas) * len(scheduler.base_lrs)


def _set_rates(scheduler: lr_scheduler.LambdaLR) -> None:
    """Sets the rates of the next step from base rates and factors."""
    rates = [base * f(scheduler.last_epoch) for base, f in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        _set_group_rate(group, rate)
    scheduler.load_state_dict({**scheduler.state_dict(), "_last_lr": rates})


def follow_groups(optimizer: Optimizer, scheduler: Any) -> list[int]:  # Any: the user's need not be one of torch's
    """Extends a schedule to the parameter groups that an optimizer got after it was made.

    The rate of a new group is its base rate. It follows the factors of the first group, from the next update on.

    Returns:
        Positions of the groups, from 0.
    """
    scheduler = _plain(scheduler)
    groups = optimizer.param_groups
    parts = _parts(scheduler) or [scheduler]
    known = min((len(rates) for part in parts for rates in _base_rates(part).values()), default=len(groups))
    known = min(known, len(groups))
    new = groups[known:]
    for group in new:
        group.setdefault("initial_lr", group["lr"])
    for part in parts if new else ():
        more = [group["initial_lr"] for group in new]
        lists = {k: v for k, v in vars(part).items() if k in BY_GROUP and isinstance(v, list)}
        longer = {k: [*v, *more] for k, v in _base_rates(part).items()} | {
            k: [*v, *v[:1] * len(new)] for k, v in lists.items()
        }
        vars(part).update({k: v for k, v in longer.items() if len(v) == len(groups)})
    if isinstance(scheduler, lr_scheduler.LambdaLR):
        factor = scheduler.lr_lambdas[0](scheduler.last_epoch)
        for group in new:
            _set_group_rate(group, group["initial_lr"] * factor)
    return list(range(known, len(groups)))


def _base_rates(scheduler: Any) -> dict[str, list[float]]:
    """Returns the lists of base rates that a schedule has, by name."""
    return {name: list(values) for name, values in vars(scheduler).items() if name in BASES}


def _set_group_rate(group: dict[str, Any], rate: float | torch.Tensor) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _parts(scheduler: Any) -> list[LRScheduler]:  # Any: a schedule of the user's need not be one of torch's
    """Returns a schedule and its component schedules; empty if it is not torch's."""
    if not isinstance(scheduler, LRScheduler):
        return []
    lists = [value for value in vars(scheduler).values() if isinstance(value, (list, tuple))]
    return [scheduler, *(part for inner in lists for one in inner for part in _parts(one))]


def _plain(scheduler: LRScheduler) -> LRScheduler:
    """Returns the schedule inside a backend's wrapper."""
    return getattr(scheduler, "scheduler", scheduler)


# -- a step that turns out to be skipped -------------------------------------------------------------------------------


def can_undo(scheduler: Any) -> bool:
    """Returns True if `schedule_memory` can restore a schedule: None, or torch's own with rates that are numbers."""
    if scheduler is None:
        return True
    if not isinstance(scheduler, LRScheduler):
        return False
    return not any(isinstance(group["lr"], torch.Tensor) for group in scheduler.optimizer.param_groups)


def schedule_memory(scheduler: Any) -> Callable[[], None]:
    """Records the state of a schedule, its parts and its optimizer's groups; returns a function that restores it.

    Shallow copies are enough: a step of torch's schedules replaces values, and changes none in place.
    """
    schedules = list(_parts(scheduler))
    before = [(one, dict(vars(one))) for one in schedules]
    groups = [(group, dict(group)) for group in schedules[0].optimizer.param_groups] if schedules else []

    def undo() -> None:
        for one, attributes in before:
            vars(one).update(attributes)
        for group, values in groups:
            group.update(values)

    return undo
