"""Muon on matrices in parts: the update is that of the whole matrix, with two exchanges a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .._support.two_processes import Done, run
from . import mixtures
from .layouts import MODEL, outcome_of_parts, trainer_of, whole, write_model
from .muon import CELLS, ON_EXPERTS, SETTINGS

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]
HERE = Path(__file__).parent
WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]
TRAININGS = [
    pytest.param(world, name, id=name, marks=pytest.mark.slow) for world, names in CELLS.items() for name in names
]
EXCHANGED = {"rows", "columns", "sections", "sections across", "plain momentum", "hybrid"}
HERE_ALONE = {"copies", "stacks", "stacks cut twice"}  # no exchange: the process has all of its matrices


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Done]:
    @functools.cache
    def launched(world: int) -> Done:
        folder = tmp_path_factory.mktemp("parts")
        return run(HERE.parent / "optim_all" / "muon_of_parts.py", str(folder), folder=folder, processes=world)

    return launched


@pytest.mark.parametrize("world", WORLDS)
def test_the_update_is_that_of_the_whole_matrix(world: int, parts: Callable[[int], Done]) -> None:
    """Matrices and stacks, cut in either dimension, twice, unevenly, with copies; with query, key and value apart."""
    for told in parts(world).told:
        layouts = told.pop("layouts")
        assert layouts["difference"] <= 1e-6
        assert layouts["strided"] is (world == 4)
        for name, cell in told.items():
            assert cell["difference"] <= 1e-6, name
            assert cell["moved"] > 1e-2, name


@pytest.mark.parametrize("world", WORLDS)
def test_all_matrices_travel_in_one_exchange_there_and_one_back(world: int, parts: Callable[[int], Done]) -> None:
    for told in parts(world).told:
        assert {name: told[name]["exchanges"] for name in EXCHANGED & told.keys()} == dict.fromkeys(
            EXCHANGED & told.keys(), 2.0
        )
        assert {told[name]["exchanges"] for name in HERE_ALONE & told.keys()} == {0.0}


# -- trainings -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("muon")
    write_model(folder / MODEL)
    mixtures.write_model(folder / mixtures.MODEL)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Callable[[int], Done]:
    @functools.cache
    def launched(world: int) -> Done:
        mine = folder / str(world)
        mine.mkdir()
        for name in (MODEL, mixtures.MODEL):
            (mine / name).symlink_to(folder / name)
        return run(HERE / "muon.py", str(mine), folder=mine, processes=world, timeout_s=300)

    return launched


def losses(outcome: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in outcome["log"] if "loss" in entry]


@pytest.mark.parametrize(("world", "name"), TRAININGS)
def test_trainings_are_those_of_one_process(
    world: int, name: str, trained: Callable[[int], Done], folder: Path, tmp_path: Path
) -> None:
    """Up to bfloat16, in which the iteration computes: a gradient that differs in its last bit may round otherwise."""
    if name == "experts":
        model = mixtures.loaded(folder / mixtures.MODEL)
        one = mixtures.trainer_of(model, tmp_path, parts=2, **ON_EXPERTS)
    else:
        one = trainer_of(whole(folder / MODEL), tmp_path, **SETTINGS)
    alone = outcome_of_parts(one)
    for told in trained(world).told:
        assert losses(told[name]) == pytest.approx(losses(alone), rel=1e-4)
        worst = max(
            abs(a - b)
            for own, other in zip(told[name]["weights"].values(), alone["weights"].values(), strict=True)
            for a, b in zip(own, other, strict=True)
        )
        assert worst < 2e-4  # a fifth of the learning rate
        assert told[f"{name}: resumed"]["weights"] == told[name]["weights"]


@pytest.mark.slow
def test_the_plan_lists_what_adamw_updates(trained: Callable[[int], Done]) -> None:
    told = trained(2).told[0]
    assert told["fsdp: lines"][0] == "muon      weights of 14 layers"
    assert told["fsdp: lines"][1].startswith(
        "adamw     model.embed_tokens.weight, model.layers.*.input_layernorm.weight"
    )
    assert told["experts: lines"][0] == "muon      weights of 10 layers, 4 stacks of experts' weights"
    assert "experts" not in told["experts: lines"][1]
    assert "lm_head.weight" in told["experts: lines"][1]
