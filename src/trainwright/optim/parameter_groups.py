"""Parameter groups: which parameters decay (not biases and norms), are projected, or have a rate of their own."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from torch import nn

from trainwright.config.coerce import parse_factor
from trainwright.config.fields import get_value
from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError
from trainwright.support.model_facts import embedding_ids

logger = logging.getLogger(__name__)

Group = dict[str, Any]  # "params" and the settings of a group, as torch has them
Targets = str | Sequence[str]

# Searched in the lower-case path of a parameter: biases, and norm layers by the names that models give them.
NO_DECAY_PATTERNS = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
NO_DECAY_LAYERS: tuple[type[nn.Module], ...] = (nn.LayerNorm,)
_NUMBERED = re.compile(r"^(.*?)\.?(?<![^.])(\d+)\.")  # prefix before the first number, and the number


def get_parameter_names(
    model: nn.Module, forbidden_layer_types: Iterable[type], forbidden_layer_names: Sequence[str] | None = None
) -> list[str]:
    """Lists the parameters outside of the given layer types and name patterns.

    Args:
        model: the module.
        forbidden_layer_types: types of layers to exclude.
        forbidden_layer_names: patterns, searched in the path relative to each enclosing module, in lower case.

    Returns:
        Names of the parameters.
    """
    types = tuple(forbidden_layer_types)
    patterns = [re.compile(p) for p in forbidden_layer_names or ()]
    names = []
    for child_name, child in model.named_children():
        if isinstance(child, types):
            continue
        below = get_parameter_names(child, types, forbidden_layer_names)
        names += [f"{child_name}.{n}" for n in below if not _matches(patterns, f"{child_name}.{n}")]
    return names + [n for n in model._parameters if not _matches(patterns, n)]


def decay_groups(model: nn.Module, decay_names: Iterable[str], weight_decay: float) -> list[Group]:
    """Returns the trainable parameters with and without weight decay as two groups, in the model's order."""
    decays = set(decay_names)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trainable if name in decays], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in decays], "weight_decay": 0.0},
    ]


def with_decay(
    groups: Iterable[Group], model: nn.Module, decay_names: Iterable[str], weight_decay: float
) -> list[Group]:
    """The groups with a decay in each; split by the two kinds of parameters if any decays."""
    if weight_decay == 0:
        return [{"weight_decay": 0.0, **group} for group in groups]
    names = set(decay_names)
    decays = {id(p) for name, p in model.named_parameters() if name in names}
    return [
        {"weight_decay": value, **group, "params": params}
        for group in groups
        for kind, value in ((True, weight_decay), (False, 0.0))
        if (params := [p for p in group["params"] if (id(p) in decays) is kind])
    ]


def _matches(patterns: Iterable[re.Pattern[str]], name: str) -> bool:
    return any(p.search(name.lower()) for p in patterns)


# -- target modules of GaLore and APOLLO -------------------------------------------------------------------------------


def check_target_module_exists(
    optim_target_modules: Targets, key: str, return_is_regex: bool = False
) -> bool | tuple[bool, bool]:
    """Returns True if the module named `key` is a target.

    Args:
        optim_target_modules: a pattern for the whole name, or a list of names, parts of names, and patterns.
        key: name of a module.
        return_is_regex: return also whether only a pattern fits.

    Returns:
        Whether the module is a target; with `return_is_regex` a pair with whether only a pattern fits.
    """
    fits, is_regex = _fits(optim_target_modules, key)
    return (fits, is_regex) if return_is_regex else fits


def _fits(targets: Targets, key: str) -> tuple[bool, bool]:
    """Returns two bools: the name is a target; only a pattern fits it."""
    if isinstance(targets, str):
        return re.fullmatch(targets, key) is not None, targets != key
    if any(target in key for target in targets):
        return True, False
    found = any(re.fullmatch(target, key) for target in targets)
    return found, found


def target_parameters(model: nn.Module, targets: object, *, optimizer: str) -> set[str]:
    """Returns the names of the weights of the linear layers that `optim_target_modules` fits, which must be some."""
    if not targets or not isinstance(targets, (str, Sequence)):
        raise ArgumentError(
            f"optim={optimizer!r} projects the gradients of some linear layers, and optim_target_modules={targets!r} "
            "names none. Give parts of their names (['attn', 'mlp']), a regular expression, or 'all-linear'."
        )
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if isinstance(targets, str) and targets.replace("_", "-") == "all-linear":
        chosen = linear
    else:
        check_patterns([targets] if isinstance(targets, str) else targets, field="optim_target_modules")
        chosen = [name for name in linear if _fits(targets, name)[0]]
        _say_what_is_left_out(model, targets, linear, optimizer=optimizer)
    if not chosen:
        raise ArgumentError(
            f"optim_target_modules={targets!r} fits no linear layer of {type(model).__name__}. "
            f"{nearest(targets, linear)} A list holds parts of names; text is a regular expression for a whole name."
        )
    return {f"{name}.weight" for name in chosen}


def _say_what_is_left_out(model: nn.Module, targets: Targets, linear: Sequence[str], *, optimizer: str) -> None:
    known = set(linear)
    for name, module in model.named_modules():
        found, is_regex = _fits(targets, name)
        if found and not is_regex and name not in known and not list(module.children()):
            logger.warning(
                "optim_target_modules fits %s, a %s; %s projects linear layers only, so it is trained as it is.",
                name,
                type(module).__name__,
                optimizer,
            )
    for target in [] if isinstance(targets, str) else targets:
        if not any(check_target_module_exists([target], name) for name in linear):
            logger.warning("optim_target_modules: %r fits no linear layer. %s", target, nearest(target, linear))


