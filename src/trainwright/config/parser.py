"""HfArgumentParser: dataclasses from the command line, a dict, a JSON or a YAML file; options and form of --help.

It is not a subclass of transformers' parser, which creates options and dataclasses in private methods: through public
names a subclass inherits nothing that it could use, and importing it takes four times as long.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import sys
import types
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NewType,
    NoReturn,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from trainwright.config.deprecated import OLD_FLAGS, OLD_NAMES, OLD_NUMBERS, unknown_message
from trainwright.config.fields import SETTINGS
from trainwright.config.summary import grouped
from trainwright.config.vocabulary import hint_for_argument
from trainwright.errors import ArgumentError, excerpt
from trainwright.support.door import parse_json, read_settings

DataClass = NewType("DataClass", Any)  # type: ignore[valid-newtype]  # names that other code imports
if TYPE_CHECKING:
    DataClassType: TypeAlias = type[Any]  # type checkers do not accept a class for a NewType
else:
    DataClassType = NewType("DataClassType", Any)
Convert = Callable[[str], Any]

TRUE_WORDS = ("yes", "true", "t", "y", "1")
FALSE_WORDS = ("no", "false", "f", "n", "0")
OF_ARGPARSE = ("nargs", "const", "choices", "metavar", "required", "type", "default")
HELP_WIDTH = 100
SHORT_LIST = 6
OPTION = re.compile(r"--([\w-]+)")
AMBIGUOUS = re.compile(r"ambiguous option: --([\w-]+)")  # argparse's message: it accepts abbreviated options


class OneOrMore(argparse.Action):
    """One word is kept as text, several as a list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """At most 100 columns, one spelling per option, a usage line that does not list a hundred options."""

    def __init__(self, prog: str, indent_increment: int = 2, max_help_position: int = 34, width: int | None = None):
        width = width or min(HELP_WIDTH, shutil.get_terminal_size((HELP_WIDTH, 24)).columns)
        super().__init__(prog, indent_increment, max_help_position, width)

    def add_usage(self, usage: str | None, actions: Iterable[argparse.Action], *args: Any, **kwargs: Any) -> None:
        if usage is None:
            actions = list(actions)
            required = [f" {a.option_strings[0]} {a.dest.upper()}" for a in actions if a.option_strings and a.required]
            positional = [f" {a.metavar or a.dest}" for a in actions if not a.option_strings]
            usage = "".join(["%(prog)s", *required, " [options]", *positional])
        super().add_usage(usage, actions, *args, **kwargs)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        spellings = action.option_strings
        if not spellings:
            return super()._format_action_invocation(action)
        shown: dict[str, str] = {}
        for word in spellings:
            shown.setdefault(word.replace("-", "_"), word)
        metavar = action.metavar if isinstance(action.metavar, str) else METAVARS.get(action.type, "TEXT")
        values = "" if action.nargs == 0 else self._format_args(action, metavar)
        return f"{', '.join(shown.values())} {values}".rstrip()

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = not action.default or action.nargs == 0
        return action.help if silent or action.required else super()._get_help_string(action)


