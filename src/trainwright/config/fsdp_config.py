"""The forms that `fsdp` and `fsdp_config` come in, brought to one: `fsdp=True` and a dict without prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainwright._types import JSONObject
from trainwright.config.enums import FSDPOption, word
from trainwright.config.protocol import Arguments
from trainwright.support.door import parse_json, read_settings

SHARDING = (
    FSDPOption.FULL_SHARD,
    FSDPOption.SHARD_GRAD_OP,
    FSDPOption.NO_SHARD,
    FSDPOption.HYBRID_SHARD,
    FSDPOption.HYBRID_SHARD_ZERO2,
)
# In version 2, whether the word frees parameters after the forward pass; `no_shard` keeps whole models.
RESHARDS: dict[str, bool] = {
    FSDPOption.FULL_SHARD: True,
    FSDPOption.SHARD_GRAD_OP: False,
    FSDPOption.HYBRID_SHARD: True,
    FSDPOption.HYBRID_SHARD_ZERO2: False,
}
HYBRID = (FSDPOption.HYBRID_SHARD, FSDPOption.HYBRID_SHARD_ZERO2)  # parts within a node, copies between nodes
XLA = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
OF_VERSION_1 = ("forward_prefetch", "backward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers")
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
DEFAULTS = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}
STATE_DICT_TYPE = "state_dict_type"  # also for a model that was loaded in parts, without `fsdp`
OF_BOTH_VERSIONS = (
    "version",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "cpu_offload",
    "cpu_ram_efficient_loading",
    STATE_DICT_TYPE,
    "activation_checkpointing",
    "reshard_after_forward",
)
KEYS = frozenset({*DEFAULTS, *XLA, *OF_BOTH_VERSIONS, *OF_VERSION_1})


def read_config(given: Any) -> JSONObject:
    """Returns `fsdp_config` as the user passed it (a dict, a path, None) as a dict without prefixes.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    plain = parse_json(read_settings(given)) if isinstance(given, str) else given or {}
    return {key.removeprefix("fsdp_"): setting for key, setting in plain.items()}


def coerce_fsdp(args: Arguments) -> list[str]:
    """Coerces `fsdp` and `fsdp_config` of arguments with `fsdp` set, and returns the problems found."""
    try:
        config = read_config(args.fsdp_config)
    except (OSError, ValueError) as error:
        return [f"fsdp_config={args.fsdp_config!r} could not be read: {error}"]
    words: Any = args.fsdp  # as the user passed it
    problems = []
    if words is not True:
        parts = words.split() if isinstance(words, str) else words
        problems = _apply_words([word(part).lower() for part in parts], config)
    if isinstance(config.get("transformer_layer_cls_to_wrap"), str):
        config["transformer_layer_cls_to_wrap"] = [config["transformer_layer_cls_to_wrap"]]
    policy = config.get("auto_wrap_policy", WRAP_POLICIES[0])
    if policy not in WRAP_POLICIES:
        problems.append(f"fsdp_config['auto_wrap_policy']={policy!r} is not one of: {', '.join(WRAP_POLICIES)}.")
    if unknown := sorted(set(config) - KEYS):
        problems.append(f"fsdp_config has unknown keys {unknown}. Known: {', '.join(sorted(KEYS))}.")
    args.fsdp = True
    args.fsdp_config = {**DEFAULTS, **config}
    return problems


def _apply_words(words: Sequence[str], config: JSONObject) -> list[str]:
    """Adds the meaning of the older words to `config`, without a change of its entries; returns problems."""
    problems = []
    is_version_2 = read_version(config) == 2
    for name in words:
        if name == FSDPOption.OFFLOAD:
            config.setdefault("cpu_offload", True)
        elif name in [option.value for option in SHARDING]:
            plain = is_version_2 and name in SHARDING[:2]
            config.setdefault("reshard_after_forward", RESHARDS[FSDPOption(name)] if plain else name)
        elif name not in ("true", FSDPOption.AUTO_WRAP):
            known = ", ".join(option.value for option in FSDPOption)
            problems.append(f"fsdp: {name!r} is not an option. Allowed: True, or words of {known}.")
    return problems


def plugin_arguments(config: Mapping[str, Any]) -> JSONObject:
    """Returns a configuration as the original's trainer hands it to accelerate, which also reads it from there."""
    version = read_version(config)
    found: JSONObject = {"fsdp_version": version}
    if config.get("cpu_offload"):
        found["cpu_offload"] = True
    found["auto_wrap_policy"] = config.get("auto_wrap_policy", WRAP_POLICIES[0])
    if classes := config.get("transformer_layer_cls_to_wrap"):
        found["transformer_cls_names_to_wrap"] = ",".join(classes)
    found["cpu_ram_efficient_loading"] = _is_true(config.get("cpu_ram_efficient_loading", False))
    found["state_dict_type"] = config.get("state_dict_type", "FULL_STATE_DICT")
    if "activation_checkpointing" in config:
        found["activation_checkpointing"] = _is_true(config["activation_checkpointing"])
    if version != 1:
        return {**found, "reshard_after_forward": config.get("reshard_after_forward", True)}
    found["reshard_after_forward"] = read_strategy(config) or FSDPOption.FULL_SHARD.value
    found["backward_prefetch"] = str(config.get("backward_prefetch", "NO_PREFETCH")).upper()
    flags = {"forward_prefetch": False, "use_orig_params": True, "sync_module_states": True}
    found |= {name: _is_true(config.get(name, default)) for name, default in flags.items()}
    if "limit_all_gathers" in config:
        found["limit_all_gathers"] = _is_true(config["limit_all_gathers"])
    return found


def _is_true(value: object) -> bool:
    return str(value).lower() == "true"


def read_version(config: Mapping[str, Any]) -> int:
    """Version of FSDP that a configuration asks for."""
    return int(config.get("version", 2))


def read_strategy(config: Mapping[str, Any]) -> str:
    """Returns the sharding strategy in lower case; "" if the configuration names none."""
    return str(config.get("reshard_after_forward", "")).lower()


def wrap_policy(config: Mapping[str, Any]) -> str:
    """Returns which modules are sharded one by one: by size where only a size is given."""
    policy = config.get("auto_wrap_policy")
    if policy is not None:
        return str(policy)
    by_size = int(config.get("min_num_params", 0)) > 0 and not config.get("transformer_layer_cls_to_wrap")
    return WRAP_POLICIES[1 if by_size else 0]


def without_effect(config: Mapping[str, Any], *, on_cpu: bool) -> list[str]:
    """Keys of a plain configuration that change nothing, each with the reason."""
    is_version_2 = read_version(config) == 2
    policy = wrap_policy(config)
    names = dict.fromkeys(XLA, "XLA is not used")
    if is_version_2:
        names |= dict.fromkeys(OF_VERSION_1, "version 1 only")
    if is_version_2 and read_strategy(config) == FSDPOption.NO_SHARD:
        names |= dict.fromkeys(KEYS - {"version", "reshard_after_forward"}, "no_shard keeps whole models")
    if policy != WRAP_POLICIES[0]:
        names["transformer_layer_cls_to_wrap"] = f"auto_wrap_policy is {policy}"
    if policy != WRAP_POLICIES[1]:
        names["min_num_params"] = "auto_wrap_policy and transformer_layer_cls_to_wrap choose by class or not at all"
    if on_cpu:
        names["cpu_offload"] = "the model is on the CPU"
    return [f"{name} ({names[name]})" for name in sorted(names) if config.get(name) not in (None, False, 0, {})]
