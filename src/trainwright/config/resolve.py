"""Pure: arguments, also of transformers, and the world -> frozen plans. Attributes are read by name only."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from trainwright.capability_table import NAME_FIELDS, TABLE, load
from trainwright.config import plans
from trainwright.config.accelerator import AcceleratorConfig
from trainwright.config.behaviour import get_behaviour
from trainwright.config.coerce import StepRange, output_path, parse_steps
from trainwright.config.enums import word
from trainwright.config.fields import get_value, value_if_known
from trainwright.config.protocol import Arguments
from trainwright.config.rules.stages import refuse
from trainwright.distributed.world import (
    PARALLEL_SIZES,
    World,
    configured_backend,
    configured_deepspeed,
    configured_fsdp_version,
    configured_parallelism,
)
from trainwright.errors import ArgumentError

if TYPE_CHECKING:
    from trainwright.support.model_facts import ModelLayout


def read_world(args: Arguments) -> World:
    """The world that `args` asks for."""
    return World.for_process(use_cpu=args.use_cpu)


def lengths(
    args: Arguments, *, num_batches: int | None, num_examples: int | None, total_batch_size: int
) -> tuple[int, int, int, float, int, int, int]:
    """Returns the seven values of `set_initial_training_values`, in its order.

    Args:
        args: `num_train_epochs` counts where `max_steps` is below 0.
        num_batches: batches per process and epoch; None for a stream.
        num_examples: samples of an epoch.
        total_batch_size: samples of a step over all processes.
    """
    max_steps = args.max_steps
    steps = micro_batches(args)
    epochs = math.ceil(args.num_train_epochs)
    samples = max_steps * total_batch_size
    if num_batches is None:
        if max_steps <= 0:
            return epochs, plans.OPEN_END, 0, 0, total_batch_size, plans.OPEN_END, plans.OPEN_END
        return sys.maxsize, max_steps, samples, samples, total_batch_size, max_steps * steps, max_steps
    steps_per_epoch = max(math.ceil(num_batches / steps), 1)
    examples = num_examples or 0
    if max_steps > 0:
        epochs = math.ceil(max_steps / steps_per_epoch)
        return epochs, steps_per_epoch, examples, samples, total_batch_size, num_batches, max_steps
    max_steps = math.ceil(args.num_train_epochs * steps_per_epoch) if max_steps < 0 else 0
    trained = examples * args.num_train_epochs
    return epochs, steps_per_epoch, examples, trained, total_batch_size, num_batches, max_steps


def engine(args: Arguments, layout: ModelLayout | None = None) -> plans.EnginePlan:
    """`layout`: how the model came in parts; None: it is whole, or not there yet."""
    shards = fsdp(args)
    zero = deepspeed(args)
    each = None
    if shards is not None and shards.settings is not None:
        from trainwright.config import fsdp_config

        is_hybrid = fsdp_config.read_strategy(shards.settings) in fsdp_config.HYBRID
        if is_hybrid and fsdp_config.read_version(shards.settings) == 2:
            each = read_world(args).local_world_size
    is_whole = args.torch_compile and not compiles_blocks(args)
    compiles = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode} if is_whole else {}
    return plans.EnginePlan(
        device=args.device,
        world_size=args.world_size,
        num_devices=max(1, args.n_gpu),
        keeps_state=_accelerator(args).use_configured_state,
        use_cpu=args.use_cpu,
        precision=plans.PrecisionPlan(mixed=args.mixed_precision, tf32=args.tf32),
        compile=plans.CompilePlan(**compiles),
        non_blocking=_accelerator(args).non_blocking,
        ddp=ddp(args),
        hang_timeout_s=get_value(args, "hang_timeout"),
        loaders=plan_foreign_loaders(args),
        fsdp=shards,
        deepspeed=zero,
        parallel=parallel(args, layout, has_fsdp=shards is not None, has_deepspeed=zero is not None, num_in_copy=each),
    )


WITHOUT_BACKEND: dict[str, Any] = {"fsdp": False, "fsdp_config": None, "deepspeed": None, "parallelism_config": None}
"""Settings of one process that has a whole model for itself."""


def compiles_blocks(args: Arguments) -> bool:
    """Returns True if blocks are compiled (torch_compile="regional"); DataParallel copies them, so it compiles all."""
    return args.torch_compile == "regional" and args.n_gpu <= 1


def fsdp(args: Arguments) -> plans.FSDPPlan | None:
    """Returns None unless FSDP shards the model; ArgumentError if it should, without a distributed launcher."""
    if args.fsdp:
        if not read_world(args).launched:
            raise ArgumentError(
                "fsdp shards the model over processes, and this one was started alone. Start the script with torchrun "
                "--nproc-per-node N, or accelerate launch; or leave fsdp out."
            )
        from trainwright.config.enums import FSDPOption
        from trainwright.config.fsdp_config import read_strategy, read_version

        settings = args.fsdp_config or {}
        if read_version(settings) == 2 and read_strategy(settings) == FSDPOption.NO_SHARD:
            return None  # whole models, as without fsdp
        return plans.FSDPPlan(settings=settings)
    return plans.FSDPPlan() if configured_backend() == "fsdp" and not args.deepspeed else None


def fsdp_version(args: Arguments) -> int | None:
    """Returns the version of FSDP that shards the model, of the arguments or of the launcher; None without FSDP."""
    from trainwright.config.fsdp_config import read_version

    shards = fsdp(args)
    if shards is None:
        return None
    return configured_fsdp_version() if shards.settings is None else read_version(shards.settings)


def deepspeed(args: Arguments) -> plans.DeepSpeedPlan | None:
    """Returns None without DeepSpeed. The launcher's configuration applies if the arguments have none."""
    source = _deepspeed_source(args)
    if source is None:
        return None
    clipping: float | str = args.max_grad_norm or 0.0
    if not args.deepspeed and not isinstance(source, str) and source["gradient_clipping"] != "auto":
        clipping = source["gradient_clipping"]  # the launcher's setting
    from trainwright.config.deepspeed_config import SEQUENCE_SIZE, settled

    steps = micro_batches(args)
    size = args.per_device_train_batch_size
    sizes = asked_sizes(args) or {}
    num_replicas = args.world_size // (sizes.get("cp_size", 1) * sizes.get("sp_size", 1))
    values = {
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": steps,
        "train_batch_size": size * steps * num_replicas,
        SEQUENCE_SIZE: sizes.get("sp_size", 1),
        "gradient_clipping": clipping,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "fp16.enabled": args.mixed_precision == "fp16",
        "bf16.enabled": args.mixed_precision == "bf16",
    }
    return plans.DeepSpeedPlan(config=settled(source, values))


