"""Parallel plan of a run: from a ParallelismConfig, the launcher's settings, and the layout of the model.

The sizes multiply to the number of processes. Those of tensor, context and sequence parallelism lie next to each other,
so with `num_together` of them, process p has the batches of replica p // num_together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from trainwright.config.constructor import refuse
from trainwright.config.plans import ParallelPlan
from trainwright.config.protocol import Arguments
from trainwright.distributed.world import PARALLEL_SIZES, configured_parallelism

if TYPE_CHECKING:
    from trainwright.model_facts import ModelLayout


def parallel(
    args: Arguments,
    layout: ModelLayout | None,
    *,
    has_fsdp: bool = False,
    has_deepspeed: bool = False,
    num_in_copy: int | None = None,
) -> ParallelPlan | None:
    """Returns the parallel plan that is asked for; None where processes share nothing but the batches.

    Args:
        layout: how the model came in parts; None: it is whole, or not there yet.
        num_in_copy: processes of a node that hold one copy in parts (hybrid sharding), 1 where no launcher says it.

    Raises:
        ArgumentError: lists all that cannot be done.
    """
    given = args.parallelism_config
    asked = configured_parallelism() if given is None else {name: getattr(given, name) for name in PARALLEL_SIZES}
    if asked is None and layout is None:
        if num_in_copy is None or num_in_copy in (1, args.world_size):
            return None
        return ParallelPlan(dp_replicate=args.world_size // num_in_copy, dp_shard=num_in_copy)
    sizes = {name.removesuffix("_size"): size for name, size in (asked or {}).items()}
    plan = ParallelPlan(**sizes, in_model=layout is not None, given=given)
    problems = [] if layout is None else list(_of_the_model(plan, layout, is_asked=asked is not None))
    if layout is not None and not problems:
        plan = _laid_out(plan, layout)
    if plan.num_in_all == 1 and layout is None:  # nobody shares anything: each process has a copy
        return replace(plan, dp_replicate=args.world_size)
    problems += _between_settings(plan, args, has_fsdp=has_fsdp, has_deepspeed=has_deepspeed)
    refuse([*problems, *(() if problems else _of_the_launcher(plan, args.world_size))])
    return plan


def _laid_out(plan: ParallelPlan, layout: ModelLayout) -> ParallelPlan:
    if layout.tp is None or layout.dp is None:
        return plan
    is_said = plan.dp_replicate * plan.dp_shard == layout.dp
    return replace(plan, tp=layout.tp, dp_shard=plan.dp_shard if is_said else layout.dp)


def _of_the_model(plan: ParallelPlan, layout: ModelLayout, *, is_asked: bool) -> Iterator[str]:
    if layout.tp is None or layout.dp is None:
        if not is_asked:
            yield (
                "The model's parameters are in parts, and nothing says how many processes work together. Pass "
                "parallelism_config=ParallelismConfig(tp_size=..., dp_shard_size=...)."
            )
        return
    if plan.tp not in (1, layout.tp):
        yield (
            f"parallelism_config.tp_size={plan.tp}, and the model was loaded with tp_size={layout.tp}. Load it with "
            "the size that you ask for, or leave parallelism_config out: the model says it."
        )
    if plan.dp_replicate * plan.dp_shard not in (1, layout.dp):
        yield (
            f"parallelism_config.dp_replicate_size={plan.dp_replicate} x dp_shard_size={plan.dp_shard}, and the model "
            f"was loaded for {layout.dp}. Load it with the sizes that you ask for, or leave parallelism_config out."
        )
    if layout.pp > 1:
        yield f"The model was loaded with pp_size={layout.pp}: pipelines cannot be trained. Leave pp_size out."


def _between_settings(plan: ParallelPlan, args: Arguments, *, has_fsdp: bool, has_deepspeed: bool) -> Iterator[str]:
    in_parts = plan.in_model or plan.tp > 1
    if in_parts and (has_fsdp or has_deepspeed):
        other = "fsdp" if has_fsdp else "deepspeed"
        yield (
            f"{_words(plan)} with {other}: a model whose layers are in parts cannot be taken apart once more. Load it "
            "in both ways at once, from_pretrained(..., distributed_config=DistributedConfig(tp_size=..., "
            f"fsdp_size=...)), and leave {other} out."
        )
    if in_parts and args.mixed_precision == "fp16":
        yield f"{_words(plan)} with fp16: the scale of the loss is not shared by parts of layers. Use bf16."
    if plan.dp_shard > 1 and not in_parts and not has_fsdp:
        yield (
            f"parallelism_config.dp_shard_size={plan.dp_shard} shards the model, which fsdp does, and fsdp is not set. "
            "Set fsdp=True, or use dp_replicate_size for whole models."
        )
    for name, size in (("cp_size", plan.cp), ("sp_size", plan.sp)):
        if size > 1:
            yield (
                f"parallelism_config.{name}={size} is not there yet: this version does not cut sequences into parts. "
                "Use fsdp or tp_size for what does not fit, or packing with a shorter packing_length."
            )


def _of_the_launcher(plan: ParallelPlan, world_size: int) -> Iterator[str]:
    if plan.num_in_all != world_size:
        processes = "process was" if world_size == 1 else "processes were"
        yield (
            f"{_words(plan)} comes to {plan.num_in_all} processes, and {world_size} {processes} started. Start "
            f"{plan.num_in_all} (torchrun --nproc-per-node ..., or accelerate launch --num_processes ...), or change "
            "the sizes."
        )


def _words(plan: ParallelPlan) -> str:
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    sizes = " x ".join(f"{name}_size={size}" for name in names if (size := getattr(plan, name)) > 1)
    return f"{'The model' if plan.given is None and plan.in_model else 'parallelism_config'} ({sizes or 'tp_size=1'})"
