"""Summary of a run in a few lines: batches, steps, optimizer, rhythm, and which settings differ from the defaults."""

from __future__ import annotations

from typing import Any

from trainwright.config import resolve
from trainwright.config.fields import SETTINGS, batch_formers, value_of
from trainwright.config.help import differing
from trainwright.config.plans import StepPlan
from trainwright.config.protocol import Arguments


def run_summary(args: Arguments, plan: StepPlan, state: Any, *, device: Any, num_replicas: int) -> list[str]:
    """One line each for batches, steps, optimizer and rhythm, and one for what else differs from the defaults."""
    warmup = args.get_warmup_steps(plan.max_steps)
    lines = [
        f"batch     {_batch(args)} per device x {plan.micro_batches} accumulated x {_replicas(args, num_replicas)}"
        f"{', about' if _varies(args) else ' ='} {plan.total_batch_size} samples a step",
        f"length    {_length(args, plan)}",
        f"optimizer {_text(args.optim)}, learning rate {args.learning_rate:g}, {_text(args.lr_scheduler_type)} after "
        f"{warmup} warm-up steps, on {device} in {_precision(args)}",
        f"rhythm    {_rhythms(args, state)}",
    ]
    others = {name: value for name, value in differing(args).items() if not _is_summarized(name)}
    if others:
        lines.append("also      " + ", ".join(f"{name}={value!r}" for name, value in others.items()))
    return lines


def _is_summarized(name: str) -> bool:
    """Whether the lines above show a field; they show none of a subclass."""
    return name in SETTINGS and SETTINGS[name].summarized


def _replicas(args: Arguments, number: int) -> str:
    if args.n_gpu > 1:
        return f"{args.n_gpu} devices of one process"
    if number == args.world_size:
        return f"{number} processes"
    return f"{number} {'group' if number == 1 else 'groups'} of {args.world_size // number} processes"


def arguments_summary(args: Arguments) -> list[str]:
    """The same lines as far as arguments alone tell: the number of samples is not known to them."""
    micro_batches = resolve.micro_batches(args)
    total = f" = {args.per_device_train_batch_size * micro_batches * args.world_size} samples a step"
    warmup = f"{args.warmup_steps:g} warm-up steps"
    if 0 < args.warmup_steps < 1:
        warmup = f"a warm-up of {args.warmup_steps:g} of all steps"
    length = f"{args.max_steps} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
    return [
        f"batch     {_batch(args)} per device x {micro_batches} accumulated x {args.world_size} processes"
        f"{'' if _varies(args) else total}",
        f"length    {length}",
        f"optimizer {_text(args.optim)}, learning rate {args.learning_rate:g}, {_text(args.lr_scheduler_type)} after "
        f"{warmup}, in {_precision(args)}",
        f"rhythm    {_rhythms(args, args)}",
    ]


def _batch(args: Arguments) -> str:
    budget, packing = value_of(args, "max_tokens_per_batch"), value_of(args, "packing")
    if budget is not None:
        return f"up to {budget} tokens"
    if packing is not None:
        length = value_of(args, "packing_length")
        return f"{args.per_device_train_batch_size} rows of {length} tokens ({packing})"
    return str(args.per_device_train_batch_size)


def _varies(args: Arguments) -> bool:
    """Whether a batch is counted in something else than samples."""
    return bool(batch_formers(args))


def _rhythms(args: Arguments, steps: Any) -> str:
    verbs = (("logs", "logging"), ("evaluates", "eval"), ("saves", "save"))
    said = (f"{verb} {_rhythm(getattr(args, f'{n}_strategy'), getattr(steps, f'{n}_steps'))}" for verb, n in verbs)
    return ", ".join(said)


def _length(args: Arguments, plan: StepPlan) -> str:
    if plan.has_open_end:
        return f"until the data ends, {args.num_train_epochs:g} passes over data of unknown length"
    if args.max_steps > 0:
        return f"{plan.max_steps} steps, by max_steps"
    each = f"{plan.steps_per_epoch} steps over {plan.num_examples} samples"
    return f"{plan.max_steps} steps, {args.num_train_epochs:g} epochs of {each}"


def _rhythm(strategy: Any, steps: float | None) -> str:
    kind = _text(strategy)
    if kind == "steps" and steps is not None and steps < 1:
        return f"every {steps:g} of all steps"
    return {"no": "never", "epoch": "every epoch", "best": "at each best evaluation"}.get(kind, f"every {steps} steps")


def _precision(args: Arguments) -> str:
    mixed = args.mixed_precision
    return "full precision" if mixed == "no" else f"{mixed} autocast"


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))
