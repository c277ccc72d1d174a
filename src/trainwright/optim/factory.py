"""Builds an optimizer over a model from a class and its arguments: parameter groups, their decay, their rates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError
from trainwright.optim.optimizer_class import Kwargs, OptimizerClass, depends_on_the_model, spec_of
from trainwright.optim.own_optimizers import LayerWiseDummyOptimizer, step_in_backward
from trainwright.optim.parameter_groups import (
    Group,
    decay_groups,
    own_rates,
    rates_by_id,
    sets_own_rates,
    split_by_rate,
    with_decay,
)

logger = logging.getLogger(__name__)


def build_optimizer(
    cls: OptimizerClass, kwargs: Kwargs, model: nn.Module, *, args: Arguments, decay_names: Iterable[str]
) -> Optimizer:
    """Builds an optimizer with the decay and the rate that `args` give each parameter.

    Args:
        cls: class of the optimizer; a factory (a class that is no Optimizer) is made and called with the model.
        kwargs: its arguments. "params" (groups), "optimizer_dict" (layer-wise; or groups, as sentence-transformers has
            them) or "model" stand in place of groups made here.
        model: the model to train.
        args: arguments of the run.
        decay_names: names of the parameters with weight decay.
    """
    kwargs = dict(kwargs)
    if is_optimizer_factory(cls) or "model" in kwargs:
        return _over_the_model(cls, kwargs, model, args)
    holds_groups = isinstance(kwargs.get("optimizer_dict"), list)
    given = kwargs.pop("optimizer_dict" if holds_groups else "params", None)
    groups = _groups(given, model, args, decay_names)
    if "optimizer_dict" in kwargs:
        return _layerwise(cls, kwargs.pop("optimizer_dict"), kwargs, model, args, groups)
    optimizer = cls(groups, **kwargs)
    _adapt(optimizer, model)
    return optimizer


def _adapt(optimizer: Optimizer, model: nn.Module) -> None:
    """Makes an optimizer of another package savable and resumable; torch's are."""
    if not type(optimizer).__module__.startswith("torch."):
        from trainwright.optim.third_party_state import adapt

        adapt(optimizer, model)


def is_optimizer_factory(optimizer_cls_or_factory: object) -> bool:
    """Returns True if the value makes an optimizer from a whole model: any but a class of optimizers.

    Args:
        optimizer_cls_or_factory: first element of `optimizer_cls_and_kwargs`.
    """
    return not (
        isinstance(optimizer_cls_or_factory, type) and issubclass(optimizer_cls_or_factory, torch.optim.Optimizer)
    )


def _groups(
    given: Iterable[Group] | None, model: nn.Module, args: Arguments, decay_names: Iterable[str]
) -> list[Group]:
    if given is None:
        groups = decay_groups(model, decay_names, args.weight_decay)
    elif depends_on_the_model(spec_of(args)[1]):  # made by the name
        groups = with_decay(given, model, decay_names, args.weight_decay)
    else:  # a user's own, which say everything themselves
        groups = list(given)
    if sets_own_rates(args):
        groups = split_by_rate(groups, rates_by_id(model, own_rates(model, args)))
    return groups


def _over_the_model(cls: OptimizerClass, kwargs: Kwargs, model: nn.Module, args: Arguments) -> Optimizer:
    name = getattr(cls, "__name__", type(cls).__name__)
    if sets_own_rates(args):
        raise ArgumentError(
            f"layerwise_lr_decay and lr_groups make parameter groups, and {name} takes the whole model. Drop them, or "
            "choose another optimizer."
        )
    if is_optimizer_factory(cls):
        return cast(Callable[[], OptimizerClass], cls)()(model, **kwargs)
    if args.weight_decay > 0:
        logger.warning("weight_decay=%s has no effect with %s, which has no parameter groups.", args.weight_decay, name)
    _say_nothing_is_clipped(args)
    from trainwright.optim.third_party_state import release_lomo_hooks

    release_lomo_hooks(model)
    optimizer = cls(kwargs.pop("model"), **kwargs)
    _adapt(optimizer, model)
    return optimizer


def _layerwise(
    cls: OptimizerClass,
    parts: dict[nn.Parameter, Optimizer],
    kwargs: Kwargs,
    model: nn.Module,
    args: Arguments,
    groups: list[Group],
) -> Optimizer:
    _say_nothing_is_clipped(args)
    for group in groups:
        own: Group = {name: group[name] for name in ("lr", "weight_decay") if name in group}
        for parameter in group["params"]:
            if parameter in parts:
                parts[parameter].param_groups[0].update(own)
    for part in parts.values():
        _adapt(part, model)
    optimizer = cls(parts, **kwargs)
    step_in_backward(cast(LayerWiseDummyOptimizer, optimizer))
    return optimizer


def _say_nothing_is_clipped(args: Arguments) -> None:
    if args.max_grad_norm:
        logger.info(
            "max_grad_norm=%s has no effect with optim=%r: gradients are used and freed during the backward pass.",
            args.max_grad_norm, spec_of(args)[0],
        )  # fmt: skip
