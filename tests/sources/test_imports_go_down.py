"""Imports go down: DESIGN's picture, read from the sources. An exception is a redesign."""

from collections.abc import Iterable
from pathlib import Path

import pytest

import trainwright
from trainwright.capability_table import MADE

from .imports import PACKAGE, Import, circles, modules, read

SOURCE = Path(trainwright.__file__).parent

# From the top; a part may import what is below it. Beside it: wings never, the others where there is no circle.
PICTURE = (
    ("cli", "__main__"),
    ("report", "compat"),
    ("seq2seq_trainer",),
    ("trainer",),
    ("preflight", "search"),  # imported when they are asked for
    ("run",),
    ("capabilities",),
    ("capability",),
    ("hub", "trackers"),
    ("loop", "evaluation", "engine", "checkpoint", "data", "optim", "callbacks"),
    ("config", "journal", "command_line"),
    ("distributed",),
    ("state", "support", "errors", "_types", "capability_table"),  # the ground
)
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
WINGS = next(parts for parts in PICTURE if "loop" in parts)
FLOOR = {part: floor for floor, parts in enumerate(PICTURE) for part in parts}
ONLY_FOR_THE_COMMAND_LINE = PICTURE[1]

TRANSFORMERS = (
    "checkpoint.weights",
    "data.columns",
    "optim.schedules",
    "seq2seq_trainer",
    "support.patches",
    "compat",
    "capabilities.packing.document_attention",
    "cli.tasks",
    "config.zero3_init",
    "engine.sequence_parts",
    "search",
)
ACCELERATE = ("engine", "config.arguments", "compat.helpers", "data.prepared_dataloader")
# Packages that a tracker, a search or an optimizer brings along, and the only place that may ask for each.
BROUGHT_ALONG: dict[str, str | tuple[str, ...]] = {
    "tensorboard": "trackers.services",
    "tensorboardX": "trackers.services",
    "mlflow": "trackers.platforms",
    "comet_ml": "trackers.services",
    "trackio": "trackers.services",
    "neptune": "trackers.services",
    "clearml": "trackers.services",
    "dagshub": "trackers.platforms",
    "codecarbon": "trackers.platforms",
    "dvclive": "trackers.services",
    "flytekit": "trackers.platforms",
    "swanlab": "trackers.services",
    "azureml": "trackers.platforms",
    "kubeflow": "trackers.platforms",
    "optuna": "search.optuna",
    "bitsandbytes": "optim",
    "galore_torch": "optim",
    "apollo_torch": "optim",
    "lomo_optim": "optim",
    "grokadamw": "optim",
    "schedulefree": "optim",
    "liger_kernel": ("support.patches", "support.loss_kernels"),
    "cut_cross_entropy": "support.loss_kernels",
    "fsspec": "capabilities.mirror",
    "rouge_score": "cli.tasks.task_metrics",
}


def part_of(module: str) -> str:
    """`trainwright.config.plans` -> `config`; the package itself -> the empty string."""
    return module.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]


def is_in(module: str, places: Iterable[str]) -> bool:
    inner = module.removeprefix(f"{PACKAGE}.")
    return any(inner == place or inner.startswith(f"{place}.") for place in places)


def going_up(imports: Iterable[Import]) -> list[str]:
    """Imports that go up, cross to another wing, or ask the package's root for a lazily loaded name."""
    wrong = []
    for one in imports:
        if one.package != PACKAGE or one.importer == PACKAGE:  # the root only knows names, and loads them lazily
            continue
        here = part_of(one.importer)
        there = part_of(one.module)
        if one.module == f"{PACKAGE}.__version__" or here == there:
            continue
        if here == "compat" and there == "":  # it hands out the public names, so it asks for all of them
            continue
        crosses = here in WINGS and there in WINGS
        upwards = there not in FLOOR or FLOOR[there] < FLOOR.get(here, 0)
        reserved = there in ONLY_FOR_THE_COMMAND_LINE and here != "cli"
        if crosses or upwards or reserved:
            wrong.append(str(one))
    return wrong


