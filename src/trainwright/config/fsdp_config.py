"""The forms that `fsdp` and `fsdp_config` come in, brought to one: `fsdp=True` and a dict without prefixes.

What the settings do, and their defaults, belongs to the engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright._types import JSONObject
from trainwright.config.enums import FSDPOption
from trainwright.config.protocol import Arguments

SHARDING = (
    FSDPOption.FULL_SHARD,
    FSDPOption.SHARD_GRAD_OP,
    FSDPOption.NO_SHARD,
    FSDPOption.HYBRID_SHARD,
    FSDPOption.HYBRID_SHARD_ZERO2,
)
RESHARDS = {FSDPOption.FULL_SHARD: True, FSDPOption.SHARD_GRAD_OP: False}  # all that version 2 knows
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
DEFAULTS = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}
KEYS = frozenset(DEFAULTS) | {
    "version",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "cpu_offload",
    "cpu_ram_efficient_loading",
    "state_dict_type",
    "activation_checkpointing",
    "reshard_after_forward",
    "forward_prefetch",
    "backward_prefetch",
    "use_orig_params",
    "sync_module_states",
    "limit_all_gathers",
    "xla_fsdp_settings",
}


def coerce_fsdp(args: Arguments) -> list[str]:
    """Settle both fields of `args`, whose `fsdp` is set; returns the problems met."""
    try:
        config = _plain_config(args.fsdp_config)
    except (OSError, json.JSONDecodeError) as error:
        return [f"fsdp_config={args.fsdp_config!r} could not be read: {error}"]
    given: Any = args.fsdp  # what a user passed
    problems = [] if given is True else _apply_words(_words(given), config)
    if isinstance(config.get("transformer_layer_cls_to_wrap"), str):
        config["transformer_layer_cls_to_wrap"] = [config["transformer_layer_cls_to_wrap"]]
    policy = config.get("auto_wrap_policy", WRAP_POLICIES[0])
    if policy not in WRAP_POLICIES:
        problems.append(f"fsdp_config['auto_wrap_policy']={policy!r} is none of {', '.join(WRAP_POLICIES)}.")
    if unknown := sorted(set(config) - KEYS):
        problems.append(f"fsdp_config has unknown keys {unknown}. Known: {', '.join(sorted(KEYS))}.")
    args.fsdp, args.fsdp_config = True, {**DEFAULTS, **config}
    return problems


def _plain_config(value: JSONObject | str | None) -> JSONObject:
    config = json.loads(Path(value).read_text(encoding="utf-8")) if isinstance(value, str) else value or {}
    return {key.removeprefix("fsdp_"): setting for key, setting in config.items()}


def _words(value: str | Sequence[Any]) -> list[str]:
    parts = value.split() if isinstance(value, str) else value
    return [str(getattr(part, "value", part)).lower() for part in parts]


def _apply_words(words: Sequence[str], config: JSONObject) -> list[str]:
    """Adds the meaning of the older words to `config`, without a change of its entries; returns problems."""
    problems = []
    version = int(config.get("version", 2))
    for word in words:
        if word in ("true", FSDPOption.AUTO_WRAP):
            continue
        if word == FSDPOption.OFFLOAD:
            config.setdefault("cpu_offload", True)
        elif word not in [option.value for option in SHARDING]:
            known = ", ".join(option.value for option in FSDPOption)
            problems.append(f"fsdp: {word!r} is not an option. Allowed: True, or words of {known}.")
        elif version != 2:
            config.setdefault("reshard_after_forward", word)
        elif FSDPOption(word) in RESHARDS:
            config.setdefault("reshard_after_forward", RESHARDS[FSDPOption(word)])
        else:
            problems.append(f"fsdp={word!r} exists in version 1 only. Add 'version': 1 to fsdp_config, or use another.")
    return problems