def string_to_bool(v: str | bool) -> bool:
    """Parses a bool.

    Args:
        v: yes/no, true/false, t/f, y/n, 1/0 in either case, or a bool.

    Returns:
        The bool.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    if isinstance(v, bool):
        return v
    if v.lower() in TRUE_WORDS + FALSE_WORDS:
        return v.lower() in TRUE_WORDS
    raise argparse.ArgumentTypeError(f"{v!r} is neither yes nor no. Allowed: yes/no, true/false, t/f, y/n, 1/0.")


METAVARS: dict[Any, str] = {int: "N", float: "X", string_to_bool: "BOOL", json.loads: "JSON"}


def make_choice_type_function(choices: Sequence[Any]) -> Convert:
    """Makes a function that parses a choice.

    Args:
        choices: values, distinguished by their text.

    Returns:
        A function from the text of a choice to the choice; it returns other text as it is.
    """
    by_text = {str(choice): choice for choice in choices}
    return lambda arg: by_text.get(arg, arg)


def HfArg(
    *,
    aliases: str | list[str] | None = None,
    help: str | None = None,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    metadata: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:  # Any, as dataclasses.field() itself is to a type checker
    """Declares a dataclass field with metadata for `HfArgumentParser`.

    Args:
        aliases: further names of the option.
        help: its text in `--help`.
        default: default value of the field.
        default_factory: makes the default, if that is mutable.
        metadata: further metadata of the field.
        **kwargs: other arguments of `dataclasses.field`.

    Returns:
        The field.
    """
    extra = {name: value for name, value in (("aliases", aliases), ("help", help)) if value is not None}
    merged = {**(metadata or {}), **extra}
    return dataclasses.field(metadata=merged, default=default, default_factory=default_factory, **kwargs)


def add_field(parser: argparse._ActionsContainer, field: dataclasses.Field[Any], hint: Any) -> None:
    """Add --name, --na-me, the field's aliases, and --no_name for a bool that is on by default."""
    aliases = field.metadata.get("aliases", [])
    names = [*spellings(field.name), *([aliases] if isinstance(aliases, str) else aliases)]
    settings = {**_option(field, hint), **{key: field.metadata[key] for key in OF_ARGPARSE if key in field.metadata}}
    text = _help_text(field, settings.get("choices"))
    parser.add_argument(*names, help=text, **settings)
    if settings.get("type") is string_to_bool and field.default is True:
        turn_off = f"Turn {field.name} off." if text else None
        names = spellings(f"no_{field.name}")
        parser.add_argument(*names, dest=field.name, action="store_false", default=False, help=turn_off)


def spellings(name: str) -> list[str]:
    """With underscores, as the field is called, and with hyphens, as people type."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def _help_text(field: dataclasses.Field[Any], choices: Sequence[Any] | None) -> str | None:
    text = field.metadata.get("help")
    if not isinstance(text, str):
        return None
    text = text.replace("%", "%%")
    many = choices is not None and len(choices) > SHORT_LIST
    return f"{text} One of: {', '.join(str(choice) for choice in choices or ())}." if many else text


def _option(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Returns the keywords of `add_argument` for a field of this type."""
    members = _members(field.name, hint)
    lists = [member for member in members if (get_origin(member) or member) is list]
    default = field.default if field.default is not dataclasses.MISSING else None
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    settings: dict[str, Any] = {"default": default} if has_default else {"required": True}
    if members == [bool]:  # False when nothing is said, and True by its bare name; a bool or None says it with a word
        if hint is bool or default is not None:
            settings = {"default": default or False, "nargs": "?", "const": True}
        return {**settings, "type": string_to_bool}
    if lists:
        inner = (get_args(lists[0]) or (str,))[0]
        action = {"action": OneOrMore} if str in members else {}
        return {**settings, **action, "nargs": "+", "type": str if action else _convert([inner])}
    if bool in members:
        settings |= {"nargs": "?", "const": True}
    if choices := _choices(field.name, members):
        settings.update({"choices": choices, "metavar": "NAME"} if len(choices) > SHORT_LIST else {"choices": choices})
    convert = make_choice_type_function(choices) if choices else _convert(members)
    if bool in members and isinstance(default, str):  # argparse converts a text default too: "no" is none of a bool
        return {**settings, "type": lambda text: text if text == default else convert(text)}
    return {**settings, "type": convert}


def _members(name: str, hint: Any) -> list[Any]:
    if get_origin(hint) not in (Union, types.UnionType):
        return [hint]
    members = [member for member in get_args(hint) if member is not type(None)]
    if len(members) > 1 and str not in members and Any not in members:
        raise ValueError(
            f"Field {name!r}: text cannot tell which of {hint} is meant. One type, that type or None, or a union with "
            "str can be parsed."
        )
    return members


def _choices(name: str, members: Sequence[Any]) -> Sequence[Any]:
    """Returns the values of an Enum or a Literal, including older values that are still accepted."""
    others = [member for member in members if member is not str]
    if len(others) != 1:
        return ()
    if isinstance(others[0], type) and issubclass(others[0], Enum):
        known = SETTINGS.get(name)
        older = [] if known is None else [*known.older_values, *known.refused_values]
        return [member.value for member in others[0]] + older
    return get_args(others[0]) if get_origin(others[0]) is Literal and str not in members else ()