def check_patterns(patterns: Sequence[str], *, field: str) -> None:
    """Raises ArgumentError for a pattern that is not a regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ArgumentError(f"{field}: {pattern!r} is not a regular expression ({error}).") from None


def nearest(wanted: str | Sequence[str], names: Sequence[str], *, count: int = 4) -> str:
    """Returns a sentence with the `count` names that are most like the wanted ones."""
    if not names:
        return "There are none."
    texts = [wanted] if isinstance(wanted, str) else list(wanted)

    def likeness(name: str) -> float:
        """Returns the similarity of a wanted name to the whole name or to one part of it, whichever is highest."""
        parts = [name, *(part for part in name.split(".") if not part.isdigit())]
        return max(SequenceMatcher(None, text.lower(), part.lower()).ratio() for text in texts for part in parts)

    return f"The nearest names: {', '.join(sorted(names, key=likeness, reverse=True)[:count])}."


def projected_groups(model: nn.Module, chosen: set[str], settings: Group) -> list[Group]:
    """Returns two groups: parameters without projection, and projected parameters with their settings."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name not in chosen]},
        {"params": [p for name, p in named if name in chosen], **settings},
    ]


# -- learning rates that differ between parameters ---------------------------------------------------------------------


def sets_own_rates(args: Arguments) -> bool:
    """Returns True if `args` set a rate for single parameters; arguments of transformers lack both fields."""
    decay = get_value(args, "layerwise_lr_decay")
    return bool(get_value(args, "lr_groups")) or decay not in (None, 1, 1.0)


def own_rates(model: nn.Module, args: Arguments) -> dict[str, float]:
    """Returns the base rate of each trainable parameter, by name; ArgumentError if a pattern fits none.

    It replaces `learning_rate` in the parameter's group; the schedule multiplies it like any other. `lr_groups` maps
    regular expressions, searched in the parameter's name, to a rate (a number) or a factor (text such as "0.1x") of the
    rate that the parameter would have otherwise. The first pattern that fits decides.
    """
    decay = get_value(args, "layerwise_lr_decay")
    factors = {} if decay is None else layer_factors(model, decay)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    rates = {name: args.learning_rate * factors.get(name, 1.0) for name in trained}
    return _with_patterns(rates, get_value(args, "lr_groups") or {}, model)


def layer_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """Returns the factor of `layerwise_lr_decay` = d for each parameter, by name; it needs numbered layers.

    Discriminative fine-tuning (Howard & Ruder 2018; as in ELECTRA and BEiT): the layers of a stack are numbered in the
    names of their parameters, 0 to L-1, bottom to top, and

        head, pooler, final norm: 1     layer i: d^(L-i)     embeddings: d^(L+1)

    so with d=0.5, L=2 and a rate of 1e-3 the head has 1e-3, layer 1 has 5e-4, layer 0 has 2.5e-4, the embeddings
    1.25e-4. An encoder and a decoder are two stacks, each counted from its own top; the embeddings are below the taller
    one.
    """
    names = [name for name, _ in model.named_parameters()]
    layers = {name: (match[1], int(match[2])) for name in names if (match := _NUMBERED.match(name))}
    if not layers:
        raise ArgumentError(
            f"layerwise_lr_decay={decay} counts the layers by the numbers in their names, and {type(model).__name__} "
            f"has none ({', '.join(names[:3])}, ...). Use lr_groups, for example {{'{names[0]}': '0.5x'}}."
        )
    heights = {stack: index + 1 for stack, index in sorted(layers.values())}  # the last index of a stack counts
    weights = embedding_ids(model)
    embeddings = {name for name, p in model.named_parameters() if id(p) in weights or "embed" in name.lower()}

    distances = dict.fromkeys(embeddings, max(heights.values()) + 1)  # from the top
    distances |= {name: heights[stack] - index for name, (stack, index) in layers.items()}
    return {name: float(decay) ** distances.get(name, 0) for name in names}


def _with_patterns(rates: dict[str, float], patterns: Mapping[str, float | str], model: nn.Module) -> dict[str, float]:
    check_patterns(list(patterns), field="lr_groups")
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in rates):
            raise ArgumentError(
                f"lr_groups: {pattern!r} fits no trainable parameter of {type(model).__name__}. "
                f"{nearest(pattern, list(rates))}"
            )
    result = {}
    for name, rate in rates.items():
        value = next((patterns[pattern] for pattern in patterns if re.search(pattern, name)), "1x")
        result[name] = rate * factor if (factor := parse_factor(value)) is not None else float(value)
    return result


def with_own_rates(groups: Iterable[Group], model: nn.Module, args: Arguments) -> list[Group]:
    """Splits each group by the rates that `args` give its parameters, the highest first."""
    by_name = own_rates(model, args)
    result = list[Group]()
    rates = {id(p): by_name[name] for name, p in model.named_parameters() if name in by_name}
    for group in groups:
        by_rate: dict[float, list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            if id(parameter) in rates:  # frozen ones have none
                by_rate[rates[id(parameter)]].append(parameter)
        result += [{**group, "params": by_rate[rate], "lr": rate} for rate in sorted(by_rate, reverse=True)]
    return result
