"""The plan of a run of many processes, made in one: this process takes a step of each kind of process on stand-ins.

Each kind is planned in a process group of the size of the run that sends nothing, so sampler, engine and collectives
are as in the run; it is gone when the plan is made.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

from trainwright.config import plan_words, resolve
from trainwright.config.accelerator import AcceleratorConfig
from trainwright.distributed.device import supports_bf16
from trainwright.distributed.process_group import simulated_process_group
from trainwright.engine.accelerate_setup import make_sizes
from trainwright.errors import ArgumentError, ModelError, TrainwrightError
from trainwright.preflight.memory.memory_plan import SettingsChange, parse_size
from trainwright.preflight.memory.planner import PlannedStep, Settings, changes, predicted_step, tried
from trainwright.preflight.memory.run_plan import CheckpointSize, RankPlan, RunPlan
from trainwright.preflight.trainer_copy import AnyTrainer, left_as_it_was
from trainwright.run import build
from trainwright.run.internals import Internals

MAX_PER_NODE = 8  # processes of a node, unless the caller says how many


def plan_run(
    trainer: AnyTrainer,
    processes: int,
    *,
    per_node: int | None,
    engine: plan_words.Planned | None,
    budget: Any,
    tries: bool = True,
) -> RunPlan:
    """Returns the plan of a run with a number of processes.

    Args:
        trainer: in one process, with the whole model.
        processes: of the run.
        per_node: processes on one machine; None: 8, or all if they are fewer.
        engine: how the model is shared out, a word of `config/plan_words.py` or a configuration of DeepSpeed; None: as
            the arguments say.
        budget: memory of a device, a size as "80GB"; None: unknown.
        tries: look for changes of settings.

    Raises:
        ArgumentError: the numbers do not go together, or this process is one of several.
        ModelError: a step cannot be gone through without values.
    """
    num_each = min(MAX_PER_NODE, processes) if per_node is None else per_node
    _check(trainer, processes, num_each)
    limit = parse_size(budget)
    asked = plan_words.collect_settings(engine, trainer.args)
    if "parallelism_config" in asked:
        asked["parallelism_config"] = make_sizes(asked["parallelism_config"])
    base: Settings = asked
    args = copy.copy(trainer.args)
    plan_words.apply(args, base)
    word = plan_words.name_engine(args)
    ranks: list[tuple[str, int]] = [("every rank", 0)]
    differ = plan_words.has_rank_kinds(word) or bool(plan_words.count_sequence_parts(args))
    if differ and processes > 1:  # the last one may have no part of a small tensor
        ranks = [("rank 0", 0), (f"rank {processes - 1}", processes - 1)]
    steps: dict[str, PlannedStep] = {}
    found: list[SettingsChange] = []
    try:
        with left_as_it_was(trainer.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about stand-ins
            for name, rank in ranks:
                with simulated_process_group(rank=rank, num_processes=processes, per_node=num_each):
                    steps[name] = _plan_step(trainer, base)
                    fits = limit is not None and steps[name].peak.total_bytes <= limit
                    if rank == 0 and tries and not fits:
                        sharding = list(plan_words.more_sharding(args)) if processes > 1 else []
                        can_bf16 = args.device.type == "cpu" or supports_bf16(args.device) is True
                        found = tried(trainer, changes(args, can_bf16=can_bf16, sharding=sharding), limit, base=base)
    finally:
        build.make_engine(trainer.args)  # accelerate's state is one per process: it belongs to the trainer again
    first = steps[ranks[0][0]]
    if all(step.peak == first.peak for step in steps.values()):
        steps = {"every rank": first}
    plan = first.plan
    tokens = None if first.batch_tokens is None else first.batch_tokens * plan.micro_batches * first.num_replicas
    return RunPlan(
        num_processes=processes,
        per_node=num_each,
        num_replicas=first.num_replicas,
        engine=plan_words.word_for(args),
        engine_title=plan_words.describe_engine(args),
        ranks=tuple(
            RankPlan(
                name=name,
                peak=step.peak,
                loader_bytes=step.batch_bytes * _batches_ahead(args),
                offloaded_bytes=step.host_bytes,
            )
            for name, step in steps.items()
        ),
        batch_size=args.per_device_train_batch_size,
        micro_batches=plan.micro_batches,
        samples_per_step=plan.total_batch_size,
        num_steps=None if plan.has_open_end else plan.max_steps,
        num_epochs=None if plan.has_open_end or not plan.num_examples else plan.num_train_samples / plan.num_examples,
        tokens_per_step=tokens,
        collectives=first.collectives,
        checkpoint=CheckpointSize(
            weights_bytes=first.weights_bytes,
            optimizer_bytes=0 if args.save_only_model else first.optimizer_bytes,
            num_writers=processes if plan_words.writes_parts(args) else 1,
        ),
        changes=tuple(found),
        budget_bytes=limit,
    )


def _check(trainer: AnyTrainer, processes: int, per_node: int) -> None:
    if processes < 1 or per_node < 1 or processes % per_node:
        raise ArgumentError(
            f"processes={processes} and per_node={per_node}: give a whole number of nodes with equally many processes "
            "each, such as processes=64, per_node=8."
        )
    if not Internals(trainer).engine.trains_bare or trainer.train_dataset is None:
        raise ArgumentError(
            "A run is planned by a trainer with a train_dataset, in one process that holds the whole model. Start it "
            "without a launcher and without settings that share the model out, and say here how it will be: "
            f"{plan_words.EXAMPLE}."
        )
    if AcceleratorConfig.of(trainer.args.accelerator_config).use_configured_state:
        raise ArgumentError(
            "accelerator_config.use_configured_state=True keeps a state of accelerate with the number of processes "
            "of now, so no other number can be planned. Leave it out for the plan."
        )


def _plan_step(trainer: AnyTrainer, settings: Settings) -> PlannedStep:
    try:
        return predicted_step(trainer, settings)
    except TrainwrightError:
        raise
    except Exception as error:  # a model may look at values, which stand-ins do not have
        raise ModelError(
            f"The run cannot be planned: a step without values fails ({type(error).__name__}: {error}). Make the "
            "model compute without looking at values (`if x.sum() > 0`), or use check(memory=True), which measures a "
            "step of one process."
        ) from error


def _batches_ahead(args: Any) -> int:
    """Returns the batches that the loader of a process holds, including the current batch."""
    plan = resolve.loader(args, batch_size=args.train_batch_size, seed=0, is_training=True)
    return 1 + plan.workers * (2 if plan.prefetch_factor is None else plan.prefetch_factor)