def _deepspeed_source(args: Arguments) -> Mapping[str, Any] | str | None:
    return args.deepspeed or (configured_deepspeed() if configured_backend() == "deepspeed" else None)


def zero3_config(args: Arguments) -> dict[str, Any] | None:
    """The DeepSpeed configuration under which transformers makes models in parts; None: it makes whole ones.

    Whole without stage 3, in a process that was started alone, or where DeepSpeed is not installed, which is said when
    a trainer is made.
    """
    if not args.deepspeed and configured_backend() != "deepspeed":
        return None
    if not read_world(args).launched or importlib.util.find_spec("deepspeed") is None:
        return None
    from trainwright.config.deepspeed_config import get

    plan = deepspeed(args)
    if plan is None or get(plan.config, "zero_optimization.stage") != 3:
        return None
    return dict(plan.config)


def plan_foreign_loaders(args: Arguments) -> plans.LoadersOfOthers:
    """Returns how loaders that the user made are shared out: the settings of `accelerator_config`."""
    names = [field.name for field in fields(plans.LoadersOfOthers) if field.name != "data_seed"]
    return plans.LoadersOfOthers(
        data_seed=args.data_seed, **{name: getattr(_accelerator(args), name) for name in names}
    )


def ddp(args: Arguments) -> plans.DDPPlan:
    """Returns the settings of DistributedDataParallel."""
    accumulation = _accelerator(args).gradient_accumulation_kwargs or {}
    return plans.DDPPlan(
        backend=args.ddp_backend,
        timeout_s=args.ddp_timeout,
        find_unused_parameters=args.ddp_find_unused_parameters,
        bucket_cap_mb=args.ddp_bucket_cap_mb,
        broadcast_buffers=args.ddp_broadcast_buffers,
        static_graph=args.ddp_static_graph,
        recomputes_activations=get_value(args, "activation_checkpointing"),
        environment=read_world(args).variables(),
        sync_each_batch=bool(accumulation.get("sync_each_batch", False)),
    )


