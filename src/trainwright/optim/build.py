"""From arguments to an optimizer: the class and its arguments by name, and the instance over parameter groups."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from trainwright.errors import ArgumentError, NotYetError
from trainwright.optim.table import OPTIMIZERS, OptimizerSpec


def optimizer_class_and_kwargs(args: Any) -> tuple[Any, dict[str, Any]]:
    """Class and keyword arguments (all but the parameters) for `args.optim`.

    Raises:
        NotYetError: an optimizer that this version does not have yet.
        ArgumentError: `optim_args` with a name or a form that this optimizer does not take.
    """
    name = str(getattr(args.optim, "value", args.optim))
    spec = OPTIMIZERS.get(name)
    if spec is None:
        raise NotYetError(
            f"optim={name!r} is not there yet; this version has {', '.join(sorted(OPTIMIZERS))}. "
            "Any torch optimizer works through optimizers=(optimizer, None) or optimizer_cls_and_kwargs=(cls, kwargs)."
        )
    module, _, attribute = spec.path.partition(":")
    kwargs: dict[str, Any] = {"lr": args.learning_rate, **_options(name, spec, args.optim_args)}
    if spec.adam:
        kwargs |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return getattr(importlib.import_module(module), attribute), {**kwargs, **spec.fixed}


def build_optimizer(cls: Any, kwargs: dict[str, Any], model: nn.Module, groups: list[dict[str, Any]]) -> Any:
    """An optimizer over the groups; a factory (a class that is no Optimizer) is made and called with the model."""
    if is_optimizer_factory(cls):
        return cls()(model, **kwargs)
    return cls(groups, **kwargs)


def is_optimizer_factory(optimizer_cls_or_factory: Any) -> bool:
    """Whether this is something that makes an optimizer from a whole model, rather than an optimizer class."""
    return not (
        isinstance(optimizer_cls_or_factory, type) and issubclass(optimizer_cls_or_factory, torch.optim.Optimizer)
    )


def parse_optim_args(text: str | None) -> dict[str, str]:
    """`"a=1, b=2"` as a dict of texts."""
    values = {}
    for item in (text or "").replace(" ", "").split(","):
        if not item:
            continue
        name, sep, value = item.partition("=")
        if not sep:
            raise ArgumentError(f"optim_args={text!r}: {item!r} is no name=value. Write 'name=value,name=value'.")
        values[name] = value
    return values


def _options(name: str, spec: OptimizerSpec, text: str | None) -> dict[str, Any]:
    options = {}
    for key, value in parse_optim_args(text).items():
        if key not in spec.options:
            takes = ", ".join(sorted(spec.options)) or "no options"
            raise ArgumentError(f"optim_args names {key!r}, which optim={name!r} does not take; it takes {takes}.")
        options[key] = spec.options[key](value)
    return options