def out_of_place(imports: Iterable[Import]) -> list[str]:
    """Imports of other packages where they do not belong."""
    wrong = []
    for one in imports:
        allowed: tuple[str, ...] | None = None
        if one.package == "transformers":
            allowed = (*TRANSFORMERS, "run.checks") if one.guarded else TRANSFORMERS
        elif one.package == "accelerate":
            allowed = ACCELERATE
        elif one.package == "deepspeed":
            allowed = ("engine", "config.zero3_init")
        elif one.package == "wandb":
            allowed = ("trackers.platforms", "search.wandb_sweep")
        elif one.package == "ray":
            allowed = ("search.ray", "callbacks.ray_train")
        elif one.package == "torchao":  # optimizers with 8-bit states, and a recipe for fp8
            allowed = ("optim", "engine.accelerate_setup")
        elif one.module.startswith("torch.utils.tensorboard"):
            allowed = ("trackers.services",)
        elif one.package in BROUGHT_ALONG:
            home = BROUGHT_ALONG[one.package]
            allowed = home if isinstance(home, tuple) else (home,)
        if allowed is not None and not is_in(one.importer, allowed):
            wrong.append(str(one))
    return wrong


# What a run on one device never uses.
RARE = (
    "config.deepspeed_config",
    "config.zero3_init",
    "engine.data_parallel",
    "engine.distributed_base",
    "engine.sharded_base",
    "distributed.collectives",
    "engine.sharded_state",
    "engine.deepspeed",
)


def loaded_with(imports: Iterable[Import], names: Iterable[str]) -> set[str]:
    """Modules of the package that are imported with these, by imports that are in no function."""
    found: set[str] = set()
    open_ = {f"{PACKAGE}.{name}" for name in names}
    while open_:
        found |= open_
        asked = {one.module for one in imports if one.importer in open_ and not one.guarded}
        open_ = {module for module in asked if module.startswith(f"{PACKAGE}.")} - found
    return found


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return read(SOURCE)


def test_every_part_has_its_place_in_the_picture() -> None:
    assert {part_of(module) for module in modules(SOURCE)} - {""} <= FLOOR.keys()


def test_imports_go_down(imports: list[Import]) -> None:
    assert len(imports) > 100
    assert going_up(imports) == []


def test_rare_paths_are_imported_when_they_are_asked_for(imports: list[Import]) -> None:
    known = {one.importer for one in imports}
    assert {f"{PACKAGE}.{name}" for name in RARE} <= known
    loaded = loaded_with(imports, ("trainer", "config.arguments", "engine.select"))
    assert len(loaded) > 50
    assert [name for name in RARE if f"{PACKAGE}.{name}" in loaded] == []


def test_no_modules_import_each_other_in_a_circle(imports: list[Import]) -> None:
    assert circles(imports) == []


def test_no_parts_import_each_other_in_a_circle(imports: list[Import]) -> None:
    parts = [
        Import(f"{PACKAGE}.{part_of(one.importer)}", f"{PACKAGE}.{part_of(one.module)}", one.line, one.guarded)
        for one in imports
        if one.package == PACKAGE and part_of(one.importer) and part_of(one.module)
    ]
    assert circles(parts) == []


def test_other_packages_are_imported_where_they_belong(imports: list[Import]) -> None:
    assert out_of_place(imports) == []


def test_a_run_asks_transformers_in_one_place_and_the_trainer_does_not(imports: list[Import]) -> None:
    importers = [one.importer for one in imports if one.package == "transformers"]
    asked = [part_of(importer) for importer in importers if importer != f"{PACKAGE}.run.checks"]  # tells its classes
    assert asked.count("run") <= 1
    assert "trainer" not in asked


# Who may import a capability: the table finds them by name. The trainer has two methods that belong to one, and the
# command line has commands.
HOMES = ("capabilities",)
KNOWS_EXTENSIONS = (*HOMES, "preflight", "trainer", "cli")


def knowing_an_extension(imports: Iterable[Import]) -> list[str]:
    """Imports of a single capability where only the protocol may be known."""
    return [str(one) for one in imports if part_of(one.module) in HOMES and not is_in(one.importer, KNOWS_EXTENSIONS)]


