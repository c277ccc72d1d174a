"""Engines by a word, for the plan of a run that is not started: `check(processes=64, engine="fsdp2")`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, TypeAlias

from trainwright.config import deepspeed_config
from trainwright.config.enums import FSDPOption
from trainwright.config.fsdp_config import coerce_fsdp, read_strategy, read_version
from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError

Planned: TypeAlias = str | Mapping[str, Any]  # a word, or a configuration of DeepSpeed or its file

# The word -> the value of `fsdp`; None: each process has the whole model.
ENGINES: dict[str, str | None] = {
    "ddp": None,
    "fsdp2": FSDPOption.FULL_SHARD.value,
    "shard_grad_op": FSDPOption.SHARD_GRAD_OP.value,
    "hsdp": FSDPOption.HYBRID_SHARD.value,
}
TITLES = {
    "ddp": "DDP, the whole model in each process",
    "fsdp2": "FSDP 2, parameters sharded over all processes and gathered for each pass",
    "shard_grad_op": "FSDP 2, parameters sharded and kept gathered from the forward to the backward pass",
    "hsdp": "FSDP 2, parameters sharded within each node, copies between nodes",
}
SEQUENCES = {
    "cp": "each sequence shared by {} processes, which gather keys and values",
    "sp": "each sequence shared by {} processes, which exchange heads for tokens",
}
ZERO = {
    "zero1": "DeepSpeed ZeRO 1, the whole model in each process, optimizer states partitioned",
    "zero2": "DeepSpeed ZeRO 2, the whole model in each process, gradients and optimizer states partitioned",
    "zero3": "DeepSpeed ZeRO 3, parameters partitioned over all processes and gathered when they are needed",
}
TITLES |= ZERO
EXAMPLE = "check(processes=64, engine='fsdp2')"
MORE_SHARDED = {"ddp": ("shard_grad_op", "fsdp2"), "shard_grad_op": ("fsdp2",), "hsdp": ("fsdp2",)}
MORE_EXCHANGE = "more communication"


def word_for(args: Arguments) -> str:
    """Returns the words for what the arguments ask for, as `collect_settings` reads them: "fsdp2", or "fsdp2+cp8"."""
    return "+".join([name_engine(args), *(f"{way}{size}" for way, size in count_sequence_parts(args).items())])


def describe_engine(args: Arguments) -> str:
    """Returns a line about the engine that the arguments ask for."""
    shared = (SEQUENCES[way].format(size) for way, size in count_sequence_parts(args).items())
    return "; ".join([TITLES[name_engine(args)], *shared])


def count_sequence_parts(args: Arguments) -> dict[str, int]:
    """Returns how many processes share each sequence, by "cp" or "sp"; {}: none do."""
    config = args.parallelism_config
    sizes = {way: getattr(config, f"{way}_size", None) or 1 for way in SEQUENCES}
    if config is None and args.deepspeed:
        sizes["sp"] = deepspeed_config.sequence_size(args.deepspeed)
    return {way: size for way, size in sizes.items() if size > 1}


def name_engine(args: Arguments) -> str:
    """Returns the word for the engine that the arguments ask for."""
    if args.deepspeed:
        return zero_word(deepspeed_config.read(args.deepspeed))
    if not args.fsdp:
        return "ddp"
    word = read_strategy(args.fsdp_config or {})
    return {"false": "shard_grad_op", "shard_grad_op": "shard_grad_op", "hybrid_shard": "hsdp"}.get(word, "fsdp2")


def zero_word(config: Mapping[str, Any]) -> str:
    """Returns the word for a configuration of DeepSpeed; ArgumentError if no plan can be made for it."""
    stage = deepspeed_config.get(config, "zero_optimization.stage") or 0
    word = f"zero{stage}"
    if word in ZERO:
        return word
    if stage == 0:
        raise ArgumentError("A DeepSpeed configuration without ZeRO cannot be planned; it takes about what 'ddp' does.")
    raise ArgumentError(f"zero_optimization.stage={stage!r} is not one that can be planned: {', '.join(ZERO)}.")


def collect_settings(engine: Planned | None, args: Arguments) -> dict[str, Any]:
    """Returns the settings with which `args` ask for an engine; {} for None, as they are.

    Args:
        engine: a word, or a configuration of DeepSpeed as `deepspeed` takes it. A word may also say how sequences are
            shared: "fsdp2", "ddp+sp4", "fsdp2+cp8", "zero3+sp8".
        args: arguments of the trainer.

    Returns:
        Values of arguments; `parallelism_config` with the sizes of accelerate's object, in a dict.

    Raises:
        ArgumentError: there is no such engine, or no plan can be made for it.
    """
    if engine is None:
        return {}
    if isinstance(engine, str) and engine.startswith("zero") and "+" not in engine:
        stage = engine.removeprefix("zero")
        config = {"zero_optimization": {"stage": int(stage) if stage.isdecimal() else stage}}
        config |= {name: {"enabled": True} for name in ("bf16", "fp16") if args.mixed_precision == name}
        return {"deepspeed": config} if zero_word(config) else {}
    if not isinstance(engine, str) or engine.endswith(".json"):
        config = deepspeed_config.read(engine)
        zero_word(config)
        return {"deepspeed": config}
    base, *ways = engine.split("+")
    if ways:
        found = re.fullmatch(r"(cp|sp)([1-9][0-9]*)", ways[0])
        if found is None or len(ways) > 1:
            raise ArgumentError(
                f"engine={engine!r}: a sequence is shared in one way, '+cp8' or '+sp8' for eight processes."
            )
        return {**collect_settings(base, args), "parallelism_config": {f"{found[1]}_size": int(found[2])}}
    if engine not in ENGINES:
        raise ArgumentError(
            f"engine={engine!r} is not one of: {', '.join([*ENGINES, *ZERO])}, nor a configuration of DeepSpeed."
        )
    config = {name: value for name, value in (args.fsdp_config or {}).items() if name != "reshard_after_forward"}
    if read_version(config) != 2:
        raise ArgumentError("fsdp_config: version 1 cannot be planned. Leave version out: 2 is the default.")
    return {"fsdp": ENGINES[engine], "fsdp_config": config if ENGINES[engine] else args.fsdp_config}


def split_engine(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Planned | None]:
    """Splits settings of a run under a launcher into the settings of one process, and its engine.

    Raises:
        ArgumentError: the settings of the engine cannot be read.
    """
    if settings.get("deepspeed"):
        alone = {name: value for name, value in settings.items() if name != "deepspeed"}
        return alone, deepspeed_config.read(settings["deepspeed"])
    if not settings.get("fsdp"):
        return dict(settings), None
    words: Any = SimpleNamespace(deepspeed=None, fsdp=settings["fsdp"], fsdp_config=settings.get("fsdp_config"))
    problems = coerce_fsdp(words)
    if problems:
        raise ArgumentError(" ".join(problems))
    alone = {name: value for name, value in settings.items() if name != "fsdp"}
    return {**alone, "fsdp_config": words.fsdp_config}, name_engine(words)


def apply(args: Arguments, settings: dict[str, Any]) -> None:
    """Sets fields of arguments that are constructed, in the form that construction gives them."""
    for name, value in settings.items():
        setattr(args, name, value)
    if args.fsdp and args.fsdp is not True:
        coerce_fsdp(args)


def more_sharding(args: Arguments) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields settings with which a process holds less of the model, and their price, the cheapest first."""
    word = name_engine(args)
    if word in ZERO and args.deepspeed:
        for other in list(ZERO)[list(ZERO).index(word) + 1 :]:
            config = deepspeed_config.read(args.deepspeed)
            deepspeed_config.put(config, "zero_optimization.stage", int(other.removeprefix("zero")))
            yield {"deepspeed": config}, MORE_EXCHANGE
    for other in MORE_SHARDED.get(word, ()):
        yield {"fsdp": ENGINES[other]}, MORE_EXCHANGE


def has_rank_kinds(word: str) -> bool:
    """Returns True if processes hold parts of different sizes."""
    return word in ZERO or ENGINES[word] is not None


def writes_parts(args: Arguments) -> bool:
    """Returns True if each process writes its part of a checkpoint."""
    return bool(args.fsdp) and "SHARDED" in str((args.fsdp_config or {}).get("state_dict_type", ""))