def loader(
    args: Arguments, *, batch_size: int, seed: int, is_training: bool = False, rank: int = 0, num_processes: int = 1
) -> plans.LoaderPlan:
    """`rank` and `num_processes`: which share of the batches, and of how many."""
    from trainwright.distributed.device import pins_memory

    behaviour = get_behaviour(args)
    return plans.LoaderPlan(
        batch_size=_per_process(args, batch_size, num_processes),
        seed=seed,
        drop_last=args.dataloader_drop_last and (is_training or not behaviour.evaluates_incomplete_batch),
        behaviour=behaviour,
        workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and pins_memory(args.device),
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        in_order=args.dataloader_in_order,
        timeout_s=get_value(args, "dataloader_timeout"),
        seeded=_accelerator(args).use_seedable_sampler,
        shuffle_method=get_value(args, "shuffle_method"),
        seed_samples=is_training and get_value(args, "seed_samples"),
        rank=rank,
        num_processes=num_processes,
        even_tail=_accelerator(args).even_batches,
        is_training=is_training,
    )


def plan_batches(args: Arguments) -> plans.Batching | None:
    """Returns how a capability forms the batches; None if they have a fixed number of samples."""
    planned = (load(row.batch_plan)(args) for row in TABLE if row.batch_plan)
    return next((one for one in planned if one is not None), None)


def joins_samples(args: Arguments) -> bool:
    """Returns whether a row of a batch has several samples."""
    batching = plan_batches(args)
    return batching is not None and batching.joins_samples


def sampling(
    args: Arguments, *, batch_size: int, seed: int, num_processes: int, length_of: str | None
) -> plans.SamplingPlan:
    """Returns how rows are put in order and shared out; `length_of` names the column of lengths."""
    return plans.SamplingPlan(
        strategy=word(args.train_sampling_strategy),
        batch_size=batch_size,
        micro_batches=micro_batches(args),
        num_processes=num_processes,
        seed=seed,
        length_of=length_of or "input_ids",
        length_column=args.length_column_name,
        pad_to=get_value(args, "pad_to_multiple_of"),
        drop_last=args.dataloader_drop_last,
        show_progress=not args.disable_tqdm,
        batching=plan_batches(args),
    )


def _per_process(args: Arguments, batch_size: int, num_processes: int) -> int:
    """Samples in a batch on each process; with `split_batches` the setting is the batch of all of them."""
    if num_processes == 1 or not _accelerator(args).split_batches:
        return batch_size
    if batch_size % num_processes:
        raise ArgumentError(
            f"accelerator_config.split_batches=True cuts each batch of {batch_size} into {num_processes} equal parts, "
            "one for each process; choose a batch size that is a multiple of the number of processes."
        )
    return batch_size // num_processes


def checkpoint(args: Arguments) -> plans.CheckpointPlan:
    """Returns when checkpoints are written and which are kept."""
    limit = args.save_total_limit
    by_time = [get_value(args, name) for name in ("save_every", "max_train_time")]
    requeues = bool(get_value(args, "slurm_requeue"))
    return plans.CheckpointPlan(
        keep_last=limit if limit and limit > 0 else None,
        keep_every_steps=get_value(args, "save_keep_every_steps"),
        keep_every_s=get_value(args, "save_keep_every"),
        save_every_s=by_time[0],
        max_train_s=by_time[1],
        saves_on_interrupt=args.save_strategy != "no" or args.enable_jit_checkpoint or requeues or any(by_time),
        saves_on_exception=bool(get_value(args, "save_on_exception")),
        requeues=requeues,
    )


