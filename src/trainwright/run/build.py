"""Composition root: builds the parts of a trainer and a run from the arguments and the user's objects.

Services are in `services.py`, callbacks in `run_callbacks.py`, the scaling of losses in `loss_rules.py`, and the
changes to a model in `patched_model.py`.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from trainwright._types import Model, Trial, has_length, hide
from trainwright.capability import Capability, Moment, RunContext
from trainwright.capability_table import MADE
from trainwright.config import resolve
from trainwright.config.arguments import TrainingArguments
from trainwright.config.coerce import output_path
from trainwright.config.plans import StepPlan
from trainwright.config.rules.stages import RunFacts, check_run
from trainwright.data.seeding import enable_full_determinism, set_seed
from trainwright.distributed.device import supports_bf16, supports_tf32
from trainwright.distributed.world import reading_launchers_variables
from trainwright.engine.base import Engine
from trainwright.engine.select import select_engine
from trainwright.errors import ArgumentError, LegacyNameWarning, ModelError
from trainwright.loop.extension import Extension
from trainwright.run.services import NoSearch as NoSearch  # pickles of 0.3 name it here
from trainwright.run.services import Services
from trainwright.support import model_facts
from trainwright.support.hooks import Events, is_overridden
from trainwright.support.replaced import current
from trainwright.support.signatures import POSITIONAL, read_parameters

if TYPE_CHECKING:
    from trainwright.evaluation.eval_loop import EvalContext


# -- a trainer --------------------------------------------------------------------------------------------------------


def apply_arguments(args: Any, model: Model) -> Any:
    """Returns the arguments, or default ones; from then on they set the seed and the log level."""
    if args is None:
        args = TrainingArguments(output_dir="tmp_trainer")
    hide(getattr(args, "hub_token", None))
    output_path(args)  # a later change of the working directory does not move the run
    if model_facts.num_devices(model) > 1:
        args._n_gpu = 1  # the model has the GPUs: it is not replicated to them
    seed_everything(args)
    level = args.get_process_log_level()
    for name in {"trainwright", "transformers"} & sys.modules.keys():
        if (known := logging.getLogger(name)).level != level:  # setting a level clears the caches of all loggers
            known.setLevel(level)
    return args


def seed_everything(args: Any) -> None:
    """Seeds all generators by `seed`, or makes all operations deterministic by `full_determinism`."""
    if args.full_determinism:
        current("enable_full_determinism", enable_full_determinism)(args.seed)
    else:
        current("set_seed", set_seed)(args.seed)


def make_engine(args: Any, model: Model = None, *, stands_in: bool = False) -> Engine:
    """Makes the engine that the arguments ask for.

    Args:
        args: the settings.
        model: the model to train, if it exists already; its weights may be distributed over processes.
        stands_in: the tensors have no memory, and there are no other processes.
    """
    if args.tf32:  # refused before the engine sets it
        device = torch.device(args.device)
        check_run(args, RunFacts(device_type=device.type, supports_tf32=supports_tf32(device)))
    with reading_launchers_variables():
        plan = resolve.engine(args, None if model is None else model_facts.model_layout(model))
        return select_engine(replace(plan, stands_in=stands_in))


def one_processing_class(processing_class: Any, tokenizer: Any) -> Any:
    """Returns the processing class, also if it was passed under its older name."""
    if tokenizer is None:
        return processing_class
    if processing_class is not None and processing_class is not tokenizer:
        raise ArgumentError("Trainer got processing_class and tokenizer, its older name. Pass only processing_class.")
    warnings.warn("Trainer(tokenizer=...) is now Trainer(processing_class=...).", LegacyNameWarning, stacklevel=4)
    return tokenizer


def call_model_init(model_init: Callable[..., Any], trial: Trial) -> Any:
    """Returns a model from the user's function, which takes no argument or the trial."""
    parameters = (read_parameters(model_init) or {}).values()
    num_arguments = sum(one.kind in POSITIONAL for one in parameters)
    if num_arguments > 1:
        raise ModelError(
            f"model_init takes {num_arguments} arguments; it must take none, or one: the trial of a search."
        )
    model = model_init(trial) if num_arguments == 1 else model_init()
    if model is None:
        raise ModelError("model_init returned None; it must return the model.")
    return model


# -- a run ------------------------------------------------------------------------------------------------------------


def make_extensions(moment: Moment, context: RunContext) -> list[Extension]:
    """Makes the extensions of a run whose moment has come: each capability of the table makes its own, or none."""
    made = {one.name: one for one in context.run.extensions}
    known = set(made)
    for row in MADE:
        capability: Capability = row.load()
        if capability.moment is moment and (extension := capability.make(context, made)) is not None:
            assert extension.name == row.name, f"the row {row.name!r} reserves another name than {extension.name!r}"
            made[row.name] = extension
    return [one for name, one in made.items() if name not in known]


def step_plan(args: Any, values: tuple[Any, ...]) -> StepPlan:
    """Returns the plan for the values of `set_initial_training_values`."""
    return StepPlan.from_values(values, micro_batches=resolve.micro_batches(args), max_grad_norm=args.max_grad_norm)


def has_own_schedule(parts: Any) -> bool:
    """Returns whether a trainer's schedule is one of the user's, not the one that its arguments name."""
    return parts.lr_scheduler is not None and not parts._created_lr_scheduler


def rule_facts(plan: StepPlan, parts: Any, device: torch.device) -> RunFacts:
    """Returns the facts about a run for the rules that check it; `parts` has the user's objects as attributes."""
    eval_dataset = parts.eval_dataset
    loops = ("evaluate", "evaluation_loop", "_evaluate", "prediction_loop")
    has_metrics = parts.compute_metrics is not None or is_overridden(parts, *loops)
    return RunFacts(
        max_steps=None if plan.has_open_end else plan.max_steps,
        num_epochs=None if parts.args.max_steps > 0 else parts.args.num_train_epochs,
        has_open_end=plan.has_open_end,
        has_own_schedule=has_own_schedule(parts),
        is_stream=not has_length(parts.train_dataset),
        has_eval_dataset=eval_dataset is not None,
        eval_names=tuple(eval_dataset) if isinstance(eval_dataset, dict) else (),
        has_compute_metrics=None if has_metrics else False,
        device_type=device.type,
        num_processes=parts.args.world_size,
        supports_bf16=supports_bf16(device),
        supports_tf32=supports_tf32(device),
    )


# -- an evaluation ----------------------------------------------------------------------------------------------------


def evaluation_context(
    args: Any, services: Services, *, events: Events, compute_metrics: Any, is_prediction: bool, **parts: Any
) -> EvalContext:
    """Returns the context of one evaluation; `parts` are further fields. Predictions are kept and may lack labels."""
    from trainwright.evaluation.eval_loop import EvalContext, is_streaming
    from trainwright.evaluation.nested_collector import gather_results

    engine = services.engine
    streams = args.batch_eval_metrics or is_streaming(compute_metrics)

    def gather(value: Any) -> Any:
        if not args.eval_use_gather_object or engine.num_replicas == 1:
            return services.gather_function(value)
        return gather_results(value, engine.gather_replica_objects)

    return EvalContext(
        plan=resolve.evaluation(args),
        events=events,
        gather=gather,
        gather_objects=None if engine.num_replicas == 1 else engine.gather_replica_objects,
        total=engine.sum,
        collect=engine.stacked,
        batch_size=args.eval_batch_size,
        device=engine.device,
        compute_metrics=compute_metrics,
        needs_labels=not is_prediction,
        keeps_results=is_prediction or not streams,
        **parts,
    )
