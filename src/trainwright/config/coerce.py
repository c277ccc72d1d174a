"""Coercion: one form for every value of the arguments, however it was given. No rules between fields here.

Each function brings one kind of field to its form and returns the problems that it met, as messages; none of them
raises, so that one error lists all. Short forms of text ("1h30m", "10-15", "0.1x") are parsed at the end.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from numbers import Integral, Real
from typing import Any, NamedTuple

from trainwright._types import is_url, without_tokens
from trainwright.config.accelerator import AcceleratorConfig
from trainwright.config.behaviour import get_behaviour
from trainwright.config.enums import DebugOption, IntervalStrategy, SchedulerType
from trainwright.config.fields import ALIASES, SETTINGS, get_value, has_other_meaning, names_with
from trainwright.config.protocol import Arguments
from trainwright.distributed.world import runs_in_kubeflow
from trainwright.errors import ArgumentError, LegacyNameWarning, warn_caller
from trainwright.support.door import parse_json

Problems = list[str]

RESOLVED = "_output_path"  # attribute of arguments: (output_dir as given, its absolute path)

ENUMS = {name: one.enum for name, one in SETTINGS.items() if one.enum is not None}
DICT_FIELDS = names_with("dict")
DURATION_FIELDS = names_with("duration")
STEP_FIELDS = names_with("steps")


def coerce(args: Arguments) -> Problems:
    """Brings all fields of `args` to a uniform form; returns messages about values that have none."""
    return [problem for coerce_some in COERCIONS for problem in coerce_some(args)]


def verbosity() -> int:
    """Returns the level at which messages are shown: transformers' if it is loaded, otherwise Python's."""
    name = "transformers" if "transformers" in sys.modules else "trainwright"
    return logging.getLogger(name).getEffectiveLevel()


def output_path(args: Any) -> str:  # arguments of transformers too
    """Returns the absolute path of `output_dir`, by the working directory in which the arguments were made.

    A later `os.chdir` does not move a run; the field keeps its value. Arguments of transformers, and a value that is
    assigned later, are resolved by the first call.
    """
    given = str(args.output_dir)
    known = vars(args).get(RESOLVED)
    if known is None or known[0] != given:
        known = given, given if os.path.isabs(given) else os.path.abspath(given)
        vars(args)[RESOLVED] = known
    return str(known[1])


URL_OUTPUTS: list[Callable[[Arguments], Problems]] = []


def takes_url_output(take: Callable[[Arguments], Problems]) -> Callable[[Arguments], Problems]:
    """Registers what puts a directory in the place of a URL in `output_dir`, and returns problems as messages."""
    URL_OUTPUTS.append(take)
    return take


def _output(args: Arguments) -> Problems:
    if args.output_dir is None:
        args.output_dir = "trainer_output"
    if is_url(args.output_dir):
        if not URL_OUTPUTS:
            return [f"output_dir={without_tokens(args.output_dir)!r} is a URL. Write into a directory."]
        if problems := [problem for take in URL_OUTPUTS for problem in take(args)]:
            return problems
    for name in names_with("path"):
        if (path := get_value(args, name)) is not None and not has_other_meaning(args, name):
            setattr(args, name, os.path.expanduser(path))
    output_path(args)  # before a change of the working directory
    if args.disable_tqdm is None:
        args.disable_tqdm = verbosity() > logging.WARNING
    # The stand-in that to_dict() writes is no token: a rebuilt copy falls back to the login's.
    for name in [name for name in vars(args) if name.endswith("_token")]:
        if getattr(args, name) == f"<{name.upper()}>":
            setattr(args, name, None)
    return []


def _json_strings(args: Arguments) -> Problems:
    problems = []
    for name in getattr(args, "_VALID_DICT_FIELDS", DICT_FIELDS):
        text = get_value(args, name) if name in SETTINGS else getattr(args, name)
        if not isinstance(text, str) or not text.startswith(("{", "[")):
            continue
        try:
            setattr(args, name, _typed(parse_json(text)))
        except ValueError as error:
            problems.append(f"{name}={text!r} is not JSON ({error}). Write it as '{{\"key\": value}}'.")
    return problems


def _typed(value: Any) -> Any:  # Any: a JSON tree
    """Words inside a JSON string that mean true, false or a number, as such."""
    if isinstance(value, dict):
        return {key: _typed(inner) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value.isdigit():
        return int(value)
    return float(value) if value.replace(".", "", 1).isdigit() else value


def _aliases(args: Arguments) -> Problems:
    """Afterwards both names hold the same, so that code that reads either is right."""
    for old, new in ALIASES.items():
        if getattr(args, new) is None and getattr(args, old) is not None:
            if getattr(args, old) != getattr(type(args), old, None):  # a library's own default is not the user's doing
                warn_caller(f"{old} is the older name of {new}: write {new}.", LegacyNameWarning)
            setattr(args, new, getattr(args, old))
        setattr(args, old, getattr(args, new))
    if args.activation_checkpointing is None:
        args.activation_checkpointing = args.gradient_checkpointing = False
    return []


def _converted(args: Arguments, names: Iterable[str], convert: Callable[[str, Any], object]) -> Problems:
    """Sets fields to the results of `convert(name, value)`; its ValueErrors are the problems."""
    problems = []
    for name in names:
        if has_other_meaning(args, name):
            continue
        try:
            setattr(args, name, convert(name, get_value(args, name)))
        except ValueError as error:
            problems.append(f"{name}: {error}")
    return problems


def _enums(args: Arguments) -> Problems:
    return _converted(args, ENUMS, as_enum) + _converted(args, ("debug",), _debug)


def as_enum(name: str, value: Any) -> Any:  # Any: a word or a member of any enum; a member of the field's enum
    """The value of a field as a member of its enum; older words are translated. Raises ArgumentError."""
    word = value.value if isinstance(value, Enum) else value  # by value, so that the enums of transformers serve too
    older = SETTINGS[name].older_values
    if isinstance(word, str) and word in older:
        warn_caller(f"{name}={word!r} is an older name: write {older[word]!r}.", LegacyNameWarning)
        word = older[word]
    try:
        return ENUMS[name](word)
    except ValueError as error:
        refusal = SETTINGS[name].refused_values.get(word) if isinstance(word, str) else None
        raise ArgumentError(refusal or str(error)) from None


def _debug(name: str, value: str | Iterable[str | Enum] | None) -> list[DebugOption]:
    words = value.split() if isinstance(value, str) else value or []
    return [DebugOption(word.value if isinstance(word, Enum) else word) for word in words]


def _intervals(args: Arguments) -> Problems:
    if isinstance(args.include_num_input_tokens_seen, bool):
        args.include_num_input_tokens_seen = "all" if args.include_num_input_tokens_seen else "no"
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    if args.eval_strategy == IntervalStrategy.STEPS and not args.eval_steps:
        args.eval_steps = args.logging_steps
    for name in STEP_FIELDS:
        value = getattr(args, name)
        if isinstance(value, float) and value > 1 and value.is_integer():
            setattr(args, name, int(value))
    return []


def _durations(args: Arguments) -> Problems:
    """Afterwards they are seconds."""
    given = [name for name in DURATION_FIELDS if get_value(args, name) is not None]
    return _converted(args, given, lambda name, value: parse_duration(value))


def _best(args: Arguments) -> Problems:
    follows = args.lr_scheduler_type in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
    if (args.load_best_model_at_end or follows) and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")
    return []


def _trackers(args: Arguments) -> Problems:
    names = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
    args.report_to = [] if names == ["none"] else names
    if runs_in_kubeflow() and not {"all", "kubeflow"} & {*names}:  # also for "none", as in transformers
        args.report_to = [*args.report_to, "kubeflow"]
    return []


def _data_and_hardware(args: Arguments) -> Problems:
    is_sortish = get_value(args, "sortish_sampler") and get_behaviour(args).sortish_sampler_groups_by_length
    if is_sortish and args.train_sampling_strategy == "random":  # the older wish for the same
        args.train_sampling_strategy = "group_by_length"
    if args.torch_compile_mode is not None or args.torch_compile_backend is not None:
        args.torch_compile = args.torch_compile or True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"
    if args.use_cpu:
        args.dataloader_pin_memory = False
    return []


def _backends(args: Arguments) -> Problems:
    problems = []
    try:
        args.accelerator_config = AcceleratorConfig.of(args.accelerator_config)
    except (OSError, ValueError) as error:
        problems.append(f"accelerator_config: {error}")
    else:
        accumulation = args.accelerator_config.gradient_accumulation_kwargs or {}
        if args.gradient_accumulation_steps == 1:
            args.gradient_accumulation_steps = accumulation.get("num_steps", 1)
    if not args.fsdp:
        return problems
    from trainwright.config.fsdp_config import coerce_fsdp

    return problems + coerce_fsdp(args)


COERCIONS: tuple[Callable[[Arguments], Problems], ...] = (
    _output,
    _json_strings,
    _aliases,
    _enums,
    _intervals,
    _durations,
    _best,
    _trackers,
    _data_and_hardware,
    _backends,
)


SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
DURATIONS = "Write '90s', '20min', '8h', '1h30m', or a number of seconds."
STEPS = "Write '10-15' for these steps, or '5' for five steps at the start."
WARM_UP = 2  # steps at the beginning of a run that are slower than the rest

_PART = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]+)")


def parse_duration(value: object) -> float:
    """Parses "90s", "20min", "8h", "1h30m" or a number of seconds above 0 into seconds; else raises ValueError."""
    if isinstance(value, Real) and not isinstance(value, bool):
        result = float(value)
    elif isinstance(value, str):
        result = _parse_text(value.strip().lower())
    else:
        raise ValueError(f"{value!r} is not a length of time. {DURATIONS}")
    if not 0 < result < math.inf:
        raise ValueError(f"{value!r} is not a length of time above 0. {DURATIONS}")
    return result


def _parse_text(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    parts = list(_PART.finditer(text))
    rest = _PART.sub("", text).strip()
    unknown = sorted({part["unit"] for part in parts} - set(SECONDS))
    if unknown:
        known = f"is not a unit of time; s, min (or m), h and d are. {DURATIONS}"
        raise ValueError(f"{text!r}: {', '.join(unknown)} {known}")
    if rest or not parts:
        raise ValueError(f"{text!r} is not a length of time. {DURATIONS}")
    return sum(float(part["number"]) * SECONDS[part["unit"]] for part in parts)


class StepRange(NamedTuple):
    """Steps of a run, including the last one. Without a first one they are counted from the start of the run."""

    first: int | None
    num: int

    @property
    def last(self) -> int | None:
        return None if self.first is None else self.first + self.num - 1


def parse_steps(value: object) -> StepRange:
    """Parses steps to trace or record: "10-15", or a number of steps; else raises ValueError."""
    text = str(value).strip() if isinstance(value, (str, Integral)) and not isinstance(value, bool) else ""
    match = re.fullmatch(r"(?:(?P<first>\d+)\s*-\s*)?(?P<last>\d+)", text)
    if match is None:
        raise ValueError(f"{value!r} names no steps. {STEPS}")
    last = int(match["last"])
    first = None if match["first"] is None else int(match["first"])
    if last < 1 or (first is not None and not 1 <= first <= last):
        raise ValueError(f"{value!r} names no steps: they count from 1, and the last is not before the first.")
    return StepRange(None, last) if first is None else StepRange(first, last - first + 1)


def parse_factor(value: object) -> float | None:
    """Parses a factor: "0.1x" and "x0.1" are 0.1. Returns None for any other value."""
    match = re.fullmatch(r"x(?P<after>\S+)|(?P<before>\S+)x", value) if isinstance(value, str) else None
    if match is None:
        return None
    try:
        factor = float(match["after"] or match["before"])
    except ValueError:
        return None
    return factor if 0 <= factor < math.inf else None
