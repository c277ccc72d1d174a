"""No module but `run/internals.py` reads a private attribute of a trainer that is ours.

What the original has under a name with an underscore is a hook, or is read by others: it may be used by its name.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

import pytest
import transformers

from trainwright import Seq2SeqTrainer, Trainer

from .parsed import files, parse
from .private_names import defined_in, is_private

DOORS = ("trainer.py", "seq2seq_trainer.py", "run/internals.py", "run/parts.py", "run/published.py")

# Hooks that other code calls although the installed original has none of these names.
HOOKS = {
    "_activate_neftune": "earlier versions of transformers publish it, and subclasses override it",
    "_deactivate_neftune": "as _activate_neftune",
}


def names_of(*classes: type) -> set[str]:
    """Returns the private names of classes: methods, and attributes that are assigned to `self`."""
    found: set[str] = set()
    for cls in classes:
        found |= {name for name in dir(cls) if is_private(name)}
        found |= defined_in([ast.parse(textwrap.dedent(inspect.getsource(cls)))])
    return found


PUBLISHED = names_of(transformers.Trainer, transformers.Seq2SeqTrainer)
OURS = names_of(Trainer, Seq2SeqTrainer) - PUBLISHED - HOOKS.keys()


def reads_of(text: str) -> Iterator[tuple[int, str]]:
    """Yields line and name of each use of a name that is ours; what an object reads of itself is its own."""
    tree = parse(text)
    slots = {inner for node in ast.walk(tree) if _is_slots(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in slots:
            continue
        if isinstance(node, ast.Attribute) and node.attr in OURS and not _is_own(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.keyword) and node.arg in OURS:  # with_parts(trainer, _run=run)
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in OURS:
            yield node.lineno, node.value


def _is_slots(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__slots__"]


def _is_own(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_the_names_are_found() -> None:
    assert {"_trainwright", "_adopt_model", "_make_optimizer", "_begin_forward", "_differentiate"} <= OURS
    assert {"_save_checkpoint", "_train_batch_size", "_created_lr_scheduler", "_signature_columns"} <= PUBLISHED


def test_each_exception_is_needed() -> None:
    assert HOOKS.keys() <= names_of(Trainer)
    assert not HOOKS.keys() & PUBLISHED


def test_a_trainers_private_attributes_are_read_through_internals() -> None:
    found = []
    for file, path in files().items():
        if file not in DOORS:
            found += [f"{file}:{line} {name}" for line, name in reads_of(path.read_text(encoding="utf-8"))]
    assert found == []


def test_internals_reads_what_it_is_there_for() -> None:
    door = files()["run/internals.py"].read_text(encoding="utf-8")
    assert {"_trainwright"} <= {name for _, name in reads_of(door.replace("self._trainer", "trainer"))}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("def f(trainer):\n    return trainer._trainwright.services", "_trainwright"),
        ("def f(anything):\n    anything._trainwright = None", "_trainwright"),
        ("class A:\n    def f(self):\n        return self._trainer._trainwright", "_trainwright"),
        ("def f(trainer):\n    return getattr(trainer, '_uses_outputs')()", "_uses_outputs"),
        ("def f(trainer):\n    return with_parts(trainer, _trainwright=None)", "_trainwright"),
        ("def f(trainer):\n    return with_parts(trainer, **{'_trainwright': []})", "_trainwright"),
    ],
)
def test_a_planted_read_is_found(text: str, name: str) -> None:
    assert [found for _, found in reads_of(text)] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "def f(trainer):\n    trainer._save_checkpoint(trainer.model, trial=None)",
        "def f(trainer):\n    return trainer._train_batch_size",
        "class A:\n    def f(self):\n        return self._trainwright",
        "class A:\n    __slots__ = ('_trainwright',)",
        "def f(trainer):\n    return Internals(trainer).engine",
    ],
)
def test_what_is_published_or_ones_own_is_allowed(text: str) -> None:
    assert list(reads_of(text)) == []
