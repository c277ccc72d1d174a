"""Declaration of a field of the arguments: `setting()` takes every fact about it, and `FieldGroup` insists on them."""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from numbers import Integral, Real
from typing import Any, ClassVar, Literal

from trainwright.config.aliases import NameOfField

NOT_SET: Any = object()

# Effect of a changed field on a run that resumes from a checkpoint.
HERE = "takes effect from here on"
RATE = "from here on, with the schedule's position kept"
SHAPE = "the new schedule from here on, at the rate that it has for this step"
LENGTH = "how long the run lasts"
SIZE = "from here on; each sample of the epoch under way is still seen once"
ORDER = "from the next epoch on; an epoch that is under way is finished in the checkpoint's order"
PER_START = None  # differs between starts of one run, and nothing follows from it: not compared


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`; None only where `optional`. `only_warns`: others train too, as in transformers."""

    low: float
    high: float | None = None
    whole: bool = False
    optional: bool = False
    open_low: bool = False
    open_high: bool = False
    hint: str = ""
    only_warns: bool = False

    def problem(self, name: str, value: object) -> str | None:
        if value is None and self.optional:
            return None
        if not isinstance(value, (int, Integral) if self.whole else (int, float, Real)):  # int first: faster
            is_yaml = isinstance(value, str) and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value) is not None
            text = " It is text; YAML reads 5e-5 as text, write 5.0e-5." if is_yaml else ""
            return f"{name}={value!r} is not {'a whole' if self.whole else 'a'} number.{text}"
        if self.only_warns or self.allows(float(value)):
            return None
        return self._outside(name, value)

    def caution(self, name: str, value: object) -> str | None:
        """A message about a number that trains, though it is outside of the range."""
        if not self.only_warns or not isinstance(value, Real) or self.allows(float(value)):
            return None
        return self._outside(name, value)

    def _outside(self, name: str, value: object) -> str:
        must = "is meant to" if self.only_warns else "must"
        return f"{name}={value!r} is out of range: it {must} be {self}.{' ' + self.hint if self.hint else ''}"

    def allows(self, number: float) -> bool:
        above = number > self.low if self.open_low else number >= self.low
        below = self.high is None or (number < self.high if self.open_high else number <= self.high)
        return above and below

    def __str__(self) -> str:
        low = f"{'above' if self.open_low else 'at least'} {_written(self.low)}"
        return (
            low if self.high is None else f"{low} and {'below' if self.open_high else 'at most'} {_written(self.high)}"
        )


def _written(number: float) -> str:
    """Returns a limit with all its digits."""
    return str(int(number)) if math.isfinite(number) and number == int(number) else f"{number:g}"


COUNT = Range(1, whole=True)
MAYBE_COUNT = Range(1, whole=True, optional=True)
NOT_NEGATIVE = Range(0)
USUALLY_NOT_NEGATIVE = Range(0, only_warns=True)
ANY_NUMBER = Range(-math.inf)
ANY_WHOLE = Range(-math.inf, whole=True)
SHARE = Range(0, 1, open_high=True, only_warns=True)
BY_RULES = None  # allowed numbers depend on other fields or on more than limits; rules/ checks them


Syntax = Literal["dict", "duration", "steps", "path", "maybe_path"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Every fact about one field."""

    default: Any  # its default value
    help: str  # one sentence for `--help` and the page of arguments
    _: KW_ONLY
    # effect of a change on a run that resumes: HERE, RATE, ..., or its own text; PER_START: the field is not
    # compared
    on_resume: str | None
    # whether trials of a hyperparameter search may differ in it. False for fields that the trainer's constructor
    # reads, that all trials share, or that nothing in a trial reads
    searchable: bool
    factory: Callable[[], Any] | None = None  # makes the default, if that is mutable
    # the allowed numbers; mandatory if the type is int or float, BY_RULES if limits cannot express them
    limits: Range | None = NOT_SET
    choices: tuple[str, ...] = ()  # the words that it may hold; None too if that is the default
    enum: type[Enum] | None = None  # the enum that its words become
    older_values: Mapping[str, str] = field(default_factory=dict)  # words that mean another value today
    refused_values: Mapping[str, str] = field(default_factory=dict)  # words with the reason why they are refused
    # short forms that it takes: a "dict" also as a JSON string; a "duration" such as '8h'; "steps" as a number,
    # or a share of all steps below 1; a "path", or "maybe_path" if other values are allowed too
    syntax: tuple[Syntax, ...] = ()
    bare_flag: bool = False  # on the command line, the name alone means True
    secret: bool = False  # not shown in `repr`
    summarized: bool = False  # already in the header lines of a run, so not listed again among changed settings
    alias_of: str | None = None  # the field that this one is an alias of
    formerly: Mapping[str, NameOfField] = field(default_factory=dict)  # its older names, each with its meaning today
    since: str | None = None  # the version that brought it; None: the first one
    # its place among our fields in signature, help and page, counted from 0; None: after all that have one
    place: int | None = None

    def to_field(self, annotation: str) -> Any:
        """Returns the dataclass field. Argument parsers, also of other libraries, pass its metadata to argparse."""
        metadata: dict[str, Any] = {"help": self.help}
        if self.choices and "bool" not in _words(annotation):  # a bool is turned into a choice after parsing
            metadata["choices"] = list(self.choices)
        if self.bare_flag:
            metadata.update(nargs="?", const=True)
        if self.factory is not None:
            return field(default_factory=self.factory, metadata=metadata)
        return field(default=self.default, metadata=metadata, repr=not self.secret)

    @property
    def allowed(self) -> tuple[str | bool | None, ...]:
        """The words that the field takes; also None if that is its default, and both bools if the default is one."""
        if self.choices and isinstance(self.default, bool):
            return (True, False, *self.choices)
        return (None, *self.choices) if self.default is None and self.choices else self.choices


def setting(default: object, help: str, **facts: Any) -> Any:  # Any, as dataclasses.field() is to a type checker
    """Declares a field of a `FieldGroup` by the attributes of `Setting`.

    TypeError for a missing or unknown attribute.
    """
    return Setting(default, help, **facts)


def tunable(default: object, help: str, *, on_resume: str | None = HERE, **facts: object) -> Any:  # Any: see setting()
    """Declares a field that a search may vary, and a change of which takes effect on a resume or does `on_resume`."""
    return setting(default, help, on_resume=on_resume, searchable=True, **facts)


def fixed(default: object, help: str, **facts: object) -> Any:  # Any: see setting()
    """Declares a field that is the same in all trials of a search, and a change of which takes effect on a resume."""
    return setting(default, help, on_resume=HERE, searchable=False, **facts)


def not_compared(default: object, help: str, **facts: object) -> Any:  # Any: see setting()
    """Declares a field that no search varies, and that may differ between the starts of one run."""
    return setting(default, help, on_resume=PER_START, searchable=False, **facts)


class FieldGroup:
    """A base for dataclasses with all fields declared by `setting`; otherwise the import fails.

    Attributes:
        group: title of the group, in `--help` and in the documentation.
        settings: name -> the facts about it.
    """

    group: ClassVar[str]
    settings: ClassVar[Mapping[str, Setting]]

    def __init_subclass__(cls, *, group: str = "") -> None:
        super().__init_subclass__()
        if FieldGroup not in cls.__bases__:  # arguments made of groups; a user's own fields are as they like
            return
        cls.group = group
        declared: dict[str, Setting] = {}
        for name, annotation in inspect.get_annotations(cls).items():
            if str(annotation).startswith("ClassVar"):
                continue
            value = vars(cls).get(name)
            if not isinstance(value, Setting):
                raise TypeError(f"{cls.__name__}.{name} is not declared by setting(...) or a function that calls it.")
            if value.limits is NOT_SET and {"int", "float"} & _words(annotation):
                raise TypeError(f"{cls.__name__}.{name} is a number without limits=...; BY_RULES if rules check it.")
            declared[name] = replace(value, limits=None) if value.limits is NOT_SET else value
            setattr(cls, name, value.to_field(annotation))
        cls.settings = declared


def join_groups(name: str, groups: Iterable[type[FieldGroup]], *, module: str) -> type[FieldGroup]:
    """Returns one group, called `name`, with the fields of several: first those with a `place`, by it.

    Args:
        name: of the class.
        groups: each with fields of one subject.
        module: name of the module of the class; it must have all names in the types of the fields.
    """
    settings: dict[str, Setting] = {}
    annotations: dict[str, Any] = {}
    for group in groups:
        settings |= group.settings
        annotations |= inspect.get_annotations(group)

    def place(one: str) -> float:
        found = settings[one].place
        return math.inf if found is None else found

    names = sorted(settings, key=place)

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = module
        namespace["__annotations__"] = {one: annotations[one] for one in names}
        namespace.update((one, settings[one]) for one in names)

    made = types.new_class(name, (FieldGroup,), {"group": "Only in Trainwright"}, fill)
    return dataclass(kw_only=True, init=False, repr=False, eq=False)(made)


def _words(annotation: str) -> set[str]:
    """The names in a type, as `from __future__ import annotations` keeps it."""
    return set(re.findall(r"\w+", str(annotation)))
