"""YAML with line numbers: plain values and their lines, without their meaning.

Scalars are read as YAML 1.2 does: `no` and `off` are words, 5e-5 is a number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

from trainwright._types import JSONObject
from trainwright.errors import RecipeError, excerpt

Path = tuple[str, ...]  # keys from the top; an item of a list by its number

FLOAT = re.compile(
    r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN)$"
)
TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool", "null", "str", "seq", "map"))
DEEPEST = 32
TOO_DEEP = f"values are nested deeper than {DEEPEST} levels"
LONGEST_NUMBER = 40
MOST_PARTS = 20_000  # parts of a file, with its aliases expanded
# Problem in PyYAML's words -> the usual cure.
NOT_CLOSED = {"flow mapping": "a {", "flow sequence": "a [", "quoted scalar": "a quote"}
CURES = {
    "mapping values are not allowed": " Entries of one level begin in the same column; quote a text with a colon.",
    "expected <block end>": " Entries of one level begin in the same column.",
    "cannot start any token": " Indent with spaces, not tabs; a text that begins with a sign needs quotes.",
    "could not find expected ':'": " Write `name: value`, with a space after the colon.",
    "unexpected end of stream": " A quote or a bracket is not closed.",
}


def make_absolute(path: FilePath) -> FilePath:
    """Returns an absolute path without `..`, which would pass through directories that have nothing to do with it.

    Links behind the last `..` stay as they are.
    """
    parts = path.absolute().parts
    if os.pardir not in parts:
        return FilePath(*parts)
    last = len(parts) - parts[::-1].index(os.pardir)
    return FilePath(os.path.realpath(FilePath(*parts[:last])), *parts[last:])


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core scalars in place of 1.1's."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 -- filled below, as PyYAML requires
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Counts the levels of nesting, since PyYAML recurses into each."""
        if self.depth > DEEPEST:
            mark = self.get_mark()
            raise yaml.MarkedYAMLError(problem=TOO_DEEP, problem_mark=mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


@dataclass
class Tree:
    """A mapping read from a file, with the places of its parts."""

    name: str  # name of the file in errors
    value: JSONObject = field(default_factory=dict)  # plain dicts, lists and scalars
    places: dict[Path, int | str] = field(default_factory=dict)  # path of keys -> its line, or the option that set it
    lines: list[str] = field(default_factory=list)  # lines of the file

    def place(self, path: Path) -> int | str:
        """Returns the place of a path, or of its nearest parent."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, 1)

    def is_typed(self, path: Path) -> bool:
        """Returns whether an option of the command set the value at a path."""
        return isinstance(self.place(path), str)

    def find_base(self, base: FilePath, path: Path) -> FilePath:
        """Returns the directory that a relative path at an entry begins at: `base`, or where the command was typed."""
        return FilePath.cwd() if self.is_typed(path) else base

    def said(self, path: Path, problem: str) -> str:
        """Returns a problem with its place and the beginning of that line of the file."""
        place = self.place(path)
        if isinstance(place, str):
            return f"{place}: {problem}"
        shown = excerpt(self.lines[place - 1].strip()) if place <= len(self.lines) else ""
        return f"{self.name}:{place}: {problem}" + (f"\n    {shown}" if shown else "")

    def refuse(self, problems: Iterable[tuple[Path, str]]) -> None:
        """Raises one RecipeError with all problems, in the order of the file; does nothing without problems."""
        found = sorted(dict.fromkeys(problems), key=lambda one: _order(self.place(one[0])))
        if found:
            listed = [self.said(path, problem) for path, problem in found]
            error = RecipeError("\n".join(listed))
            error.problems = tuple(listed)
            error.entries = tuple(found)
            raise error

    def set(self, path: Path, value: object, *, origin: str) -> None:
        """Sets the value at a path; `origin` is its place in errors."""
        inner = self.value
        for key in path[:-1]:
            if not isinstance(inner.get(key), dict):
                inner[key] = {}
            inner = inner[key]
        inner[path[-1]] = value
        # Lines of what was there before; the new value has one place.
        self.places = {at: place for at, place in self.places.items() if at[: len(path)] != path}
        self.places[path] = origin


def parse(text: str, name: str) -> Tree:
    """Parses the mapping in a text.

    Raises RecipeError if the text is not YAML, not a mapping or repeats a key, and for features that no configuration
    needs: tags, recursive or multiplying aliases, deep nesting, huge numbers.
    """
    tree = Tree(name, lines=text.splitlines())
    value = _value(tree, text)
    if value is not None and not isinstance(value, dict):
        raise RecipeError(f"{name}:1: this must be names with values, such as `task: text-classification`.")
    tree.value = value or {}
    return tree


def scalar(text: str) -> Any:  # any YAML value
    """Parses a value as in a file; RecipeError if it is not YAML, or not allowed in a file."""
    if len(text) == 1 and text in ",|\t":  # a delimiter, which needs quotes in a file
        return text
    tree = Tree("value", lines=text.splitlines())
    return _value(tree, text)


def _value(tree: Tree, text: str) -> Any:  # any YAML value
    """Returns the value of a text; nodes are checked first, since nothing may be expanded before that."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        found = list(_walk(node, (), tree.places))
        if len(tree.places) >= MOST_PARTS:
            found = [((*tree.places,)[-1], f"aliases (*name) make more than {MOST_PARTS} parts of this file.")]
        tree.refuse(found)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = str(error.problem or error.context)
        begun = next((text for part, text in NOT_CLOSED.items() if part in str(error.context)), None)
        start = error.context_mark
        if begun is not None and start is not None and mark is not None and mark.line > start.line:
            mark = start  # the line that is wrong, and not the one where that is noticed
            problem = f"{begun} is not closed"
        tree.places[("",)] = 1 if mark is None else mark.line + 1
        cure = next((cure for part, cure in CURES.items() if part in problem), "")
        raise RecipeError(tree.said(("",), f"this is not YAML: {excerpt(problem)}.{cure}")) from None
    except yaml.reader.ReaderError as error:
        tree.places[("",)] = text.count("\n", 0, error.position) + 1
        raise RecipeError(tree.said(("",), f"this is not YAML: {error.reason}.")) from None


def _walk(
    node: yaml.Node, path: Path, places: dict[Path, int | str], above: tuple[yaml.Node, ...] = ()
) -> Iterator[tuple[Path, str]]:
    """Fills `places`; yields repeated keys, loops, tags and huge numbers, which no configuration needs."""
    if len(places) >= MOST_PARTS:
        return
    places.setdefault(path, node.start_mark.line + 1)
    if any(node is one for one in above):
        yield path, "an alias (*name) is inside the value that it names."
        return
    if len(above) > DEEPEST:
        yield path[:DEEPEST], f"{TOO_DEEP}."
        return
    if node.tag not in TAGS:
        yield path, f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not supported. Write the plain value."
        return
    if node.tag == TAGS[0] and len(node.value) > LONGEST_NUMBER:
        yield path, f"a number of {len(node.value)} digits; at most {LONGEST_NUMBER} are read."
        return
    above = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield from _walk(item, (*path, str(number)), places, above)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            odd = (*path, "?")
            places[odd] = key.start_mark.line + 1
            yield odd, "a name belongs before the colon, not a list or a mapping."
            continue
        inner = (*path, str(key.value))
        if inner[-1] in seen:
            places[inner] = key.start_mark.line + 1
            yield inner, f"{'.'.join(inner)} appears twice."
            continue
        seen.add(inner[-1])
        places[inner] = key.start_mark.line + 1
        yield from _walk(value, inner, places, above)


def _order(place: int | str) -> tuple[int, int]:
    return (0, place) if isinstance(place, int) else (1, 0)


def dump(value: Mapping[str, object]) -> str:
    """Writes YAML that `parse` reads back to the same values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=110)


class _Dumper(yaml.SafeDumper):
    """Quotes words that either version of YAML would misread."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))