def id_column(args: Arguments) -> str | None:
    """Returns the column of row names; None if rows are named by index or by line."""
    columns = (get_value(args, name) for name in ("id_column", *NAME_FIELDS))
    return next((column for column in columns if isinstance(column, str)), None)


def nonfinite_policy(args: Arguments) -> str:
    """Returns what becomes of values that are not finite: as `on_nonfinite`, and without a guard a warning."""
    policy: str = value_if_known(args, "on_nonfinite") or "warn"
    return "ignore" if policy == "skip" and not get_behaviour(args).skips_nonfinite_steps else policy


def profiled(args: Arguments) -> StepRange | None:
    """Returns the steps to trace; None without `profile`."""
    steps = get_value(args, "profile")
    return None if steps is None else parse_steps(steps)


def evaluation(args: Arguments) -> plans.EvalPlan:
    """Returns how an evaluation runs."""
    return plans.EvalPlan(
        batch_size=args.eval_batch_size,
        move_every=args.eval_accumulation_steps,
        concat_batches=args.eval_do_concat_batches,
        include=tuple(args.include_for_metrics),
        streams_metrics=args.batch_eval_metrics,
        skip_non_finite=args.logging_nan_inf_filter,
        averages_batches=not get_behaviour(args).averages_eval_loss_over_items,
        memory_share=0.6 / max(1, args.world_size),  # the rest is for metrics, which often copy their inputs
        spill_folder=output_path(args),
    )


def reads_streams_apart(args: Arguments) -> bool:
    """Returns whether each process reads a stream for itself, and the main process for no other."""
    return _accelerator(args).dispatch_batches is False


def generation(args: Arguments) -> plans.GenerationPlan:
    """Returns the settings of the five fields of Seq2SeqTrainingArguments; other arguments ask for no generation."""
    return plans.GenerationPlan(
        predicts=get_value(args, "predict_with_generate"),
        config=get_value(args, "generation_config"),
        max_length=get_value(args, "generation_max_length"),
        num_beams=get_value(args, "generation_num_beams"),
    )


def micro_batches(args: Arguments) -> int:
    """Micro-batches of a step; `accelerator_config` may say it too: an ArgumentError where both do and differ."""
    steps: int = args.gradient_accumulation_steps
    other = (_accelerator(args).gradient_accumulation_kwargs or {}).get("num_steps")
    if other is None or other == steps:
        return steps
    if steps != 1:
        raise ArgumentError(
            f"gradient_accumulation_steps={steps}, and accelerator_config['gradient_accumulation_kwargs']['num_steps']="
            f"{other}. Both set the micro-batches of an optimizer step; set only the first."
        )
    return int(other)


def _accelerator(args: Arguments) -> AcceleratorConfig:
    """Returns `accelerator_config`; instances of transformers' class lack some fields."""
    return AcceleratorConfig.of(args.accelerator_config)


def whole_matrices(name: str, args: Arguments) -> str | None:
    """Reports backends that keep weights in flat pieces, for an optimizer that needs rows and columns; None: none does.

    Args:
        name: of the optimizer.
        args: arguments of the run.
    """
    from trainwright.config.deepspeed_config import get

    zero = deepspeed(args)
    stage = 0 if zero is None else get(zero.config, "zero_optimization.stage") or 0
    if stage == 0 and fsdp_version(args) != 1:
        return None
    who = f"ZeRO stage {stage}" if stage else "Version 1 of FSDP"
    return (
        f"optim={name!r} works on whole matrices. {who} gives each process a flat piece of all weights, without rows "
        "and columns. Use fsdp=True (version 2), which keeps them, or optim='adamw_torch'."
    )


def plain_tensors(name: str, args: Arguments) -> str | None:
    """Reports version 2 of FSDP, whose weights are distributed tensors, for an optimizer with plain ones beside them.

    Args:
        name: of the optimizer.
        args: arguments of the run.
    """
    return mixes_tensors(name, "fsdp", "leave fsdp out") if fsdp_version(args) == 2 else None