def _convert(members: Sequence[Any]) -> Convert:
    """From text to the first of `members` that takes it; text itself is tried last.

    Next to str, a dict (or a class described by a dict) stays text: the dataclass knows whether it is JSON or a path.
    """
    if str not in members and Any not in members:
        return _converter(members[0])
    others = [member for member in members if member not in (str, Any)]
    as_text = [
        member for member in others if (get_origin(member) or member) is dict or dataclasses.is_dataclass(member)
    ]
    converters = [_converter(member) for member in others if member not in as_text]

    def convert(text: str) -> Any:
        for converter in converters:
            try:
                return converter(text)
            except (TypeError, ValueError, argparse.ArgumentTypeError):
                continue
        return text

    return convert if converters else str


def _converter(member: Any) -> Convert:
    if member is bool:
        return string_to_bool
    if get_origin(member) is Literal:
        return make_choice_type_function(get_args(member))
    if (get_origin(member) or member) is dict:
        return json.loads
    return member  # type: ignore[no-any-return]


class HfArgumentParser(ArgumentParser):
    """An ArgumentParser with the fields of dataclasses as options.

    Ordinary options may be added; their values come back in a namespace after the dataclasses. A dataclass with the
    attribute `_argument_group_name` is shown as one group of that name in --help, others by the groups of their fields.
    """

    dataclass_types: Iterable[DataClassType]

    def __init__(self, dataclass_types: DataClassType | Iterable[DataClassType] | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(**kwargs)
        types_ = () if dataclass_types is None else dataclass_types
        self.dataclass_types: list[DataClassType] = list(types_ if isinstance(types_, Iterable) else [types_])
        for kind in self.dataclass_types:
            self._add_dataclass_arguments(kind)

    def parse_args_into_dataclasses(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """Parses command-line words into instances of the dataclasses.

        Words are also read from files. What comes later wins: `args_filename` (or the script's name with the suffix
        .args), files named after `args_file_flag`, the command line.

        Args:
            args: words; None: `sys.argv`.
            return_remaining_strings: also return the words that no dataclass has a field for.
            look_for_args_file: read the file with the script's name and the suffix .args, if there is one.
            args_filename: file to read instead.
            args_file_flag: option that names further files.

        Returns:
            Instances in the order of the dataclasses; then a namespace of options added by hand, if there are any;
            then, on request, the remaining words.

        Raises:
            ArgumentError: there are remaining words, and they were not asked for.
        """
        words = list(sys.argv[1:] if args is None else args)
        files = [Path(args_filename)] if args_filename else []
        if not files and look_for_args_file and sys.argv and sys.argv[0]:
            files = [Path(sys.argv[0]).with_suffix(".args")]
        if args_file_flag:
            finder = ArgumentParser(add_help=False, allow_abbrev=False)
            finder.add_argument(args_file_flag, dest="files", action="append", default=[])
            named, words = finder.parse_known_args(words)
            files += map(Path, named.files)
        from_files = [word for file in files if file.exists() for word in read_settings(file).split()]
        older, words = self._older_names([*from_files, *words])
        namespace, remaining = self.parse_known_args(words)
        inputs = [_take(namespace, kind) for kind in self.dataclass_types]
        outputs = [
            kind(**given, **(older if kind is self._translator() else {}))
            for kind, given in zip(self.dataclass_types, inputs, strict=True)
        ]
        others = [namespace] if vars(namespace) else []
        if return_remaining_strings:
            return (*outputs, *others, remaining)
        if remaining:
            options = [match[1] for word in remaining if (match := OPTION.match(word))]
            hints = "".join(dict.fromkeys(map(self._hint, options)))
            raise ArgumentError(f"Unknown arguments: {' '.join(remaining)}.{hints} --help lists the known ones.")
        return (*outputs, *others)

    def error(self, message: str) -> NoReturn:
        """Ends the program with a message; for an ambiguous option, with the argument that may be meant.

        Args:
            message: problem with the words of the command line.
        """
        typed = AMBIGUOUS.search(message)
        hint = "" if typed is None else self._hint(typed[1])
        super().error(f"{message}.{hint}" if hint else message)

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Makes instances from a dict.

        Args:
            args: name -> value.
            allow_extra_keys: pass over keys that no dataclass has a field for.

        Returns:
            Instances in the order of the dataclasses.

        Raises:
            ArgumentError: no dataclass has a field for a key.
        """
        names = {kind: _names(kind) | self._old_names(kind) for kind in self.dataclass_types}
        known = set().union(*names.values())
        if not allow_extra_keys and (unused := sorted(set(args) - known)):
            raise ArgumentError(" ".join(unknown_message(name, sorted(known)) for name in unused))
        return tuple(
            kind(**{name: value for name, value in args.items() if name in names[kind]})
            for kind in self.dataclass_types
        )

    def parse_json_file(self, json_file: str | PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Makes instances from a JSON file that holds one object.

        Args:
            json_file: path of the file.
            allow_extra_keys: pass over keys that no dataclass has a field for.

        Returns:
            Instances in the order of the dataclasses.

        Raises:
            ArgumentError: no dataclass has a field for a key, or the file holds no object.
        """
        return self._parse_tree(parse_json(read_settings(json_file)), json_file, allow_extra_keys)

    def parse_yaml_file(self, yaml_file: str | PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Makes instances from a YAML file that holds one mapping.

        Args:
            yaml_file: path of the file.
            allow_extra_keys: pass over keys that no dataclass has a field for.

        Returns:
            Instances in the order of the dataclasses.

        Raises:
            ArgumentError: no dataclass has a field for a key, or the file holds no mapping.
        """
        import yaml

        try:
            tree = yaml.safe_load(read_settings(yaml_file))
        except yaml.MarkedYAMLError as error:
            error.problem = None if error.problem is None else excerpt(error.problem)
            raise
        return self._parse_tree(tree, yaml_file, allow_extra_keys)

    def _parse_tree(self, tree: object, origin: str | PathLike[str], allow_extra_keys: bool) -> tuple[Any, ...]:
        if not isinstance(tree, dict):
            raise ArgumentError(f"{origin} holds {type(tree).__name__}; it must hold names with values.")
        return self.parse_dict(tree, allow_extra_keys=allow_extra_keys)

    def _add_dataclass_arguments(self, kind: DataClassType) -> None:
        try:
            hints = get_type_hints(kind)
        except NameError as error:
            raise RuntimeError(
                f"The types of {kind.__name__}'s fields cannot be resolved ({error}). Define the class at the top of "
                "its module, or import the names in its annotations."
            ) from error
        if title := getattr(kind, "_argument_group_name", None):
            groups = {title: [field for field in dataclasses.fields(kind) if field.init]}
        else:
            groups = grouped(kind)
        there = {} if title else {group.title: group for group in self._action_groups}
        for name, members in groups.items():
            group = there.get(name) or self.add_argument_group(name)
            for field in members:
                add_field(group, field, hints[field.name])

    def _hint(self, name: str) -> str:
        return hint_for_argument(name, set().union(*map(_names, self.dataclass_types)))

    def _translator(self) -> DataClassType | None:
        """The first dataclass that understands older names."""
        return next((kind for kind in self.dataclass_types if getattr(kind, "takes_old_names", False)), None)

    def _old_names(self, kind: DataClassType | None) -> set[str]:
        """Returns the older names that `kind` translates: all that are not a field of any dataclass."""
        if kind is None or kind is not self._translator():
            return set()
        return set(OLD_NAMES).difference(*map(_names, self.dataclass_types))

    def _older_names(self, words: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Older names among the words, with their values, and the other words. They are no options of --help."""
        finder = ArgumentParser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
        for name in sorted(self._old_names(self._translator())):
            if free := [word for word in spellings(name) if word not in self._option_string_actions]:
                if name in OLD_FLAGS:
                    finder.add_argument(*free, dest=name, type=string_to_bool, nargs="?", const=True)
                else:
                    finder.add_argument(*free, dest=name, type=OLD_NUMBERS.get(name, str))
        found, rest = finder.parse_known_args(words)
        return vars(found), rest


def _names(kind: DataClassType) -> set[str]:
    return {field.name for field in dataclasses.fields(kind) if field.init}


def _take(namespace: Namespace, kind: DataClassType) -> dict[str, Any]:
    """Removes the values of the fields of `kind` from the namespace and returns them."""
    given = {name: value for name, value in vars(namespace).items() if name in _names(kind)}
    for name in given:
        delattr(namespace, name)
    return given
