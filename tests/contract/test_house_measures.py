"""Measures of the code, counted in the sources."""

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainwright
from trainwright import Trainer
from trainwright.capability_table import TABLE
from trainwright.config.fields.our_fields import CORE

from ..sources.parsed import parse_file

SOURCE = Path(trainwright.__file__).parent
TRAINERS = ("trainer", "copied", "moved", "other")  # what a variable that holds one is called
MAX_SITES = 43
MAX_MODULES = 135  # of the core, with its subpackages, that the two public classes load
OTHER_PACKAGES = {"torch", "numpy", "tqdm", "xxhash"}  # besides what torch itself imports
# What is imported where a run chooses it.
CHOSEN = (
    "capabilities",
    "preflight",
    "hub",
    "search",
    "report",
    "trackers",
    "support.patches",
    "cli",
    "compat",
    "callbacks.progress",
    "config.deprecated",
    "config.fsdp_config",
    "data.streaming.reader",
    "distributed.elastic_store",
    "distributed.watchdog",
    "evaluation.eval_loop",
    "optim.factory",
    "run.dry_run",
)


def assigned(tree: ast.AST, *owners: str) -> list[tuple[int, str]]:
    """Where attributes of the variables `owners` are assigned, in this form or by `setattr` and `vars().update`."""
    found = []
    by_name = tuple(
        f"{start}{owner}{end}"
        for owner in owners
        for start, end in (("setattr(", ","), ("vars(", ")."), ("", ".__dict__."))
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            if isinstance(node.value, ast.Name) and node.value.id in owners:
                found.append((node.lineno, node.attr))
        elif isinstance(node, ast.Call) and (text := ast.unparse(node)).startswith(by_name):
            found.append((node.lineno, text))
    return found


def the_trainer() -> ast.ClassDef:
    tree = parse_file(SOURCE / "trainer.py")
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Trainer")


def methods() -> Iterator[ast.FunctionDef]:
    return (node for node in the_trainer().body if isinstance(node, ast.FunctionDef))


def sites() -> list[str]:
    """Assignments of a trainer's attributes outside of its constructor, in its class and elsewhere."""
    own = [site for method in methods() if method.name != "__init__" for site in assigned(method, "self")]
    found = [f"trainer.py:{line} {name}" for line, name in own]
    for path in sorted(SOURCE.rglob("*.py")):
        tree = parse_file(path)
        place = path.relative_to(SOURCE)
        found += [f"{place}:{line} {name}" for line, name in assigned(tree, *TRAINERS)]
    return found


def test_no_class_is_between_trainer_and_object() -> None:
    assert inspect.getmro(Trainer) == (Trainer, object)


@pytest.mark.more
@pytest.mark.costly
def test_attributes_of_a_trainer_are_assigned_at_few_sites() -> None:
    found = sites()
    assert 5 < len(found) < MAX_SITES, "\n".join(found)


def light_modules() -> set[str]:
    """Modules with nothing but fields and rules, which are imported with the arguments, and their packages."""
    places = {*CORE, *(row.fields for row in TABLE), *(row.rules for row in TABLE)} - {""}
    modules = {place.partition(":")[0].partition(".")[2] for place in places}
    light = {module for module in modules if module.endswith((".fields", ".rules"))}
    packages = {module.rpartition(".")[0] for module in light}
    return light | packages | {package.rpartition(".")[0] for package in packages}


@pytest.mark.process
def test_importing_trainer_and_arguments_loads_few_modules() -> None:
    script = (
        "import gc, sys, torch; known = set(sys.modules); from trainwright import Trainer, TrainingArguments; "
        "assert gc.isenabled() and gc.get_freeze_count() == 0; print(*sys.modules.keys() - known)"
    )
    path = os.pathsep.join([str(SOURCE.parent), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    own = {name.partition(".")[2] for name in found.stdout.split() if name.partition(".")[0] == "trainwright"}
    assert {"trainer", "config.arguments"} <= own
    heavy = own - light_modules()
    assert len(heavy) <= MAX_MODULES, "\n".join(sorted(heavy))
    assert [name for name in heavy if f"{name}.".startswith(tuple(f"{one}." for one in CHOSEN))] == []
    packages = {name.partition(".")[0] for name in found.stdout.split()} - {"trainwright"}
    assert packages - sys.stdlib_module_names <= OTHER_PACKAGES


def test_modules_that_are_imported_when_chosen_exist() -> None:
    places = [SOURCE.joinpath(*name.split(".")) for name in CHOSEN]
    assert [place.name for place in places if not (place.is_dir() or place.with_suffix(".py").is_file())] == []


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("self.a = 1", 1),
        ("self.a = self.b = 1", 2),
        ("self.a, self.b = 1, 2", 2),
        ("self.a += 1", 1),
        ("self.a: int = 1", 1),
        ("del self.a", 1),
        ("setattr(self, name, 1)", 1),
        ("vars(self).update(names)", 1),
        ("self.a.b = 1", 0),
        ("other.a = self.b", 0),
        ("with x as self.a: ...", 1),
    ],
)
def test_a_planted_assignment_is_counted(code: str, number: int) -> None:
    assert len(assigned(ast.parse(code), "self")) == number
