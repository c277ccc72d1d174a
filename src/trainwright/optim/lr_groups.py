"""Learning rates that differ between parameters: `layerwise_lr_decay` and `lr_groups`.

A parameter's own rate replaces `learning_rate` in its group; the schedule multiplies it like any other.

`layerwise_lr_decay` = d (discriminative fine-tuning, Howard & Ruder 2018; as in ELECTRA and BEiT): the layers of a
stack are numbered in the names of their parameters, 0 to L-1, bottom to top, and

    head, pooler, final norm: learning_rate     layer i: learning_rate x d^(L-i)     embeddings: learning_rate x d^(L+1)

so with d=0.5, L=2 and 1e-3 the head has 1e-3, layer 1 has 5e-4, layer 0 has 2.5e-4, the embeddings 1.25e-4. An encoder
and a decoder are two stacks, each counted from its own top; the embeddings are below the taller one.

`lr_groups` maps regular expressions, searched in the parameter's name, to a rate (a number) or a factor (text such as
"0.1x") of the rate that the parameter would have otherwise. The first pattern that fits decides.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import nn

from trainwright.config.coerce import parse_factor
from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError
from trainwright.model_facts import embedding_ids
from trainwright.optim.parameter_groups import Group
from trainwright.optim.projection_targets import check_patterns, nearest

_NUMBERED = re.compile(r"^(.*?)\.?(?<![^.])(\d+)\.")  # what is before the first number, and that number


def is_asked_for(args: Arguments) -> bool:
    """Returns True if `args` set a rate for single parameters; arguments of transformers lack both fields."""
    decay = getattr(args, "layerwise_lr_decay", None)
    return bool(getattr(args, "lr_groups", None)) or decay not in (None, 1, 1.0)


def own_rates(model: nn.Module, args: Arguments) -> dict[str, float]:
    """Returns the base rate of each trainable parameter, by name; ArgumentError where a pattern fits none."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    decay = getattr(args, "layerwise_lr_decay", None)
    factors = dict.fromkeys(names, 1.0) if decay is None else layer_factors(model, decay)
    rates = {name: args.learning_rate * factors[name] for name in names}
    return _with_patterns(rates, getattr(args, "lr_groups", None) or {}, model)


def layer_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """Returns the factor of `layerwise_lr_decay` for each parameter, by name; it needs numbered layers."""
    names = [name for name, _ in model.named_parameters()]
    layers = {name: (match[1], int(match[2])) for name in names if (match := _NUMBERED.match(name))}
    if not layers:
        raise ArgumentError(
            f"layerwise_lr_decay={decay} counts the layers by the numbers in their names, and {type(model).__name__} "
            f"has none ({', '.join(names[:3])}, ...). Use lr_groups, for example {{'{names[0]}': '0.5x'}}."
        )
    heights: dict[str, int] = defaultdict(int)
    for stack, index in layers.values():
        heights[stack] = max(heights[stack], index + 1)
    weights = embedding_ids(model)
    embeddings = {name for name, p in model.named_parameters() if id(p) in weights or "embed" in name.lower()}

    def distance(name: str) -> int:
        """Returns the distance from the top: 0 for the head."""
        if name in layers:
            stack, index = layers[name]
            return heights[stack] - index
        return max(heights.values()) + 1 if name in embeddings else 0

    return {name: float(decay) ** distance(name) for name in names}


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


def split(groups: Iterable[Group], rates: Mapping[int, float]) -> list[Group]:
    """Splits each group by the rates of its parameters (given by `id`), the highest first."""
    result: list[Group] = []
    for group in groups:
        by_rate: dict[float, list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            if id(parameter) in rates:  # frozen ones have none
                by_rate[rates[id(parameter)]].append(parameter)
        result += [{**group, "params": by_rate[rate], "lr": rate} for rate in sorted(by_rate, reverse=True)]
    return result


def by_id(model: nn.Module, rates: Mapping[str, float]) -> dict[int, float]:
    """Converts rates by name into rates by `id` of the parameter."""
    return {id(p): rates[name] for name, p in model.named_parameters() if name in rates}
