"""Target modules of GaLore and APOLLO (`optim_target_modules`), and their parameter groups."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Sequence

from torch import nn

from trainwright.errors import ArgumentError
from trainwright.optim.parameter_groups import Group

logger = logging.getLogger(__name__)

Targets = str | Sequence[str]


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
    fits = _fits(optim_target_modules, key)
    return fits if return_is_regex else fits[0]


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
                name, type(module).__name__, optimizer,
            )  # fmt: skip
    for target in [] if isinstance(targets, str) else targets:
        if not any(check_target_module_exists([target], name) for name in linear):
            logger.warning("optim_target_modules: %r fits no linear layer. %s", target, nearest(target, linear))


def check_patterns(patterns: Sequence[str], *, field: str) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ArgumentError(f"{field}: {pattern!r} is no regular expression ({error}).") from None


def nearest(wanted: str | Sequence[str], names: Sequence[str], *, count: int = 4) -> str:
    """Returns a sentence with the `count` names that are most like the wanted ones."""
    if not names:
        return "There are none."
    texts = [wanted] if isinstance(wanted, str) else list(wanted)
    scores = {name: max(_likeness(text, name) for text in texts) for name in names}
    best = sorted(names, key=lambda name: -scores[name])[:count]
    return f"The nearest names: {', '.join(best)}."


def _likeness(text: str, name: str) -> float:
    """Returns the similarity of a text to the whole name or to one part of it, whichever is higher."""
    parts = [name, *(part for part in name.split(".") if not part.isdigit())]
    return max(difflib.SequenceMatcher(None, text.lower(), part.lower()).ratio() for part in parts)


def projected_groups(model: nn.Module, chosen: set[str], settings: Group) -> list[Group]:
    """Returns two groups: the parameters that are not projected, and those that are, with their settings."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name not in chosen]},
        {"params": [p for name, p in named if name in chosen], **settings},
    ]
