"""What an assistant may ask of the commands: paths below one folder, and only reading unless writes are allowed.

Pure questions about the words of a call and the files that they name. The process that carries a call out is started
elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trainwright._types import RECIPE_NAME, is_url
from trainwright.capability_table import COMMANDS
from trainwright.errors import RecipeError
from trainwright.support.door import MAX_SETTINGS, parse_json, read_bytes, shown

# Command -> its parameters that only read. A command, or a parameter, that is not listed needs `--allow-writes`: it
# writes files, starts a run, changes one under way, sends something, installs packages or imports the user's code.
READS: Mapping[str, frozenset[str]] = {
    "check": frozenset({"config", "overrides", "memory", "budget", "processes", "per_node", "engine"}),
    "compare": frozenset({"runs", "tolerance"}),
    "env": frozenset(),
    "eval": frozenset({"model", "data", "overrides", "task", "weights", "hardest"}),
    "predict": frozenset({"model", "data", "overrides", "task", "weights", "batch_size", "max_new_tokens"}),
    "runs": frozenset({"folder"}),
    "schema": frozenset(),
    "train": frozenset({"config", "overrides", "dry_run"}),
    "verify": frozenset({"checkpoint"}),
    **{entry.name: frozenset(entry.reads) for entry in COMMANDS if entry.reads is not None},
}
ALWAYS = frozenset({"as_json", "help"})
READS_WITH = {"train": "dry_run"}  # command -> parameter without which it writes
# They read the files that a recipe names.
WITH_RECIPE = ("check", "extend", "resume", "train", *(entry.name for entry in COMMANDS if entry.reads_recipe))
SEARCHES = ("runs",)  # they take a folder of many things, and follow no link below it
# File in a folder of a run -> the keys to a place that it names, and that a command reads.
NAMES_PLACES: Mapping[str, tuple[str, ...]] = {
    "adapter_config.json": ("base_model_name_or_path",),
    "incident.json": ("parent", "path"),
}
MAX_MATCHES = 10_000  # files of a pattern
PATTERN = "*?["


class Refusal(ValueError):
    """A call is not allowed."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """Rules of a server.

    Attributes:
        root: real path of the folder that no path may leave.
        allows_writes: whether all commands may be called.
    """

    root: Path
    allows_writes: bool

    def folder(self, name: str | None) -> Path:
        """Returns the working folder of a call; Refusal if it is not below the server's."""
        if name is None:
            return self.root
        self._check_text(name, [self.root])
        folder = self.root / name
        if not folder.is_dir():
            raise Refusal(f"There is no folder {shown(name)} below {self.root}.")
        return Path(os.path.realpath(folder))

    def check(self, command: Any, words: list[str], folder: Path) -> None:
        """Raises Refusal if a call is not allowed.

        Args:
            command: the command, an object of click; its type differs between versions of typer.
            words: what was typed after its name.
            folder: working folder of the call.
        """
        given, others = _parsed(command, words)
        if not self.allows_writes:
            _check_reads(command, given)
        texts = [*_texts(given), *others]
        self._check_texts(texts, [folder])
        places = [folder / text for text in _texts({name: given[name] for name in given if _is_place(command, name)})]
        for place in places:
            if place.is_dir() and command.name not in SEARCHES:
                self._check_folder(place)
        if command.name in WITH_RECIPE:
            for recipe in _recipes(places):
                self._check_texts(
                    _read_recipe_texts(recipe), [recipe.parent, *(one for one in places if not one.is_file())]
                )
                self._check_texts(texts, [recipe.parent])

    def _check_texts(self, texts: Iterable[object], bases: list[Path]) -> None:
        for text in texts:
            if isinstance(text, str):
                for part in _parts(text):
                    self._check_text(part, bases)

    def _check_text(self, text: str, bases: list[Path]) -> None:
        """Raises Refusal if a text names something outside, as a path from one of these folders or as a URL."""
        if _is_any_url(text):
            raise Refusal(f"{shown(text)} is a URL. This server reads files below {self.root} alone.")
        if "\0" in text:
            raise Refusal(f"{shown(text)} is not a path.")
        if text.startswith("~"):
            raise Refusal(self._outside(text))
        for base in bases:
            for path in _matches(base / text):
                if not self._is_below(path):
                    raise Refusal(self._outside(text))

    def _check_folder(self, folder: Path) -> None:
        """Raises Refusal if a link in a folder leads outside, or a file there names a place outside."""
        for place, folders, files in os.walk(folder):
            for name in (*folders, *files):
                path = Path(place) / name
                if path.is_symlink() and not self._is_below(path):
                    raise Refusal(self._outside(str(path), "is a link that"))
            for name in NAMES_PLACES.keys() & set(files):
                self._check_texts([_named_place(Path(place) / name)], [Path(place), folder])

    def _is_below(self, path: Path) -> bool:
        real = Path(os.path.realpath(path))
        return real == self.root or self.root in real.parents

    def _outside(self, text: str, which: str = "") -> str:
        which = f" {which}" if which else ""
        return (
            f"{shown(text)}{which} leads out of {self.root}. This server is confined to that folder; a person can "
            "start it with another: trainwright mcp FOLDER."
        )


