"""Rules that show when training starts: contradictions, and settings that this run cannot make use of.

One function per rule, of the arguments and the facts of the run. Where transformers' Trainer trains, as this one does,
a rule is a warning, said once.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainwright._types import counted
from trainwright.config.coerce import parse_steps
from trainwright.config.enums import word
from trainwright.config.fields import get_value, read_defaults, was_asked_for
from trainwright.config.protocol import Arguments
from trainwright.config.rules.stages import RunFacts, Stage, further_evaluations, no_effect, rule

# Schedules in which the rate at a step does not depend on the length of the run.
WITHOUT_LENGTH = ("constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy")
OF_THE_BEST = (
    "lr_scheduler_type",
    "eval_strategy",
    "save_strategy",
    "load_best_model_at_end",
    "metric_for_best_model",
)
COMPUTED_BY_EVALUATION = ("loss", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredMetric:
    """A metric that only an evaluation can tell whether it exists."""

    name: str  # in full
    prefix: str
    eval_set: str | None = None  # of several


def resolve_best_metric(args: Arguments, eval_names: tuple[str, ...] = ()) -> RequiredMetric | None:
    """Returns the metric in `metric_for_best_model`, unless every evaluation has it or no rule needs it."""
    if args.metric_for_best_model is None:
        return None
    metric = str(args.metric_for_best_model).removeprefix("eval_")
    sets: dict[str, str | None] = {name: name for name in eval_names}
    for prefix in further_evaluations(args):
        again: dict[str, str | None] = {f"{prefix}_{name}": name for name in eval_names}
        sets |= again or {prefix: None}
    fitting = [name for name in sets if metric.startswith(f"{name}_")]
    chosen = max(fitting, key=len, default=None)
    prefix = "eval" if chosen is None else f"eval_{chosen}"
    if f"eval_{metric}".removeprefix(f"{prefix}_") in COMPUTED_BY_EVALUATION:
        return None
    eval_set = next(iter(eval_names), None) if chosen is None else sets[chosen]
    return RequiredMetric(name=f"eval_{metric}", prefix=prefix, eval_set=eval_set)


# -- the length of the run --------------------------------------------------------------------------------------------


def needs_length(args: Arguments, *, has_own_schedule: bool = False) -> str | None:
    """The first setting that only a run of known length can obey, as a person reads it; None if there is none."""
    if args.lr_scheduler_type not in WITHOUT_LENGTH and not has_own_schedule:
        return f"lr_scheduler_type={word(args.lr_scheduler_type)!r}"
    by_steps = [one for one in ("logging", "eval", "save") if getattr(args, f"{one}_strategy") == "steps"]
    names = ["warmup_steps", *(f"{one}_steps" for one in by_steps)]
    for name in names:
        if 0 < (getattr(args, name) or 0) < 1:
            return f"{name}={getattr(args, name):g} (a share of all steps)"
    if args.num_train_epochs != int(args.num_train_epochs):
        return f"num_train_epochs={args.num_train_epochs:g} (a part of a pass)"
    return None


@rule(
    Stage.START,
    "num_train_epochs",
    "lr_scheduler_type",
    "warmup_steps",
    "logging_strategy",
    "logging_steps",
    "eval_strategy",
    "eval_steps",
    "save_strategy",
    "save_steps",
)
def open_end_is_possible(args: Arguments, facts: RunFacts) -> str | None:
    needs = needs_length(args, has_own_schedule=facts.has_own_schedule) if facts.has_open_end else None
    if needs is None:
        return None
    return (
        f"The training data has no length, and {needs} needs to know how many steps there are. Set max_steps, or, "
        f"to train num_train_epochs={args.num_train_epochs:g} whole passes, choose settings that do not need it "
        "(lr_scheduler_type='constant', 'constant_with_warmup' or 'inverse_sqrt', intervals in whole steps)."
    )


@rule(Stage.START, "cooldown", "max_steps")
def cooldown_needs_its_schedule(args: Arguments, facts: RunFacts) -> str | None:
    cooldown = get_value(args, "cooldown")
    if cooldown is None:
        return None
    if facts.has_own_schedule:
        return (
            f"cooldown={cooldown!r} continues a schedule of lr_scheduler_type, and this run has its own scheduler. "
            "Leave cooldown out, and let that scheduler fall."
        )
    if facts.has_open_end:
        return f"cooldown={cooldown!r} ends with the run, and the training data has no length. Set max_steps."
    return None


# -- data and evaluation ----------------------------------------------------------------------------------------------


@rule(Stage.START, "eval_strategy")
def evaluation_needs_data(args: Arguments, facts: RunFacts) -> str | None:
    if facts.has_eval_dataset is False and args.eval_strategy != "no":
        asked = f"eval_strategy={word(args.eval_strategy)!r}"
        return f"{asked} needs an eval_dataset, and none was given. Pass one, or set eval_strategy='no'."
    return None


@rule(Stage.START, "eval_on_start")
def first_evaluation_needs_data(args: Arguments, facts: RunFacts) -> str | None:
    if facts.has_eval_dataset is False and args.eval_on_start:
        return "eval_on_start=True needs an eval_dataset, and none was given. Pass one, or set eval_on_start=False."
    return None


@rule(Stage.START, *OF_THE_BEST)
def best_metric_names_its_set(args: Arguments, facts: RunFacts) -> str | None:
    if not facts.eval_names or not _decides_by_metric(args):
        return None
    metric = str(args.metric_for_best_model).removeprefix("eval_")
    if any(metric.startswith(f"{name}_") for name in facts.eval_names):
        return None
    example = f"{facts.eval_names[0]}_{metric}"
    return (
        f"metric_for_best_model={args.metric_for_best_model!r} names none of the evaluation sets "
        f"{list(facts.eval_names)}. Write which of them decides, for example {example!r}."
    )


@rule(Stage.START, *OF_THE_BEST)
def best_metric_is_computed(args: Arguments, facts: RunFacts) -> str | None:
    metric = str(args.metric_for_best_model)
    is_computed = facts.has_compute_metrics is not False or metric.endswith(COMPUTED_BY_EVALUATION)
    if is_computed or not _decides_by_metric(args):
        return None
    return (
        f"metric_for_best_model={metric!r} is not computed: there is no compute_metrics. "
        "Pass one, or set metric_for_best_model='loss'."
    )


def _decides_by_metric(args: Arguments) -> bool:
    follows = args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
    return args.eval_strategy != "no" and bool(args.load_best_model_at_end or args.save_strategy == "best" or follows)


# -- the device -------------------------------------------------------------------------------------------------------


@rule(Stage.START, "bf16", "bf16_full_eval")
def bf16_is_supported(args: Arguments, facts: RunFacts) -> str | None:
    if facts.supports_bf16 is not False or not (args.bf16 or args.bf16_full_eval):
        return None
    name = "bf16" if args.bf16 else "bf16_full_eval"
    return f"{name}=True is not supported by this device ({facts.device_type}). Use {name.replace('bf', 'fp')}=True."


@rule(Stage.START, "tf32")
def tf32_is_supported(args: Arguments, facts: RunFacts) -> str | None:
    if args.tf32 and facts.supports_tf32 is False:
        return f"tf32=True is not supported by this device ({facts.device_type}); Ampere GPUs and later have it."
    return None


# -- several processes ------------------------------------------------------------------------------------------------


@rule(Stage.START, "gradient_accumulation_steps", "accelerator_config", "ddp_static_graph")
def static_graph_sees_every_batch(args: Arguments, facts: RunFacts) -> str | None:
    accumulation = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    averages_each = args.gradient_accumulation_steps == 1 or accumulation.get("sync_each_batch")
    if facts.num_processes == 1 or not args.ddp_static_graph or averages_each:
        return None
    return (
        f"ddp_static_graph=True with gradient_accumulation_steps={args.gradient_accumulation_steps}: torch records the "
        "graph in the first micro-batch, in which nothing is averaged. Leave ddp_static_graph out, or set "
        "accelerator_config={'gradient_accumulation_kwargs': {'sync_each_batch': True}}."
    )


@rule(Stage.START, "optim")
def updates_in_backward_stay_in_one_process(args: Arguments, facts: RunFacts) -> str | None:
    if facts.num_processes > 1 and word(args.optim) in ("lomo", "adalomo"):
        return (
            f"optim={word(args.optim)!r} updates the weights during the backward pass, before the "
            f"{facts.num_processes} processes have averaged their gradients, so their weights would part. "
            "Use another optimizer, or one process."
        )
    return None


# -- warnings: the length of the run ----------------------------------------------------------------------------------


@rule(Stage.WARNING, "num_train_epochs", "max_steps")
def some_step_is_trained(args: Arguments, facts: RunFacts) -> str | None:
    if facts.max_steps is None or facts.max_steps > 0:
        return None
    if args.num_train_epochs > 0:
        return "max_steps=0 trains one step, with a schedule of no length. Leave it out, or set how many to train."
    return f"{_length_field(args)} makes a run of no step: nothing is trained."


@rule(Stage.WARNING, "num_train_epochs", "max_steps", "warmup_steps")
def warmup_fits(args: Arguments, facts: RunFacts) -> str | None:
    length = facts.max_steps
    if length is None or args.warmup_steps < 1 or args.warmup_steps <= length:
        return None
    return (
        f"warmup_steps={args.warmup_steps} is longer than the run of {counted(length, 'step')} "
        f"({_length_field(args)}): the rate does not reach learning_rate. Lower warmup_steps "
        "(below 1 it is a share of all steps), or train longer."
    )


@rule(Stage.WARNING, "warmup_steps")
def warmup_is_whole(args: Arguments, facts: RunFacts) -> str | None:
    if args.warmup_steps > 1 and args.warmup_steps != int(args.warmup_steps):
        return f"warmup_steps={args.warmup_steps!r} counts as {int(args.warmup_steps)}: a number of steps is whole."
    return None


def _is_beyond(args: Arguments, length: int, what: str) -> bool:
    """Returns whether the user set an interval in steps that never comes due."""
    steps = getattr(args, f"{what}_steps")
    if getattr(args, f"{what}_strategy") != "steps" or not isinstance(steps, (int, float)):
        return False
    is_default = steps == read_defaults(type(args)).get(f"{what}_steps")  # a short run need not reach a default
    sources = ("eval_steps", "logging_steps") if what == "eval" else (f"{what}_steps",)  # None: as often as the log
    is_default = is_default or not any(was_asked_for(args, name) for name in sources)
    return not is_default and not 0 < steps <= length


@rule(
    Stage.WARNING,
    *("num_train_epochs", "max_steps", "logging_strategy", "logging_steps", "eval_strategy", "eval_steps"),
    *("save_strategy", "save_steps"),
)
def intervals_are_reached(args: Arguments, facts: RunFacts) -> str | None:
    length = facts.max_steps
    if length is None:
        return None
    beyond = [what for what in ("logging", "eval", "save") if _is_beyond(args, length, what)]
    if "logging" in beyond and "eval" in beyond and args.eval_steps == args.logging_steps:
        beyond.remove("eval")  # eval_steps was left to logging_steps
    if not beyond:
        return None
    given = " and ".join(f"{what}_steps={getattr(args, f'{what}_steps')}" for what in beyond)
    is_one = len(beyond) == 1
    is_positive = all(getattr(args, f"{what}_steps") > 0 for what in beyond)
    never = f"{'is' if is_one else 'are'} not reached" if is_positive else f"never {'comes' if is_one else 'come'} due"
    run = f"{never} in a run of {counted(length, 'step')} ({_length_field(args)})"
    late = " and ".join({"eval": "an evaluation", "save": "a save"}[what] for what in beyond if what != "logging")
    at_the_end = f"; the run ends with {late}" if late else ""
    cure = f"Lower {'it' if is_one else 'them'}" if is_positive else "Write a positive number of steps"
    strategies = " and ".join(f"{what}_strategy" for what in beyond)
    return f"{given} {run}{at_the_end}. {cure} (below 1: a share of all steps), or set {strategies} to 'epoch' or 'no'."


@rule(Stage.WARNING, "num_train_epochs", "max_steps", "profile")
def profiled_steps_are_reached(args: Arguments, facts: RunFacts) -> str | None:
    steps = get_value(args, "profile")
    length = facts.max_steps
    last = None if steps is None else parse_steps(steps).last
    if length is None or last is None or last <= length:
        return None
    run = f"the run of {counted(length, 'step')} ({_length_field(args)})"
    return f"profile={steps!r} names steps beyond {run}. Name earlier ones."


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


# -- warnings: data and evaluation ------------------------------------------------------------------------------------


@rule(Stage.WARNING, "train_sampling_strategy")
def lengths_need_a_map(args: Arguments, facts: RunFacts) -> str | None:
    if facts.is_stream and args.train_sampling_strategy in ("group_by_length", "batch_rebalance"):
        return (
            f"train_sampling_strategy={args.train_sampling_strategy!r} has no effect: the training data is a stream, "
            "which is read in its own order. Use 'random', or a dataset with a length."
        )
    return None


@rule(Stage.WARNING, "eval_strategy", "save_strategy", "load_best_model_at_end")
def best_is_evaluated(args: Arguments, facts: RunFacts) -> str | None:
    if args.eval_strategy != "no":
        return None
    asked = ["load_best_model_at_end=True"] * args.load_best_model_at_end
    asked += ["save_strategy='best'"] * (args.save_strategy == "best")
    where = "with eval_strategy='no': no model is ever judged. Set eval_strategy='epoch' or 'steps'"
    return no_effect(asked, where, joined_by=" and ") if asked else None
