"""How the losses of a run are scaled, by its model, its arguments and what the user has said."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from trainwright._types import Model
from trainwright.config.behaviour import get_behaviour
from trainwright.config.fields import get_value
from trainwright.errors import TrainwrightWarning
from trainwright.support import model_facts
from trainwright.support.loss_normalization import LabelSmoother, LossRule
from trainwright.support.replaced import current

if TYPE_CHECKING:
    from trainwright.run.run import Run


def label_smoother(model: Model, epsilon: float) -> LabelSmoother | None:
    """Returns the smoother for `label_smoothing_factor`; None if it is 0 or the labels are multi-label."""
    if epsilon == 0:
        return None
    if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        message = f"label_smoothing_factor={epsilon} has no effect on multi-label classification."
        warnings.warn(message, TrainwrightWarning, stacklevel=4)
        return None
    return current("LabelSmoother", LabelSmoother)(epsilon=epsilon)


def loss_rule(
    model: Model,
    args: Any,
    *,
    accepts_loss_kwargs: bool,
    declares_loss_kwargs: bool,
    has_loss_func: bool,
    has_own_loss: bool,
    smooths_labels: bool,
    is_scaled: bool | None,
    num_processes: int,
) -> LossRule:
    """Returns how the losses of a run are scaled; `num_processes` average their gradients.

    `accepts_loss_kwargs`: the model is given `num_items_in_batch`; `declares_loss_kwargs`: the user says so.
    `has_own_loss`: a subclass defines `compute_loss`. `smooths_labels`: label smoothing makes the loss, and divides by
    the items. `is_scaled` is the user's declaration about losses; None if there is none.
    """
    behaviour = get_behaviour(args)
    weighting = get_value(args, "loss_weighting")
    if not weighting and not behaviour.averages_means_over_window:
        weighting = "original"
    is_original = weighting == "original"
    by_items = weighting == "items"
    is_of_user = has_own_loss or has_loss_func
    is_mean = not (is_original or is_of_user or smooths_labels or declares_loss_kwargs)
    is_mean = is_mean and model_facts.ignores_item_count(model)
    is_in_question = is_of_user or (not smooths_labels and not is_mean and model_facts.has_own_loss(model))
    is_declared = is_scaled is not None or (declares_loss_kwargs and not has_loss_func)
    counts_items = (accepts_loss_kwargs and not is_mean) or has_loss_func
    return LossRule(
        counts_items=counts_items or (by_items and smooths_labels),
        shifts_labels=model_facts.shifts_labels(model, declared_only=not behaviour.counts_predicted_tokens),
        is_scaled=is_scaled,
        has_loss_func=has_loss_func and is_original,
        weights_items=(by_items and not smooths_labels) or (is_mean and weighting is None),
        is_open=counts_items and is_in_question and not (is_original or is_declared),
        aux_coefficient=model_facts.auxiliary_coefficient(model),
        num_processes=num_processes if args.average_tokens_across_devices else 1,
    )


def loss_note(model: Model, args: Any, run: Run) -> str:
    """Returns what the lines at the start of a run say about its loss; "" where there is nothing to say."""
    assert run.losses.rule is not None
    return run.losses.note or describe_mean(model, args, run.losses.rule)


def describe_mean(model: Model, args: Any, rule: LossRule) -> str:
    """Returns a note if a run divides a model's loss that transformers would add up as means; "" otherwise."""
    factor = args.gradient_accumulation_steps * rule.num_processes
    if factor == 1 or not rule.weights_items or get_value(args, "loss_weighting") is not None:
        return ""
    name = type(model_facts.core_model(model)).__name__
    return (
        f"mean over the {factor} micro-batches of a step, since {name} ignores num_items_in_batch; "
        "loss_weighting='original' adds up their means, as transformers does"
    )