def _is_any_url(text: str) -> bool:
    """Returns whether a text is a URL for some reader: of fsspec in a chain, or of a library in a form of its own."""
    return is_url(text) or "://" in text.partition(" ")[0] or text.lower().startswith(("file:", "data:"))


def reads(name: str) -> bool:
    """Returns whether a command has a form that only reads."""
    return name in READS


def _check_reads(command: Any, given: Mapping[str, object]) -> None:
    cure = "A person can start the server with --allow-writes."
    allowed = READS.get(command.name)
    if allowed is None:
        raise Refusal(f"{command.name} writes files, starts or changes a run, or sends something. {cure}")
    for name in given:
        if name not in allowed | ALWAYS:
            raise Refusal(f"{command.name} with {_spelling(command, name)} does more than read. {cure}")
    needed = READS_WITH.get(command.name)
    if needed is not None and needed not in given and "help" not in given:
        raise Refusal(f"{command.name} without {_spelling(command, needed)} starts a run. {cure}")


def _spelling(command: Any, name: str) -> str:
    """Returns a parameter as it is typed."""
    parameter = next(one for one in command.params if one.name == name)
    return str(max(parameter.opts, key=len)) if parameter.param_type_name == "option" else str(name).upper()


def _parsed(command: Any, words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the parameters that are given, as text, and the other words; no value is converted or looked up."""
    context = command.context_class(command, info_name=command.name, **command.context_settings)
    try:
        given, others, _ = command.make_parser(context).parse_args(args=list(words))
    except Exception as error:
        if not hasattr(error, "format_message"):  # which usage errors have, of click's and of typer's own copy of it
            raise
        raise Refusal(f"{command.name}: {error.format_message()}") from None
    return {str(name): value for name, value in given.items() if value not in (None, ())}, others


def _is_place(command: Any, name: str) -> bool:
    """Returns whether a parameter names files: any but the options that are words or numbers."""
    parameter = next((one for one in command.params if one.name == name), None)
    return parameter is not None and parameter.name not in ("words", "overrides")


def _texts(value: object) -> Iterator[str]:
    """Yields the texts in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(name) if not isinstance(inner, (str, list, tuple, bool)) else ()
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def _parts(text: str) -> Iterator[str]:
    """Yields a word, and the values in it where it is an override: `data.train=[a.csv, b.csv]`."""
    yield text
    name, sign, value = text.partition("=")
    if sign and not any(letter.isspace() for letter in name):
        from trainwright.cli.recipe.yaml_tree import scalar

        yield value
        try:
            found = scalar(value)
        except RecipeError:
            return
        if not isinstance(found, str):
            yield from _texts(found)


def _recipes(places: Iterable[Path]) -> Iterator[Path]:
    """Yields the configuration files that a command reads for these places: themselves, or those of their runs."""
    for place in places:
        for recipe in (place, place / RECIPE_NAME, place.parent / RECIPE_NAME):
            if recipe.is_file() and recipe.suffix in (".yaml", ".yml", place.suffix):
                yield recipe


def _read_recipe_texts(recipe: Path) -> list[str]:
    """Returns the texts in a configuration file; none if it is not readable, so that the command refuses it."""
    from trainwright.cli.recipe.yaml_tree import parse

    try:
        return list(_texts(parse(read_bytes(recipe, max_bytes=MAX_SETTINGS).decode(), str(recipe)).value))
    except (RecipeError, OSError, ValueError):
        return []


def _named_place(path: Path) -> object:
    """Returns the place that a file names; None if it names none."""
    try:
        found = parse_json(read_bytes(path, max_bytes=MAX_SETTINGS))
    except (OSError, ValueError):
        return None
    for key in NAMES_PLACES[path.name]:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _matches(path: Path) -> Iterator[Path]:
    """Yields a path, and the files that it stands for as a pattern."""
    yield path
    parts = path.parts
    first = next((number for number, part in enumerate(parts) if any(sign in part for sign in PATTERN)), None)
    if first is None:
        return
    try:
        yield from islice(Path(*parts[:first]).glob(str(Path(*parts[first:]))), MAX_MATCHES)
    except (OSError, ValueError, IndexError, NotImplementedError):  # no pattern, and no command reads it as one
        return
