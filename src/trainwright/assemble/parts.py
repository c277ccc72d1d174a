"""What a trainer is made of: engine, callbacks, model, loss, and the changes to a model that last for a run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from trainwright import model_facts
from trainwright._types import has_length
from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.callbacks.flow import DefaultFlowCallback
from trainwright.callbacks.preemption import SlurmRequeue
from trainwright.callbacks.profiling import StepProfiler
from trainwright.callbacks.progress import PrinterCallback, ProgressCallback
from trainwright.callbacks.time_limits import TimeLimits
from trainwright.checkpoint import rng
from trainwright.checkpoint.async_writer import CheckpointWriter
from trainwright.config import resolve, rules
from trainwright.config.plans import StepPlan
from trainwright.config.traced import WARM_UP
from trainwright.data.seeding import enable_full_determinism, set_seed
from trainwright.engine.base import Engine
from trainwright.engine.device_info import supports_bf16, supports_tf32
from trainwright.engine.select import select_engine
from trainwright.errors import (
    ArgumentError,
    LegacyNameWarning,
    ModelError,
    TrainwrightWarning,
)
from trainwright.loop.label_smoother import LabelSmoother
from trainwright.loop.micro_batch_retry import MicroBatchRetry
from trainwright.loss_normalization import LossRule
from trainwright.patches.activation_checkpointing import checkpointed_activations
from trainwright.patches.liger import apply_liger_kernel
from trainwright.patches.neftune import noisy_embeddings
from trainwright.patches.overflow_detection import overflow_detection
from trainwright.trackers.registry import get_reporting_integration_callbacks

WITH_OPTIMIZER = 3  # times the weights: two moments of Adam
SLOW_DISK = 100e6  # bytes a second that a save is expected to write before one has been seen


def seed_everything(args: Any) -> None:
    enable_full_determinism(args.seed) if args.full_determinism else set_seed(args.seed)


def make_engine(args: Any, model: Any = None) -> Engine:
    """`model`: the one to train, if it is there already: it may have come in parts."""
    return select_engine(resolve.engine(args, None if model is None else model_facts.model_layout(model)))


def make_callbacks(
    args: Any, callbacks: Iterable[Any] | None, *, engine: Engine, writer: CheckpointWriter, **context: Any
) -> CallbackHandler:
    """The handler with the flow, trackers, the user's callbacks, those of the arguments, and what shows progress."""
    trackers = get_reporting_integration_callbacks(args.report_to)
    handler = CallbackHandler([DefaultFlowCallback, *trackers, *(callbacks or ())], **context)
    handler.args = args
    plan = resolve.checkpoint(args)
    if plan.max_train_s is not None or plan.save_every_s is not None:
        guess = num_bytes(context["model"]) * WITH_OPTIMIZER / SLOW_DISK
        handler.add_callback(
            TimeLimits(
                plan.max_train_s,
                plan.save_every_s,
                save_s=lambda: writer.longest_s,
                first_save_s=guess,
                agree=engine.agree,
            )
        )
    if (traced := resolve.profiled(args)) is not None:
        handler.add_callback(StepProfiler(traced.first, traced.num, warm_up=WARM_UP))
    if plan.requeues:
        handler.add_callback(SlurmRequeue)
    handler.add_callback(PrinterCallback if args.disable_tqdm else ProgressCallback)
    return handler


def one_processing_class(processing_class: Any, tokenizer: Any) -> Any:
    """The processing class, also under its older name."""
    if tokenizer is None:
        return processing_class
    if processing_class is not None and processing_class is not tokenizer:
        raise ArgumentError("Trainer got processing_class and tokenizer, two names of one thing. Pass only the first.")
    warnings.warn("Trainer(tokenizer=...) is now Trainer(processing_class=...).", LegacyNameWarning, stacklevel=3)
    return tokenizer