def test_only_the_table_knows_a_capability(imports: list[Import]) -> None:
    assert knowing_an_extension(imports) == []


def test_each_capability_stands_below_those_that_it_needs() -> None:
    above: set[str] = set()
    for row in MADE:
        assert set(row.load().needs) <= above, row.name
        above.add(row.name)
    assert len(above) == len(MADE)


def test_a_planted_import_of_an_extension_is_found(tmp_path: Path) -> None:
    files = {"run/run.py": "def f():\n    from trainwright.capabilities import guard", "capabilities/guard.py": ""}
    expected = ["trainwright.run.run:2 imports trainwright.capabilities.guard"]
    assert knowing_an_extension(plant(tmp_path, files)) == expected


PLANTED = {
    "loop/step.py": (
        "from trainwright.engine.base import Engine",
        "trainwright.loop.step:1 imports trainwright.engine.base",
    ),
    "state/progress.py": (
        "def f():\n    from trainwright.config import plans",
        "trainwright.state.progress:2 imports trainwright.config.plans",
    ),
    "data/loader.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from trainwright.trainer import Trainer",
        "trainwright.data.loader:3 imports trainwright.trainer",
    ),
    "optim/factory.py": (
        "from ..data import order",
        "trainwright.optim.factory:1 imports trainwright.data.order",
    ),
    "config/rules.py": ("import trainwright.run", "trainwright.config.rules:1 imports trainwright.run"),
    "hub/model_card.py": (
        "from trainwright import Trainer",
        "trainwright.hub.model_card:1 imports trainwright.Trainer",
    ),
    "state/throughput.py": (
        "import importlib\nimportlib.import_module('trainwright.loop.fit')",
        "trainwright.state.throughput:2 imports trainwright.loop.fit",
    ),
    "run.py": ("from trainwright.report import run_page", "trainwright.run:1 imports trainwright.report.run_page"),
}


def plant(root: Path, files: dict[str, str]) -> list[Import]:
    """A package with these files, and empty ones that they can name."""
    empty = ("engine/base.py", "config/plans.py", "trainer.py", "data/order.py", "loop/fit.py", "report/run_page.py")
    for name, text in (dict.fromkeys(empty, "") | files | {"__init__.py": ""}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in root.iterdir():
        if folder.is_dir():
            (folder / "__init__.py").touch()
    return read(root)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_import_is_found(name: str, tmp_path: Path) -> None:
    text, expected = PLANTED[name]
    assert going_up(plant(tmp_path, {name: text})) == [expected]


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    files = {
        "loop/fit.py": "def f():\n    from trainwright.loop import step",
        "loop/step.py": "from trainwright.loop.setup import Setup",
        "loop/setup.py": "import trainwright.loop.fit",
        "evaluation/eval_loop.py": "from trainwright.loop import step",
    }
    names = [f"trainwright.loop.{name}" for name in ("fit", "setup", "step")]
    assert circles(plant(tmp_path, files)) == [names]


@pytest.mark.parametrize(
    ("name", "text", "is_wrong"),
    [
        ("loop/fit.py", "import transformers", True),
        ("loop/fit.py", "def f():\n    from accelerate import Accelerator", True),
        ("run/checks.py", "import transformers.trainer", True),
        ("run/checks.py", "def f():\n    import transformers.trainer", False),
        ("support/patches.py", "def f():\n    import liger_kernel", False),
        ("engine/select.py", "from accelerate import Accelerator", False),
        ("trackers/base.py", "import wandb", True),
        ("trackers/platforms.py", "import wandb", False),
        ("trackers/registry.py", "from torch.utils.tensorboard import SummaryWriter", True),
    ],
)
def test_a_planted_package_is_found(name: str, text: str, is_wrong: bool, tmp_path: Path) -> None:
    assert bool(out_of_place(plant(tmp_path, {name: text}))) == is_wrong


def test_contributing_has_the_same_picture() -> None:
    block = CONTRIBUTING.read_text(encoding="utf-8").split("```\n")
    drawn = next(text for text in block if text.startswith("cli, __main__\n"))
    assert [tuple(line.split("  ")[0].split(", ")) for line in drawn.splitlines()] == [*PICTURE]
