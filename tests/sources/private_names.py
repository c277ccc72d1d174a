"""Reads from sources what they use of other packages behind the public names, and where they handle addresses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

from .parsed import parse

PACKAGES = ("torch", "numpy", "transformers", "accelerate", "huggingface_hub")
ADDRESSES = ("ctypes", "data_ptr", "const_data_ptr", "from_address", "__array_interface__", "__cuda_array_interface__")
# Documented in spite of their underscore: the methods of a named tuple.
DOCUMENTED = ("_fields", "_replace", "_asdict", "_make", "_field_defaults")
# Functions that take the name of an attribute, a module or a class as a text.
REFLECTIVE = (
    "getattr",
    "hasattr",
    "setattr",
    "delattr",
    "import_module",
    "__import__",
    "find_spec",
    "attrgetter",
    "methodcaller",
    "get_submodule",
    "callback",  # of an ExitStack, with setattr
    "object",  # of mock.patch
)
# Methods of dicts, sets and lists: an id that is handed to one is a key, not an address.
BY_KEY = ("get", "pop", "setdefault", "add", "discard", "remove", "append")

# Values that are read through a variable.
PLAIN = (ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Set, ast.Dict)

PRIVATE = re.compile(r"_[A-Za-z]\w*")
PRIVATE_PATH = re.compile(rf"({'|'.join(PACKAGES)})([.:]\w+)*[.:]_[A-Za-z]\w*([.:]\w+)*")


def is_private(name: str) -> bool:
    """`_name`, but neither `__name__` nor `_`."""
    return PRIVATE.fullmatch(name) is not None and name not in DOCUMENTED


def defined_in(trees: Iterable[ast.AST]) -> set[str]:
    """Returns the private names that sources define: functions, classes, variables, and attributes of `self`."""
    return {name for tree in trees for node in ast.walk(tree) for name in _defined_by(node) if is_private(name)}


def _defined_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
        yield node.attr
    elif (key := _key_of_attributes(node)) is not None and _is_self(key[0]):
        yield key[1]
    elif isinstance(node, ast.Call) and _is_attributes_of_self(node.func):  # vars(self).update(_x=1)
        yield from (keyword.arg for keyword in node.keywords if keyword.arg is not None)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_attributes_of_self(node: ast.expr) -> bool:
    inner = _owner_of_attributes(node.value) if isinstance(node, ast.Attribute) else None
    return inner is not None and _is_self(inner)


def _owner_of_attributes(node: ast.expr) -> ast.expr | None:
    """The `x` of `vars(x)` and `x.__dict__`."""
    if isinstance(node, ast.Call) and _last_name(node.func) == "vars" and len(node.args) == 1:
        return node.args[0]
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return node.value
    return None


def _key_of_attributes(node: ast.AST) -> tuple[ast.expr, str] | None:
    """The `x` and the name of `vars(x)["_name"]`, `x.__dict__["_name"]`, and of their `get`, `pop` and the like."""
    mapping: ast.expr | None = None
    key: ast.expr | None = None
    if isinstance(node, ast.Subscript):
        mapping = node.value
        key = node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        mapping = node.func.value
        key = node.args[0]
    owner = None if mapping is None else _owner_of_attributes(mapping)
    if owner is None or not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
        return None
    return owner, key.value


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


class Source:
    """One file, with its imports as dotted names, the parent of each node, and the names that other files define."""

    def __init__(self, text: str, ours: Iterable[str] = ()) -> None:
        self.tree = parse(text)
        self.ours = {*ours} | defined_in([self.tree])
        self.imported = dict(_imports(self.tree))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.spoken = self._texts_for_reflection()

    def uses(self) -> Iterator[tuple[int, str]]:
        """Yields line and name of each use. The name of an attribute of an object begins with a dot."""
        for node in ast.walk(self.tree):
            yield from ((getattr(node, "lineno", 0), name) for name in self._uses_of(node))

    def _uses_of(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_reported(alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (path for alias in node.names if _is_reported(path := f"{node.module}.{alias.name}"))
        elif isinstance(node, ast.Attribute):
            yield from self._attribute(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from self._text(node, node.value)
        elif isinstance(node, ast.Name) and node.id == "id" and self._is_address(node):
            yield "id()"
        if (key := _key_of_attributes(node)) is not None and is_private(key[1]) and key[1] not in self.ours:
            yield f".{key[1]}"

    def _attribute(self, node: ast.Attribute) -> Iterator[str]:
        if node.attr in ADDRESSES:
            yield f".{node.attr}"
        path = self._path(node)
        if path is None:
            if is_private(node.attr) and node.attr not in self.ours:
                yield f".{node.attr}"
        elif _is_reported(path) and not isinstance(self.parents.get(node), ast.Attribute):
            _, *names = path.removeprefix(self._root(node)).split(".")
            if any(map(is_private, names)):  # otherwise the import is reported
                yield path

    def _text(self, node: ast.Constant, value: str) -> Iterator[str]:
        if isinstance(self.parents.get(node), (ast.Expr, ast.JoinedStr)):  # a docstring; a part of a text
            return
        if PRIVATE_PATH.fullmatch(value) or value.partition(".")[0] == "ctypes":
            yield value.replace(":", ".")
        elif node in self.spoken and (value in ADDRESSES or (is_private(value) and value not in self.ours)):
            call = self.parents.get(node)
            owner = self._path(call.args[0]) if isinstance(call, ast.Call) else None
            if owner is None:
                yield f".{value}"
            elif owner.partition(".")[0] in PACKAGES:
                yield f"{owner}.{value}"

    def _texts_for_reflection(self) -> set[ast.AST]:
        """Constants that reach `getattr` and its like: as arguments, by a variable, or as the members of a loop."""
        found = set[ast.AST]()
        variables = set[str]()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and _last_name(node.func) in REFLECTIVE:
                found.update(node.args)
                variables |= {one.id for one in node.args if isinstance(one, ast.Name)}
        seen = set[str]()
        while variables - seen:
            seen |= variables
            for value in self._values_of(variables):
                found.update(ast.walk(value))
                variables = variables | {one.id for one in ast.walk(value) if isinstance(one, ast.Name)}
        return found

    def _values_of(self, variables: set[str]) -> Iterator[ast.expr]:
        """What is assigned to variables, or looped over: names, constants and displays of them."""
        for node in ast.walk(self.tree):
            targets: list[ast.expr] = []
            value: ast.expr | None = None
            if isinstance(node, ast.Assign):
                targets = node.targets
                value = node.value
            elif isinstance(node, (ast.For, ast.comprehension)):
                targets = [node.target]
                value = node.iter
            names = {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            if names & variables and isinstance(
                value, (ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Set, ast.Dict)
            ):
                yield value

    def _path(self, node: ast.expr) -> str | None:
        """The dotted name of a chain of attributes that begins with an import; None for another object."""
        if isinstance(node, ast.Name):
            return self.imported.get(node.id)
        if isinstance(node, ast.Attribute) and (base := self._path(node.value)) is not None:
            return f"{base}.{node.attr}"
        return None

    def _root(self, node: ast.expr) -> str:
        while isinstance(node, ast.Attribute):
            node = node.value
        return self._path(node) or ""

    def _is_address(self, node: ast.Name) -> bool:
        """True unless `id(x)` is compared, is a member of a set, or is the key of a dict."""
        inner = self.parents[node]
        if not isinstance(inner, ast.Call):
            return False  # another variable of this name
        if inner.func is not node:
            return _last_name(inner.func) != "map" and not any(one.value is node for one in inner.keywords)
        outer = self.parents[inner]
        while isinstance(outer, (ast.Tuple, ast.NamedExpr)):
            inner = outer
            outer = self.parents[outer]
        if isinstance(outer, ast.Assign):  # `key = id(x)`, used below
            return False
        if isinstance(outer, ast.Subscript):
            return outer.slice is not inner
        if isinstance(outer, ast.Dict):
            return inner not in outer.keys
        if isinstance(outer, ast.DictComp):
            return outer.key is not inner
        if isinstance(outer, ast.Call):
            return not (isinstance(outer.func, ast.Attribute) and outer.func.attr in BY_KEY)
        return not isinstance(outer, (ast.Compare, ast.Set, ast.SetComp))


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields the names that imports bind, wherever they stand, with the dotted names behind them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((alias.asname or alias.name, f"{base}.{alias.name}") for alias in node.names)


def _is_reported(path: str) -> bool:
    """True for ctypes, and for a dotted name of the five packages with a private part."""
    package, *names = path.split(".")
    return package == "ctypes" or (package in PACKAGES and any(map(is_private, names)))


def uses_in(texts: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Returns file and name of each use in several sources, with its first line; one may define another's names."""
    ours = defined_in(map(parse, texts.values()))
    found: dict[tuple[str, str], int] = {}
    for file, text in texts.items():
        for line, name in Source(text, ours).uses():
            found.setdefault((file, name), line)
    return found
