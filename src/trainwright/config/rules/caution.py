"""Warnings: settings that a run cannot make use of, though transformers' Trainer trains with them, as this one does.

One function per rule, of the arguments and the facts of the run. Each is said once when training starts.
"""

from __future__ import annotations

from trainwright.config.fields import defaults_of, value_of
from trainwright.config.parsing import parse_steps
from trainwright.config.protocol import Arguments
from trainwright.config.rules.stages import RunFacts, Stage, rule

BY_LENGTH = ("group_by_length", "batch_rebalance")

# -- the length of the run --------------------------------------------------------------------------------------------


@rule(Stage.WARNING, "num_train_epochs", "max_steps")
def some_step_is_trained(args: Arguments, facts: RunFacts) -> str | None:
    if facts.max_steps is None or facts.max_steps > 0:
        return None
    return f"{_length_field(args)} makes a run of no step: nothing is trained."


@rule(Stage.WARNING, "num_train_epochs", "max_steps", "warmup_steps")
def warmup_fits(args: Arguments, facts: RunFacts) -> str | None:
    length = facts.max_steps
    if length is None or args.warmup_steps < 1 or args.warmup_steps <= length:
        return None
    return (
        f"warmup_steps={args.warmup_steps} is longer than the run of {length} steps ({_length_field(args)}): the rate "
        "does not reach learning_rate. Lower warmup_steps (below 1 it is a share of all steps), or train longer."
    )


@rule(Stage.WARNING, "warmup_steps")
def warmup_is_whole(args: Arguments, facts: RunFacts) -> str | None:
    if args.warmup_steps > 1 and args.warmup_steps != int(args.warmup_steps):
        return f"warmup_steps={args.warmup_steps!r} counts as {int(args.warmup_steps)}: a number of steps is whole."
    return None


@rule(Stage.WARNING, "num_train_epochs", "max_steps", "logging_strategy", "logging_steps")
def logging_is_reached(args: Arguments, facts: RunFacts) -> str | None:
    return _never(args, facts, "logging")


@rule(
    Stage.WARNING, "num_train_epochs", "max_steps", "logging_strategy", "logging_steps", "eval_strategy", "eval_steps"
)
def evaluation_is_reached(args: Arguments, facts: RunFacts) -> str | None:
    if args.eval_steps == args.logging_steps:
        return None if args.logging_strategy == "steps" else _never(args, facts, "eval")
    return _never(args, facts, "eval")


@rule(Stage.WARNING, "num_train_epochs", "max_steps", "save_strategy", "save_steps")
def saving_is_reached(args: Arguments, facts: RunFacts) -> str | None:
    return _never(args, facts, "save")


def _never(args: Arguments, facts: RunFacts, what: str) -> str | None:
    steps = getattr(args, f"{what}_steps")
    if facts.max_steps is None or getattr(args, f"{what}_strategy") != "steps" or not isinstance(steps, (int, float)):
        return None
    is_default = steps == defaults_of(type(args)).get(f"{what}_steps")  # nobody chose it: a short run need not reach it
    if is_default or 0 < steps <= facts.max_steps:
        return None
    but = "" if what == "logging" else "; after the last step it is done once"
    return (
        f"{what}_steps={steps} is not reached in a run of {facts.max_steps} steps ({_length_field(args)}){but}. "
        f"Lower {what}_steps (below 1 it is a share of all steps), or set {what}_strategy='epoch' or 'no'."
        if steps > 0
        else f"{what}_steps={steps} never comes due{but}. Give a positive {what}_steps, or {what}_strategy='no'."
    )


@rule(Stage.WARNING, "num_train_epochs", "max_steps", "profile")
def profiled_steps_are_reached(args: Arguments, facts: RunFacts) -> str | None:
    steps = value_of(args, "profile")
    if facts.max_steps is None or steps is None:
        return None
    last = parse_steps(steps).last
    if last is None or last <= facts.max_steps:
        return None
    return (
        f"profile={steps!r} names steps beyond the run of {facts.max_steps} steps ({_length_field(args)}). "
        "Name earlier ones."
    )


@rule(Stage.WARNING, "num_train_epochs", "max_steps", "eval_strategy", "eval_delay")
def evaluation_is_not_delayed_away(args: Arguments, facts: RunFacts) -> str | None:
    if args.eval_strategy == "no" or facts.max_steps is None or not args.eval_delay:
        return None
    by_steps = args.eval_strategy == "steps"
    length = facts.max_steps if by_steps else facts.num_epochs
    if length is None or args.eval_delay <= length:
        return None
    return (
        f"eval_delay={args.eval_delay} is longer than the run of {length:g} {'steps' if by_steps else 'epochs'} "
        f"({_length_field(args)}), so it never evaluates. Lower eval_delay, or set eval_strategy='no'."
    )


def _length_field(args: Arguments) -> str:
    return f"max_steps={args.max_steps}" if args.max_steps >= 0 else f"num_train_epochs={args.num_train_epochs}"


# -- data and evaluation ----------------------------------------------------------------------------------------------


@rule(Stage.WARNING, "train_sampling_strategy")
def lengths_need_a_map(args: Arguments, facts: RunFacts) -> str | None:
    if facts.is_stream and args.train_sampling_strategy in BY_LENGTH:
        return (
            f"train_sampling_strategy={args.train_sampling_strategy!r} has no effect: the training data is a stream, "
            "which is read in its own order. Use 'random', or a dataset with a length."
        )
    return None


@rule(Stage.WARNING, "eval_strategy", "save_strategy", "load_best_model_at_end")
def best_is_evaluated(args: Arguments, facts: RunFacts) -> str | None:
    if args.eval_strategy != "no":
        return None
    asked = [name for name in ("load_best_model_at_end=True",) if args.load_best_model_at_end]
    asked += ["save_strategy='best'"] if args.save_strategy == "best" else []
    if not asked:
        return None
    return (
        f"{' and '.join(asked)} {'has' if len(asked) == 1 else 'have'} no effect with eval_strategy='no': no model is "
        "ever judged. Set eval_strategy='epoch' or 'steps'."
    )
