"""Adapters on models that were loaded in parts, against an adapter on a whole model in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from .._support.two_processes import Done, run
from . import mixtures
from .adapters import ATTENTION, LAYOUTS, ON_EXPERTS, SETTINGS, WRONG, adapted, adapter_of, write_adapter
from .layouts import MODEL, judged, trainer_of, whole, write_model

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks it of transformers
]
CELLS = [
    pytest.param(world, layout, id=layout, marks=[pytest.mark.slow] if world > 2 else [])
    for world, layouts in LAYOUTS.items()
    for layout in layouts
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_model(folder / MODEL)
    write_adapter(whole(folder / MODEL), folder / "adapter")
    mixtures.write_model(folder / mixtures.MODEL)
    write_adapter(mixtures.loaded(folder / mixtures.MODEL), folder / "adapter of the mixture", ATTENTION)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    model = adapted(whole(folder / MODEL), folder / "adapter")
    trainer = trainer_of(model, folder / "by_one", **SETTINGS)
    return {**adapter_of(trainer), "judged": judged(trainer)}


@pytest.fixture(scope="module")
def launch(folder: Path, alone: dict[str, Any]) -> Callable[[int], Done]:
    @functools.cache
    def launched(world: int) -> Done:
        mine = folder / str(world)
        mine.mkdir()
        for name in (MODEL, mixtures.MODEL, "adapter", "adapter of the mixture", "by_one"):
            (mine / name).symlink_to(folder / name)
        return run(Path(__file__).with_name("adapters.py"), str(mine), folder=mine, processes=world, timeout_s=300)

    return launched


def assert_same(mine: dict[str, Any], other: dict[str, Any], *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    assert mine["step"] == other["step"]
    steps, others = ([(e["loss"], e["grad_norm"]) for e in one["log"] if "loss" in e] for one in (mine, other))
    assert [number for step in steps for number in step] == pytest.approx(
        [number for step in others for number in step], rel=1e-5
    )
    assert mine["weights"].keys() == other["weights"].keys()
    for name, values in mine["weights"].items():
        torch.testing.assert_close(torch.tensor(values), torch.tensor(other["weights"][name]), rtol=rtol, atol=atol)


@pytest.mark.parametrize(("world", "layout"), CELLS)
def test_losses_norms_and_weights_are_those_of_one_process(
    world: int, layout: str, launch: Callable[[int], Done], alone: dict[str, Any]
) -> None:
    for told in launch(world).told:
        assert_same(told[layout], alone)
        judged_here = told[f"{layout}: judged"]
        assert judged_here["loss"] == pytest.approx(alone["judged"]["loss"], rel=1e-5)
        assert judged_here["labels"] == alone["judged"]["labels"]


@pytest.mark.parametrize(("world", "layout"), CELLS)
def test_a_resumed_run_is_the_uninterrupted_one(
    world: int, layout: str, launch: Callable[[int], Done], alone: dict[str, Any]
) -> None:
    """Bit by bit from a checkpoint of its own, and up to rounding from one of one process."""
    for told in launch(world).told:
        assert told[f"{layout}: from itself"]["weights"] == told[layout]["weights"]
        assert_same(told[f"{layout}: from one"], alone)


@pytest.mark.parametrize(("world", "layout"), CELLS)
def test_the_adapter_alone_is_saved(
    world: int, layout: str, launch: Callable[[int], Done], folder: Path, alone: dict[str, Any]
) -> None:
    files = launch(world).told[0][f"{layout}: files"]
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.pt"} <= set(files)
    assert not [name for name in files if name.startswith(("model", "pytorch_model"))]
    model = peft.PeftModel.from_pretrained(whole(folder / MODEL), folder / str(world) / f"{layout} final")
    named = dict(model.named_parameters())
    for name, values in alone["weights"].items():
        own = named[name].detach().double().flatten()
        torch.testing.assert_close(own, torch.tensor(values, dtype=own.dtype), rtol=1e-4, atol=1e-5)


def test_one_process_goes_on_from_it(launch: Callable[[int], Done], folder: Path, tmp_path: Path) -> None:
    told = launch(2).told[0]
    model = adapted(whole(folder / MODEL), folder / "adapter")
    trainer = trainer_of(model, tmp_path, **SETTINGS)
    saved = str(folder / "2" / "fsdp2" / "checkpoint-4")
    assert_same(adapter_of(trainer, resume_from_checkpoint=saved), told["fsdp2"])


def test_an_adapter_on_a_mixture_whose_experts_are_shared_out(launch: Callable[[int], Done], folder: Path) -> None:
    model = adapted(mixtures.loaded(folder / mixtures.MODEL), folder / "adapter of the mixture")
    other = adapter_of(mixtures.trainer_of(model, folder / "experts_of_one", parts=2, **ON_EXPERTS))
    for told in launch(2).told:
        assert_same(told["experts"], other)
        assert "adapter_model.safetensors" in told["files_of_experts"]
        assert "model.safetensors" not in told["files_of_experts"]
        assert all(word in told["refused"] for word in ("ModelError", "experts", "ep_size", "target_modules"))


def test_the_best_adapter_is_loaded_back_and_processes_begin_alike(launch: Callable[[int], Done]) -> None:
    done = launch(2)
    for told in done.told:
        loaded, seen = told["best"]
        assert loaded == pytest.approx(max(seen[:2]), rel=1e-5)
        assert told["alike"] == done.told[0]["alike"]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_an_adapter_of_the_wrong_size_is_refused(name: str, launch: Callable[[int], Done]) -> None:
    """PEFT makes it so, and its forward pass fails with a bare error about shapes, with transformers too."""
    for told in launch(4).told:
        message = told[f"refused: {name}"]
        assert all(word in message for word in ("ModelError", "q_proj", "tp_size", "fsdp_size", "(32, 32)"))
