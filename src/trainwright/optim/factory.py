"""Builds an optimizer: its class and arguments by the name in `args.optim`, its parameter groups by the model.

The arguments follow from the fields of the run and from the text of `optim_args`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import shlex
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from types import MethodType
from typing import Any, cast

import torch
from packaging.requirements import Requirement
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from trainwright.config import resolve
from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError, MissingOptimizerError, did_you_mean
from trainwright.optim import parameter_groups
from trainwright.optim.optimizer_table import OPTIMIZERS, UNSET, OptimizerSpec, Options, one_process
from trainwright.optim.own_optimizers import LayerWiseDummyOptimizer, muon_groups, step_in_backward
from trainwright.optim.parameter_groups import Group, sets_own_rates
from trainwright.support.clean_stack import import_compiler
from trainwright.support.replaced import current

logger = logging.getLogger(__name__)

OptimizerClass = Callable[..., Optimizer]
Kwargs = dict[str, Any]  # arguments of a class that this file knows by name only
State = dict[str, Any]  # as torch's `state_dict`
Convert = Callable[[State], State]
Foreign = Any  # an object of an optional package: its attributes are read and replaced
PROJECTORS = (
    "galore_torch.galore_projector:GaLoreProjector",
    "apollo_torch.svd_projector:GaLoreProjector",
    "apollo_torch.random_projector:GradientProjector",
)
ADAM_DEFAULTS = {"betas": (0.9, 0.999), "eps": 1e-8}


# -- the optimizer of a model -----------------------------------------------------------------------------------------


def build_optimizer(
    cls: OptimizerClass, kwargs: Kwargs, model: nn.Module, *, args: Arguments, decay_names: Iterable[str]
) -> Optimizer:
    """Builds an optimizer with the decay and the rate that `args` give each parameter.

    `cls` is a class of optimizers, or a factory that is made and called with the model. Of its arguments `kwargs`,
    "params" (groups), "optimizer_dict" (layer-wise; or groups, as sentence-transformers has them) or "model" stand in
    place of groups made here. Parameters in `decay_names` have weight decay.
    """
    import_compiler()
    kwargs = dict(kwargs)
    if current("is_optimizer_factory", is_optimizer_factory)(cls) or "model" in kwargs:
        return _over_the_model(cls, kwargs, model, args)
    holds_groups = isinstance(kwargs.get("optimizer_dict"), list)
    given = kwargs.pop("optimizer_dict" if holds_groups else "params", None)
    groups = _groups(given, model, args, decay_names)
    if "optimizer_dict" in kwargs:
        return _layerwise(cls, kwargs, model, args, groups)
    return adapted(cls(groups, **kwargs), model)


def is_optimizer_factory(optimizer_cls_or_factory: object) -> bool:
    """Returns True if the value makes an optimizer from a whole model: any but a class of optimizers.

    Args:
        optimizer_cls_or_factory: first element of `optimizer_cls_and_kwargs`.
    """
    return not (isinstance(optimizer_cls_or_factory, type) and issubclass(optimizer_cls_or_factory, Optimizer))


def _groups(
    given: Iterable[Group] | None, model: nn.Module, args: Arguments, decay_names: Iterable[str]
) -> list[Group]:
    if given is None:
        groups = parameter_groups.decay_groups(model, decay_names, args.weight_decay)
    elif depends_on_the_model(find_optimizer_spec(args)[1]):  # made by the name
        groups = parameter_groups.with_decay(given, model, decay_names, args.weight_decay)
    else:  # a user's own, which say everything themselves
        groups = list(given)
    return parameter_groups.with_own_rates(groups, model, args) if sets_own_rates(args) else groups


def _over_the_model(cls: OptimizerClass, kwargs: Kwargs, model: nn.Module, args: Arguments) -> Optimizer:
    name = getattr(cls, "__name__", type(cls).__name__)
    if sets_own_rates(args):
        raise ArgumentError(
            f"layerwise_lr_decay and lr_groups make parameter groups, and {name} takes the whole model. Drop them, or "
            "choose another optimizer."
        )
    if current("is_optimizer_factory", is_optimizer_factory)(cls):
        return cast(Callable[[], OptimizerClass], cls)()(model, **kwargs)
    if args.weight_decay > 0:
        logger.warning("weight_decay=%s has no effect with %s, which has no parameter groups.", args.weight_decay, name)
    _say_nothing_is_clipped(args)
    release_lomo_hooks(model)
    with _LomoHooks():
        optimizer = cls(kwargs.pop("model"), **kwargs)
    return adapted(optimizer, model)


def _layerwise(
    cls: OptimizerClass, kwargs: Kwargs, model: nn.Module, args: Arguments, groups: list[Group]
) -> Optimizer:
    parts: dict[nn.Parameter, Optimizer] = kwargs.pop("optimizer_dict")
    _say_nothing_is_clipped(args)
    for group in groups:
        own: Group = {name: group[name] for name in ("lr", "weight_decay") if name in group}
        for parameter in parts.keys() & {*group["params"]}:
            parts[parameter].param_groups[0].update(own)
    for part in parts.values():
        adapted(part, model)
    optimizer = cls(parts, **kwargs)
    step_in_backward(cast(LayerWiseDummyOptimizer, optimizer))
    return optimizer


def _say_nothing_is_clipped(args: Arguments) -> None:
    if args.max_grad_norm:
        logger.info(
            "max_grad_norm=%s has no effect with optim=%r: gradients are used and freed during the backward pass.",
            args.max_grad_norm,
            find_optimizer_spec(args)[0],
        )


# -- its class and arguments, by its name -----------------------------------------------------------------------------


def optimizer_class_and_kwargs(args: Arguments, model: nn.Module | None = None) -> tuple[OptimizerClass, Kwargs]:
    """Returns class and keyword arguments for `args.optim`; ArgumentError where settings contradict the optimizer.

    Groups of its own are among them as "params"; "optimizer_dict" (layer-wise) and "model" (LOMO) replace groups.
    """
    name, spec = find_optimizer_spec(args)
    problems = [message for limit in spec.limits if (message := limit(name, args))]
    if not problems and resolve.plain_tensors in spec.limits and model is not None and has_matrices_in_parts(model):
        problems = [resolve.mixes_tensors(name, "a model that was loaded in parts", "load the model whole")]
    if problems:
        raise ArgumentError("\n".join(problems))
    given = current("_parse_optim_args", parse_optim_args)(args.optim_args)
    warn_unknown_names(name, given, {**spec.options, **spec.projects})
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
        groups = muon_groups(model, split_qkv=kwargs.pop("split_qkv"))
        return cls, {**kwargs, "params": groups}
    settings = {**read(name, given, spec.projects), **(_adam(args) if spec.projects_adam else {})}
    return _projected(cls, kwargs, model, args, settings)


def has_matrices_in_parts(model: nn.Module) -> bool:
    """Returns True if the model trains matrices that are distributed tensors (tp_size, fsdp_size)."""
    return any(p.requires_grad and p.ndim > 1 and hasattr(p, "device_mesh") for p in model.parameters())


def steps_in_backward(args: Arguments) -> bool:
    """Returns True if the optimizer that `args.optim` names updates weights while gradients are computed."""
    return one_process in find_optimizer_spec(args)[1].limits


def find_optimizer_spec(args: Arguments) -> tuple[str, OptimizerSpec]:
    """Returns the name in `args.optim` and its row of the table."""
    name = str(getattr(args.optim, "value", args.optim))
    if name not in OPTIMIZERS:
        raise ArgumentError(f"optim={name!r} is not an optimizer. There are: {', '.join(sorted(OPTIMIZERS))}.")
    return name, OPTIMIZERS[name]


def depends_on_the_model(spec: OptimizerSpec) -> bool:
    """Returns True if the arguments hold groups of the model's parameters, or the model itself."""
    return spec.whole_model or bool(spec.projects) or spec.path.endswith(":MuonWithAdamW")


