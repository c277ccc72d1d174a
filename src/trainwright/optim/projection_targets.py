"""`optim_target_modules`: which layers GaLore and APOLLO project, and the parameter groups that say so."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from trainwright.errors import ArgumentError

logger = logging.getLogger(__name__)

Targets = str | Sequence[str]


def check_target_module_exists(optim_target_modules: Targets, key: str, return_is_regex: bool = False) -> Any:
    """Whether the module named `key` is a target; with `return_is_regex`, also whether only a pattern says so.

    Text is a pattern for the whole name. A list holds whole names, parts of names, or patterns for whole names.
    """
    if isinstance(optim_target_modules, str):
        found = re.fullmatch(optim_target_modules, key) is not None
        is_regex = optim_target_modules != key
    elif any(target in key for target in optim_target_modules):
        found, is_regex = True, False
    else:
        found = is_regex = any(re.fullmatch(target, key) for target in optim_target_modules)
    return (found, is_regex) if return_is_regex else found


def target_parameters(model: nn.Module, targets: Any, *, optimizer: str) -> set[str]:
    """Names of the weights of the linear layers that `optim_target_modules` means.

    Raises:
        ArgumentError: none are named, or nothing fits.
    """
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
        chosen = [name for name in linear if check_target_module_exists(targets, name)]
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
        found, is_regex = check_target_module_exists(targets, name, return_is_regex=True)
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


def nearest(wanted: Any, names: Sequence[str], *, count: int = 4) -> str:
    """A sentence with the names that are most like what was wanted."""
    if not names:
        return "There are none."
    texts = [wanted] if isinstance(wanted, str) else list(wanted)
    scores = {name: max(_likeness(text, name) for text in texts) for name in names}
    best = sorted(names, key=lambda name: -scores[name])[:count]
    return f"The nearest names: {', '.join(best)}."


def _likeness(text: str, name: str) -> float:
    """Of the text with the whole name or with one part of it, whichever is more alike."""
    parts = [name, *(part for part in name.split(".") if not part.isdigit())]
    return max(difflib.SequenceMatcher(None, text.lower(), part.lower()).ratio() for part in parts)


def projected_groups(model: nn.Module, chosen: set[str], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Two groups: the parameters that are not projected, and those that are, with their settings."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name not in chosen]},
        {"params": [p for name, p in named if name in chosen], **settings},
    ]
