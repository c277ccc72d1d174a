"""HfArgumentParser: dataclasses from the command line, a dict, a JSON or a YAML file. Options are in cli_options.py."""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, get_type_hints

from trainwright.config.cli_options import (
    DataClass,
    DataClassType,
    HelpFormatter,
    HfArg,
    add_field,
    make_choice_type_function,
    spellings,
    string_to_bool,
)
from trainwright.config.deprecated import OLD_FLAGS, OLD_NAMES, OLD_NUMBERS, unknown_message
from trainwright.config.summary import grouped
from trainwright.errors import ArgumentError

__all__ = ["DataClass", "DataClassType", "HfArg", "HfArgumentParser", "make_choice_type_function", "string_to_bool"]


class HfArgumentParser(ArgumentParser):
    """An ArgumentParser whose options are the fields of dataclasses.

    Ordinary options may be added; their values come back in a namespace after the dataclasses. A dataclass with the
    attribute `_argument_group_name` is shown as one group of that name in --help, others by the groups of their fields.
    """

    dataclass_types: Iterable[DataClassType]

    def __init__(self, dataclass_types: DataClassType | Iterable[DataClassType] | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(**kwargs)
        if dataclass_types is None:
            dataclass_types = []
        elif not isinstance(dataclass_types, Iterable):
            dataclass_types = [dataclass_types]
        self.dataclass_types: list[DataClassType] = list(dataclass_types)
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
            args: words; None: those of the process.
            return_remaining_strings: also return the words that no dataclass has a field for.
            look_for_args_file: read the file with the script's name and the suffix .args, if there is one.
            args_filename: file to read instead.
            args_file_flag: option whose values are names of further files.

        Returns:
            Instances in the order of the dataclasses; then a namespace of options added by hand, if there are any;
            then, on request, the remaining words.

        Raises:
            ArgumentError: there are remaining words, and they were not asked for.
        """
        words = list(sys.argv[1:] if args is None else args)
        files = _default_files(args_filename, look_for_args_file)
        if args_file_flag:
            named, words = _named_files(args_file_flag, words)
            files += named
        from_files = [word for file in files if file.exists() for word in file.read_text(encoding="utf-8").split()]
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
            raise ArgumentError(f"Unknown arguments: {' '.join(remaining)}. --help lists the known ones.")
        return (*outputs, *others)

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
        return self._parse_tree(json.loads(Path(json_file).read_text(encoding="utf-8")), json_file, allow_extra_keys)

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

        tree = yaml.safe_load(Path(yaml_file).read_text(encoding="utf-8"))
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
                "its module, or import what its annotations name."
            ) from error
        if title := getattr(kind, "_argument_group_name", None):
            group = self.add_argument_group(title)
            for field in dataclasses.fields(kind):
                if field.init:
                    add_field(group, field, hints[field.name])
        else:
            self._add_by_group(kind, hints)

    def _add_by_group(self, kind: DataClassType, hints: dict[str, Any]) -> None:
        groups = {group.title: group for group in self._action_groups}
        for title, members in grouped(kind).items():
            group = groups.get(title) or self.add_argument_group(title)
            for field in members:
                add_field(group, field, hints[field.name])

    def _translator(self) -> DataClassType | None:
        """The first dataclass that understands older names."""
        return next((kind for kind in self.dataclass_types if getattr(kind, "takes_old_names", False)), None)

    def _old_names(self, kind: DataClassType | None) -> set[str]:
        """The older names that go to `kind`: those that are no field of any dataclass."""
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
    """Remove what belongs to `kind` from the namespace."""
    given = {name: value for name, value in vars(namespace).items() if name in _names(kind)}
    for name in given:
        delattr(namespace, name)
    return given


def _default_files(filename: str | None, look: bool) -> list[Path]:
    if filename:
        return [Path(filename)]
    return [Path(sys.argv[0]).with_suffix(".args")] if look and sys.argv and sys.argv[0] else []


def _named_files(flag: str, words: list[str]) -> tuple[list[Path], list[str]]:
    finder = ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(flag, dest="files", action="append", default=[])
    found, rest = finder.parse_known_args(words)
    return [Path(file) for file in found.files], rest
