"""Class of an optimizer and its arguments, by the name in `args.optim` and the text of `optim_args`."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

from packaging.version import Version
from torch import nn
from torch.optim import Optimizer

from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError, MissingPackageError, did_you_mean
from trainwright.optim.optimizer_table import OPTIMIZERS, UNSET, OptimizerSpec, Options, Package, one_process
from trainwright.optim.own_optimizers import LayerWiseDummyOptimizer, muon_groups
from trainwright.optim.parameter_groups import projected_groups, target_parameters

logger = logging.getLogger(__name__)

Kwargs = dict[str, Any]  # arguments of a class that this file knows by name only
ADAM_DEFAULTS = {"betas": (0.9, 0.999), "eps": 1e-8}


def optimizer_class_and_kwargs(args: Arguments, model: nn.Module | None = None) -> tuple[OptimizerClass, Kwargs]:
    """Returns class and keyword arguments for `args.optim`; some optimizers make their own groups, and need the model.

    Their groups are among the arguments as "params"; "optimizer_dict" (layer-wise) and "model" (LOMO) stand for what
    the class takes in place of groups. Settings that contradict the optimizer, and a missing package, are errors.
    """
    name, spec = spec_of(args)
    problems = [message for limit in spec.limits if (message := limit(name, args))]
    if problems:
        raise ArgumentError("\n".join(problems))
    given = parse_optim_args(args.optim_args)
    warn_of_unknown_names(name, given, {**spec.options, **spec.projects})
    cls = load_class(name, spec)
    kwargs = {"lr": args.learning_rate, **_from_args(spec, args), **read(name, given, spec.options), **spec.fixed}
    if "beta3" in kwargs:  # AdEMAMix takes its three in one
        first, second = kwargs["betas"]
        kwargs["betas"] = (kwargs.pop("beta1", first), kwargs.pop("beta2", second), kwargs.pop("beta3"))
    if not depends_on_the_model(spec):
        return cls, kwargs
    if model is None:
        raise ArgumentError(f"optim={name!r} depends on the model: call get_optimizer_cls_and_kwargs(args, model).")
    if spec.whole_model:
        return cls, {**kwargs, "model": model}
    if not spec.projects:
        return cls, {**kwargs, "params": muon_groups(model)}
    settings = {**read(name, given, spec.projects), **(_adam(args) if spec.projects_adam else {})}
    return _projected(cls, kwargs, model, args, settings)


def steps_in_backward(args: Arguments) -> bool:
    """Returns True if the optimizer that `args.optim` names updates weights while gradients are computed."""
    return one_process in spec_of(args)[1].limits


def spec_of(args: Arguments) -> tuple[str, OptimizerSpec]:
    """Returns the name in `args.optim` and its row of the table."""
    name = str(getattr(args.optim, "value", args.optim))
    if name not in OPTIMIZERS:
        raise ArgumentError(f"optim={name!r} is no optimizer. There are: {', '.join(sorted(OPTIMIZERS))}.")
    return name, OPTIMIZERS[name]


def depends_on_the_model(spec: OptimizerSpec) -> bool:
    """Returns True if the arguments hold groups of the model's parameters, or the model itself."""
    return spec.whole_model or bool(spec.projects) or spec.path.endswith(":MuonWithAdamW")


def _projected(
    cls: OptimizerClass, kwargs: Kwargs, model: nn.Module, args: Arguments, settings: Kwargs
) -> tuple[OptimizerClass, Kwargs]:
    name, spec = spec_of(args)
    chosen = target_parameters(model, args.optim_target_modules, optimizer=name)
    groups = projected_groups(model, chosen, settings)
    if not spec.layerwise:
        return cls, {**kwargs, "params": groups}
    parts = {
        parameter: cls([{"params": [parameter], **(settings if name in chosen else {})}], **kwargs)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return LayerWiseDummyOptimizer, {**kwargs, "params": groups, "optimizer_dict": parts}


def _from_args(spec: OptimizerSpec, args: Arguments) -> Kwargs:
    kwargs: Kwargs = {}
    if spec.adam == "always":
        kwargs |= _adam(args)
    elif spec.adam == "betas":
        kwargs["betas"] = _adam(args)["betas"]
    elif spec.adam == "if set":
        kwargs |= {name: value for name, value in _adam(args).items() if value != ADAM_DEFAULTS[name]}
    if spec.decay:
        kwargs["weight_decay"] = args.weight_decay
    if spec.warmup:
        kwargs["warmup_steps"] = args.get_warmup_steps(args.max_steps)
    return kwargs


def _adam(args: Arguments) -> Kwargs:
    return {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


OptimizerClass = Callable[..., Optimizer]


def load_class(name: str, spec: OptimizerSpec) -> OptimizerClass:
    """Imports the class of the optimizer that `args.optim` names; MissingPackageError where its package fails."""
    module, _, attribute = spec.path.partition(":")
    if spec.package is None:
        return cast(OptimizerClass, getattr(importlib.import_module(module), attribute))
    found = _version(spec.package)
    if found is not None and Version(found) < Version(spec.package.at_least):
        problem = f"{spec.package.name} {found} is older than {spec.package.at_least}"
        raise MissingPackageError(f"optim={name!r}: {problem}. {_cure(spec.package)}")
    try:
        return cast(OptimizerClass, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        problem = f"the package {spec.package.name} is not installed"
        if found is not None:
            problem = f"{spec.package.name} {found} is installed, but {attribute} cannot be imported: {error}"
        raise MissingPackageError(f"optim={name!r}: {problem}. {_cure(spec.package)}") from error


def _version(package: Package) -> str | None:
    try:
        return importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cure(package: Package) -> str:
    if package.at_least == "0":
        return f"Install it: pip install --upgrade {package.install}"
    return f"Install it: pip install --upgrade '{package.install}>={package.at_least}'"


def parse_optim_args(text: str | None) -> dict[str, str]:
    """Splits `"a=1, b=2"` into a dict of texts."""
    values = {}
    for item in (text or "").replace(" ", "").split(","):
        if not item:
            continue
        name, sep, value = item.partition("=")
        if not sep:
            raise ArgumentError(f"optim_args={text!r}: {item!r} is no name=value. Write 'name=value,name=value'.")
        values[name] = value
    return values


def warn_of_unknown_names(optimizer: str, given: Mapping[str, str], known: Options) -> None:
    """Warns of names that the optimizer does not take; transformers ignores them without a word."""
    for name in given:
        if name not in known:
            guess = did_you_mean(name, known, quoted=True)
            takes = ", ".join(sorted(known)) or "no options"
            logger.warning(
                "optim_args names %r, which has no effect: optim=%r takes %s.%s", name, optimizer, takes, guess
            )


def read(optimizer: str, given: Mapping[str, str], options: Options) -> dict[str, Any]:  # arguments of a class
    """Returns the values of those `options` that were given or have a default."""
    values = {}
    for name, option in options.items():
        value = given.get(name, option.default)
        if value is not UNSET:
            try:
                values[name] = option.convert(value) if isinstance(value, str) else value
            except ValueError as error:
                raise ArgumentError(f"optim_args: {name}={value!r} of optim={optimizer!r} must be {error}.") from None
    return values