def call_model_init(model_init: Callable[..., Any], trial: Any) -> Any:
    """A model from the user's function, which takes nothing or the trial."""
    num_arguments = len(inspect.signature(model_init).parameters)
    if num_arguments > 1:
        raise ModelError(
            f"model_init takes {num_arguments} arguments; it must take none, or one: the trial of a search."
        )
    model = model_init(trial) if num_arguments == 1 else model_init()
    if model is None:
        raise ModelError("model_init returned None; it must return the model.")
    return model


def label_smoother(model: Any, epsilon: float) -> LabelSmoother | None:
    """The smoother that `label_smoothing_factor` asks for; None where it is 0 or each label is a yes or no."""
    if epsilon == 0:
        return None
    if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        warnings.warn(
            f"label_smoothing_factor={epsilon} has no effect on multi-label classification.",
            TrainwrightWarning,
            stacklevel=4,
        )
        return None
    return LabelSmoother(epsilon=epsilon)


def loss_rule(
    model: Any, args: Any, *, accepts_loss_kwargs: bool, has_loss_func: bool, is_scaled: bool | None, num_processes: int
) -> LossRule:
    by_items = getattr(args, "loss_weighting", "batches") == "items"
    is_mean = by_items and model_facts.ignores_item_count(model)
    return LossRule(
        counts_items=(accepts_loss_kwargs and not is_mean) or has_loss_func,
        shifts_labels=model_facts.shifts_labels(model),
        is_scaled=is_scaled,
        has_loss_func=has_loss_func,
        weights_items=by_items,
        aux_coefficient=model_facts.auxiliary_coefficient(model),
        num_processes=num_processes if args.average_tokens_across_devices else 1,
    )


def sums_up_means(model: Any, args: Any, rule: LossRule) -> str | None:
    """Says that a model's gradients grow with the micro-batches of a step, where they do so as in the original."""
    factor = args.gradient_accumulation_steps * rule.num_processes
    counts = rule.counts_items and not rule.has_loss_func and rule.is_scaled is None
    if factor == 1 or not counts or not model_facts.ignores_item_count(model):
        return None
    name = type(model_facts.core_model(model)).__name__
    return (
        f"{name} returns the mean of a micro-batch whatever num_items_in_batch is: over {factor} micro-batches a step "
        f"its gradients are {factor} times those of one batch, as under transformers. loss_weighting='items' makes "
        "them equal."
    )


def num_bytes(model: Any) -> int:
    """Memory of a model's parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) if hasattr(model, "parameters") else 0


def smaller_batches(args: Any, engine: Engine) -> MicroBatchRetry | None:
    return MicroBatchRetry(engine, rng) if args.auto_find_batch_size else None


def facts(plan: StepPlan, parts: Any, device: torch.device) -> rules.Facts:
    """What the rules about a whole run need to know; `parts` has the user's objects as attributes."""
    eval_dataset = parts.eval_dataset
    return rules.Facts(
        max_steps=None if plan.has_open_end else plan.max_steps,
        has_open_end=plan.has_open_end,
        has_own_schedule=parts.lr_scheduler is not None and not parts._created_lr_scheduler,
        is_stream=not has_length(parts.train_dataset),
        has_eval_dataset=eval_dataset is not None,
        eval_names=tuple(eval_dataset) if isinstance(eval_dataset, dict) else (),
        has_compute_metrics=False if parts.only_loss_is_evaluated else None,
        device_type=device.type,
        num_processes=parts.args.world_size,
        supports_bf16=supports_bf16(device),
        supports_tf32=supports_tf32(device),
    )


def patches_for_a_run(args: Any, model: Any) -> list[Any]:
    """Changes to the model that last as long as training: context managers, in the order to enter them."""
    patches: list[Any] = []
    if args.use_liger_kernel:
        apply_liger_kernel(model, args.liger_kernel_config)
    if args.activation_checkpointing:
        patches.append(checkpointed_activations(model, args.activation_checkpointing_kwargs))
    if args.neftune_noise_alpha is not None:
        patches.append(noisy_embeddings(model, args.neftune_noise_alpha))
    if "underflow_overflow" in args.debug:
        patches.append(overflow_detection(model))
    return patches