def _projected(
    cls: OptimizerClass, kwargs: Kwargs, model: nn.Module, args: Arguments, settings: Kwargs
) -> tuple[OptimizerClass, Kwargs]:
    name, spec = find_optimizer_spec(args)
    chosen = parameter_groups.target_parameters(model, args.optim_target_modules, optimizer=name)
    groups = parameter_groups.projected_groups(model, chosen, settings)
    if not spec.layerwise:
        return cls, {**kwargs, "params": groups}
    parts = {
        p: cls([{"params": [p], **(settings if name in chosen else {})}], **kwargs)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return LayerWiseDummyOptimizer, {**kwargs, "params": groups, "optimizer_dict": parts}


def _from_args(spec: OptimizerSpec, args: Arguments) -> Kwargs:
    kwargs: Kwargs = {}
    if spec.adam == "betas":
        kwargs["betas"] = _adam(args)["betas"]
    elif spec.adam != "no":
        always = spec.adam == "always"
        adam = _adam(args)
        kwargs |= {name: value for name, value in adam.items() if always or value != ADAM_DEFAULTS[name]}
    if spec.decay:
        kwargs["weight_decay"] = args.weight_decay
    if spec.warmup:
        kwargs["warmup_steps"] = args.get_warmup_steps(args.max_steps)
    if spec.seeded:
        kwargs["seed"] = args.seed
    return kwargs


def _adam(args: Arguments) -> Kwargs:
    return {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def load_class(name: str, spec: OptimizerSpec) -> OptimizerClass:
    """Imports the class of the optimizer that `args.optim` names; MissingOptimizerError where its package fails."""
    module, _, attribute = spec.path.partition(":")
    if spec.package is None:
        return cast(OptimizerClass, getattr(importlib.import_module(module), attribute))
    package = Requirement(spec.package)
    found = None
    cure = f"Install it: pip install --upgrade {shlex.quote(spec.package)}"
    with suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.version(package.name)
    if found is not None and not package.specifier.contains(found, prereleases=True):
        oldest = str(package.specifier).removeprefix(">=")
        raise MissingOptimizerError(f"optim={name!r}: {package.name} {found} is older than {oldest}. {cure}")
    try:
        return cast(OptimizerClass, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        problem = f"the package {package.name} is not installed"
        if found is not None:
            problem = f"{package.name} {found} is installed, but {attribute} cannot be imported: {error}"
        raise MissingOptimizerError(f"optim={name!r}: {problem}. {cure}") from error


def parse_optim_args(text: str | None) -> dict[str, str]:
    """Splits `"a=1, b=2"` into a dict of texts."""
    values = {}
    for item in filter(None, (text or "").replace(" ", "").split(",")):
        name, sep, value = item.partition("=")
        if not sep:
            raise ArgumentError(f"optim_args={text!r}: {item!r} must be name=value. Write 'name=value,name=value'.")
        values[name] = value
    return values


def warn_unknown_names(optimizer: str, given: Mapping[str, str], known: Options) -> None:
    """Warns of names that the optimizer does not take; transformers ignores them without a word."""
    takes = ", ".join(sorted(known)) or "no options"
    for name in (name for name in given if name not in known):
        guess = did_you_mean(name, known, quoted=True)
        logger.warning("optim_args names %r, which has no effect: optim=%r takes %s.%s", name, optimizer, takes, guess)


def read(optimizer: str, given: Mapping[str, str], options: Options) -> Kwargs:
    """Returns the values of all `options` that were given or have a default."""
    values = {}
    for name, option in options.items():
        value = given.get(name, option.default)
        if value is not UNSET:
            try:
                values[name] = option.convert(value) if isinstance(value, str) else value
            except ValueError as error:
                raise ArgumentError(f"optim_args: {name}={value!r} of optim={optimizer!r} must be {error}.") from None
    return values


# -- optimizers of other packages, made savable and resumable in place ------------------------------------------------
# A checkpoint holds plain tensors and numbers, and restores exactly the optimizer that it was made from. GaLore and
# APOLLO keep objects in their state, GrokAdamW keeps it under the parameters themselves, AdaLomo outside of it.


def _saves_as(
    optimizer: Foreign, encode: Convert, decode: Callable[[State], None], loadable: Convert = lambda state: state
) -> None:
    """Replaces saving by `encode`, and loading by a load of the `loadable` part and `decode` of the rest."""
    save = optimizer.state_dict
    load = optimizer.load_state_dict

    def load_state_dict(state_dict: State) -> None:
        load(loadable(state_dict))
        decode(state_dict)

    optimizer.state_dict = lambda: encode(save())
    optimizer.load_state_dict = load_state_dict


# -- GaLore, APOLLO: each parameter's state has a projector object --------------------------------------------------


def _plain_projectors(optimizer: Foreign, model: nn.Module) -> None:
    def encode(state_dict: State) -> State:
        states = {key: dict(state) for key, state in state_dict["state"].items()}
        for state in states.values():
            if "projector" in state:
                kind = type(state["projector"])
                state["projector"] = {**vars(state["projector"]), "class": f"{kind.__module__}:{kind.__name__}"}
        return {**state_dict, "state": states}

    def loadable(state_dict: State) -> State:  # torch would take the projectors' texts apart
        states = state_dict["state"].items()
        return {**state_dict, "state": {k: {n: v for n, v in s.items() if n != "projector"} for k, s in states}}

    def decode(state_dict: State) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for parameter, key in zip(parameters, keys, strict=True):
            packed = state_dict["state"].get(key, {}).get("projector")
            if packed is not None:
                optimizer.state[parameter]["projector"] = _unpacked(packed, parameter.device)

    _saves_as(optimizer, encode, decode, loadable)


def _unpacked(packed: State, device: torch.device) -> Foreign:
    kind = packed["class"]
    if kind not in PROJECTORS:
        raise ValueError(f"{kind!r} is not a projector of GaLore or APOLLO")
    module, _, name = kind.partition(":")
    cls = getattr(importlib.import_module(module), name)
    projector = cls.__new__(cls)
    vars(projector).update({name: _on(device, value) for name, value in packed.items() if name != "class"})
    return projector


def _on(device: torch.device, value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_on(device, inner) for inner in value] if isinstance(value, list) else value


# -- GrokAdamW: its state is in the groups, by parameter ------------------------------------------------------------


def _plain_groups(optimizer: Foreign, model: nn.Module) -> None:
    def encode(state_dict: State) -> State:
        pairs = zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
        packed = [{**shown, "state": [own.get("state", {}).get(p) for p in own["params"]]} for shown, own in pairs]
        return {**state_dict, "param_groups": packed}

    def decode(state_dict: State) -> None:
        for group in optimizer.param_groups:
            saved = group.get("state", {})
            # transformers' checkpoints have it by parameter, in the order of the parameters
            states = list(saved.values()) if isinstance(saved, dict) else saved
            pairs = zip(group["params"], states, strict=False)
            group["state"] = {p: state for p, state in pairs if state is not None}

    _saves_as(optimizer, encode, decode)


# -- LOMO: the update is part of the backward pass ------------------------------------------------------------------


def _fused_backward(optimizer: Foreign, model: nn.Module) -> None:
    """Makes `step()` do nothing: the engine calls `fused_backward(loss, lr)` in place of `loss.backward()`."""
    optimizer.step = MethodType(lambda self, closure=None: None, optimizer)
    kept = [name for name in ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "step_num") if hasattr(optimizer, name)]

    def encode(state_dict: State) -> State:
        return {**state_dict, "adalomo": {name: getattr(optimizer, name) for name in kept}} if kept else state_dict

    def decode(state_dict: State) -> None:
        for name, value in state_dict.get("adalomo", {}).items():
            if not isinstance(value, dict):
                setattr(optimizer, name, value)
            else:
                for key, tensor in value.items():
                    getattr(optimizer, name)[key].copy_(tensor)

    _saves_as(optimizer, encode, decode)


LOMO_HOOKS: MutableMapping[nn.Parameter, list[RemovableHandle]] = WeakTensorKeyDictionary()


class _LomoHooks(TorchFunctionMode):
    """Keeps the handles of hooks that are added to parameters while it is entered; LOMO drops its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # as torch has it
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.register_hook:
            LOMO_HOOKS.setdefault(args[0], []).append(result)
        return result


def release_lomo_hooks(model: nn.Module) -> None:
    """Removes the hooks of earlier LOMO optimizers of ours from the parameters, which they would still update."""
    for parameter in model.parameters():
        for handle in LOMO_HOOKS.pop(parameter, []):
            handle.remove()


# -- bitsandbytes: embeddings keep states of 32 bits -----------------------------------------------------------------


def _embeddings_in_32_bits(optimizer: Foreign, model: nn.Module) -> None:
    """Sets 32-bit states for embeddings, in a manager of this optimizer alone: the package's is shared by all."""
    if getattr(optimizer, "args", None) is None or optimizer.args.optim_bits != 8:
        return
    own: Foreign = object.__new__(type(optimizer.mng))
    settings = vars(optimizer.mng).items()
    own.__dict__.update({name: value.copy() if hasattr(value, "copy") else value for name, value in settings})
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            own.register_module_override(module, "weight", {"optim_bits": 32})
    optimizer.mng = own


ADAPTERS: dict[str, Callable[[Foreign, nn.Module], None]] = {
    "apollo_torch": _plain_projectors,
    "bitsandbytes": _embeddings_in_32_bits,
    "galore_torch": _plain_projectors,
    "grokadamw": _plain_groups,
    "lomo_optim": _fused_backward,
}


def adapted(optimizer: Foreign, model: nn.Module) -> Optimizer:
    """Returns an optimizer that can be saved and resumed: some of other packages are changed for that."""
    if (complete := ADAPTERS.get(type(optimizer).__module__.partition(".")[0])) is not None:
        complete(optimizer, model)
    return cast(Optimizer, optimizer)