def mixes_tensors(name: str, source: str, instead: str) -> str:
    """Returns why an optimizer does not work with distributed tensors, and the cure."""
    return (
        f"optim={name!r} keeps means of the rows and columns as plain tensors, which torch does not add to the "
        f"distributed tensors of {source}: the first update fails, with transformers' Trainer too. Use "
        f"optim='adamw_torch', or optim='sgd' or 'muon' for less memory, or {instead}."
    )


# -- parallelism -------------------------------------------------------------------------------------------------------


def parallel(
    args: Arguments,
    layout: ModelLayout | None,
    *,
    has_fsdp: bool = False,
    has_deepspeed: bool = False,
    num_in_copy: int | None = None,
) -> plans.ParallelPlan | None:
    """Returns the requested parallel plan; None if processes share nothing but the batches.

    The sizes multiply to the number of processes. Those of tensor, context and sequence parallelism lie next to each
    other, so with `num_together` of them, process p has the batches of replica p // num_together.

    Args:
        args: arguments of the run.
        layout: how the model came in parts; None: it is whole, or not there yet.
        has_fsdp: FSDP shares the model out.
        has_deepspeed: DeepSpeed does.
        num_in_copy: processes of a node that hold one copy in parts (hybrid sharding), 1 if no launcher sets it.

    Raises:
        ArgumentError: lists all that cannot be done.
    """
    given = args.parallelism_config
    asked = asked_sizes(args)
    if asked is None and layout is None:
        if num_in_copy is None or num_in_copy in (1, args.world_size):
            return None
        return plans.ParallelPlan(dp_replicate=args.world_size // num_in_copy, dp_shard=num_in_copy)
    sizes: dict[str, Any] = {name.removesuffix("_size"): size for name, size in (asked or {}).items()}
    plan = plans.ParallelPlan(**sizes, in_model=layout is not None, given=given)
    if plan.num_per_sequence > 1 and layout is None:
        plan = _with_replicas(plan, args.world_size, has_fsdp=has_fsdp, num_in_copy=num_in_copy)
    problems = [] if layout is None else list(_check_model(plan, layout, is_asked=asked is not None))
    if layout is not None and layout.tp is not None and layout.dp is not None and not problems:
        num_replicas = layout.dp // plan.num_per_sequence
        is_said = plan.dp_replicate * plan.dp_shard == num_replicas
        plan = replace(plan, tp=layout.tp, dp_shard=plan.dp_shard if is_said else num_replicas)
    if layout is not None:
        plan = replace(plan, has_others=layout.has_others, writes_parts=writes_parts(args))
    if plan.num_in_all == 1 and layout is None:  # no parallelism was asked for: each process has a copy
        return replace(plan, dp_replicate=args.world_size)
    problems += _between_settings(plan, args, has_fsdp=has_fsdp, has_deepspeed=has_deepspeed)
    if plan.num_in_all != args.world_size and not problems:
        processes = "process was" if args.world_size == 1 else "processes were"
        problems = [
            f"{_words(plan)} comes to {plan.num_in_all} processes, and {args.world_size} {processes} started. Start "
            f"{plan.num_in_all} (torchrun --nproc-per-node ..., or accelerate launch --num_processes ...), or change "
            "the sizes."
        ]
    refuse(problems)
    return plan


def asked_sizes(args: Arguments) -> dict[str, int] | None:
    """Returns the sizes in the arguments, the launcher's variables or DeepSpeed's configuration; None without any."""
    given = args.parallelism_config
    if given is not None:
        return {name: getattr(given, name) for name in PARALLEL_SIZES}
    asked = configured_parallelism()
    source = _deepspeed_source(args)
    if asked is not None or source is None:
        return asked
    from trainwright.config.deepspeed_config import sequence_size

    size = sequence_size(source)
    return {**dict.fromkeys(PARALLEL_SIZES, 1), "sp_size": size} if size > 1 else None


def _with_replicas(
    plan: plans.ParallelPlan, world_size: int, *, has_fsdp: bool, num_in_copy: int | None
) -> plans.ParallelPlan:
    """Returns a plan in which the processes that no size speaks of have batches of their own."""
    rest, remainder = divmod(world_size, plan.num_together)
    if plan.dp_replicate * plan.dp_shard > 1 or remainder or rest < 2:
        return plan
    if not has_fsdp:
        return replace(plan, dp_replicate=rest)
    num_in_copy = world_size if num_in_copy in (None, 1) else num_in_copy
    shard, remainder = divmod(num_in_copy, plan.num_together)
    return plan if remainder or rest % shard else replace(plan, dp_replicate=rest // shard, dp_shard=shard)


def writes_parts(args: Arguments) -> bool:
    """Returns whether each process writes its part of a model that came in parts, which `fsdp_config` says."""
    from trainwright.config import fsdp_config

    try:
        settings = fsdp_config.read_config(args.fsdp_config)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"fsdp_config={args.fsdp_config!r} could not be read: {error}") from None
    return "SHARDED" in str(settings.get(fsdp_config.STATE_DICT_TYPE, ""))


def _check_model(plan: plans.ParallelPlan, layout: ModelLayout, *, is_asked: bool) -> Iterator[str]:
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
    if layout.dp % plan.num_per_sequence:
        name = "cp" if plan.cp > 1 else "sp"
        yield (
            f"parallelism_config.{name}_size={plan.num_per_sequence}, and the model was loaded with fsdp_size x "
            f"dp_replicate_size = {layout.dp}, which count the processes that share sequences too. Load it with "
            f"DistributedConfig(tp_size={layout.tp}, fsdp_size=...), a multiple of {plan.num_per_sequence}."
        )
    elif plan.dp_replicate * plan.dp_shard not in (1, layout.dp // plan.num_per_sequence):
        yield (
            f"parallelism_config.dp_replicate_size={plan.dp_replicate} x dp_shard_size={plan.dp_shard}, and the model "
            f"was loaded for {layout.dp // plan.num_per_sequence}. Load it with the sizes that you ask for, or leave "
            "them out of parallelism_config."
        )
    if layout.pp > 1:
        yield f"The model was loaded with pp_size={layout.pp}: pipelines cannot be trained. Leave pp_size out."
    for number in layout.experts if layout.ep > 1 else ():
        if number % layout.ep:
            fitting = ", ".join(str(size) for size in range(2, number + 1) if number % size == 0)
            yield (
                f"The model was loaded with ep_size={layout.ep}, among which its {number} experts cannot be shared out "
                f"evenly. Load it with an ep_size that divides {number}: {fitting}."
            )
    if layout.ep > 1 and layout.dispatch == "deepgemm_megamoe":
        yield (
            "The model was loaded with ep_implementation='deepgemm_megamoe', whose kernel has no backward pass. Load "
            "it with ep_implementation='auto' or 'all_to_all'."
        )


def _between_settings(
    plan: plans.ParallelPlan, args: Arguments, *, has_fsdp: bool, has_deepspeed: bool
) -> Iterator[str]:
    in_parts = plan.layers_in_parts
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
    if plan.num_per_sequence > 1:
        yield from _check_long_context(plan, args)


def _check_long_context(plan: plans.ParallelPlan, args: Arguments) -> Iterator[str]:
    """Yields what cannot be combined with sequences in parts."""
    words = _words(plan)
    if plan.cp > 1 and plan.sp > 1:
        yield f"{words}: a sequence is cut in one way. Set cp_size or sp_size, and leave the other out."
    if generation(args).predicts:
        yield (
            f"{words} with predict_with_generate: text is generated token by token, of which no process can have a "
            "part. Evaluate with predict_with_generate in a run of its own, without these sizes."
        )


def _words(plan: plans.ParallelPlan) -> str:
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    sizes = " x ".join(f"{name}_size={size}" for name in names if (size := getattr(plan, name)) > 1)
    return f"{'The model' if plan.given is None and plan.in_model else 'parallelism_config'} ({sizes or 'tp_size=1'})"
