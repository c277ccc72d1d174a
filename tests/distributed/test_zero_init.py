"""Models that transformers makes in parts because the arguments ask for ZeRO-3: they train as whole ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import GPT2LMHeadModel

from .._support.engines import needs
from .._support.small import StopAt
from .._support.two_processes import Done, run
from . import zero_init as script
from .cases import judged

pytestmark = [needs("deepspeed"), pytest.mark.process, pytest.mark.timeout(900), pytest.mark.slow]
WORLDS = (1, 2)
worlds = pytest.mark.parametrize("world", WORLDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero_init")


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[int, Done]:
    script.starts(folder)
    settings = {"save_strategy": "steps", "save_steps": 2}
    one = script.trainer_of(script.load(folder), script.arguments(folder / "stopped0", 1, **settings))
    one.add_callback(StopAt(2))
    one.train()
    path = Path(script.__file__)
    environment = {"DS_ACCELERATOR": "cpu"}
    return {
        world: run(path, str(folder), folder=folder, processes=world, timeout_s=400, environment=environment)
        for world in WORLDS
    }


@pytest.fixture(scope="module")
def alone(folder: Path, done: dict[int, Done], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same with a whole model and without DeepSpeed."""
    trainer = script.trainer_of(script.load(folder), script.arguments(tmp_path_factory.mktemp("alone"), 1))
    told = {"before": judged(trainer), "trainable": trainer.get_num_trainable_parameters()}
    told |= {"trained": script.outcome(trainer), "after": judged(trainer), "flos": trainer.state.total_flos}
    return {**told, "second": script.outcome(trainer)}


def assert_same(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert mine["step"] == other["step"]
    losses, others = ([entry["loss"] for entry in one["log"] if "loss" in entry] for one in (mine, other))
    assert losses == pytest.approx(others, rel=1e-5)
    assert set(mine["weights"]) <= set(other["weights"])  # tied ones have one name
    for name, values in mine["weights"].items():
        assert values == pytest.approx(other["weights"][name], rel=1e-4, abs=2e-6), name


def assert_judged_alike(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert mine["metrics"] == pytest.approx(other["metrics"], rel=1e-5)
    predictions = (torch.tensor(one["predictions"]) for one in (mine, other))
    torch.testing.assert_close(*predictions, rtol=1e-3, atol=1e-4)


def test_each_process_makes_its_part(done: dict[int, Done]) -> None:
    for told in done[2].told:
        sizes = told["sizes"]
        assert sizes["spread"] == sizes["parameters"]
        assert sizes["held"] == pytest.approx(sizes["whole"] / 2, rel=0.01)


@worlds
def test_it_trains_as_a_whole_model_does(world: int, done: dict[int, Done], alone: dict[str, Any]) -> None:
    told = done[world].told[0]
    assert_same(told["trained"], alone["trained"])
    assert_same(told["whole"], alone["trained"])
    assert_judged_alike(told["after"], alone["after"])
    assert told["trainable"] == alone["trainable"]
    assert told["flos"] == pytest.approx(alone["flos"] * (18 / 17 if world == 2 else 1))  # both have as many rows


@worlds
def test_a_second_training_goes_on(world: int, done: dict[int, Done], alone: dict[str, Any]) -> None:
    assert_same(done[world].told[0]["second"], alone["second"])


@worlds
def test_it_is_judged_before_any_training(world: int, done: dict[int, Done], alone: dict[str, Any]) -> None:
    for told in done[world].told:
        assert_judged_alike(told["before"], alone["before"])


@worlds
def test_its_files_are_whole(world: int, done: dict[int, Done], alone: dict[str, Any], folder: Path) -> None:
    start = GPT2LMHeadModel.from_pretrained(folder / "start").state_dict()
    saved = GPT2LMHeadModel.from_pretrained(folder / f"untrained{world}").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in start.items())
    final = GPT2LMHeadModel.from_pretrained(folder / f"final{world}").state_dict()
    for name, values in alone["trained"]["weights"].items():
        assert final[name].flatten().tolist() == pytest.approx(values, rel=1e-4, abs=2e-6)


@pytest.mark.parametrize(("world", "source"), [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)])
def test_it_goes_on_from_a_checkpoint(world: int, source: int, done: dict[int, Done], alone: dict[str, Any]) -> None:
    """Of one process without DeepSpeed (0), of one with it, and of two."""
    assert_same(done[world].told[0][f"from stopped{source}"], alone["trained"])


def test_a_run_without_it_goes_on(done: dict[int, Done], alone: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    again = script.trainer_of(script.load(folder), script.arguments(tmp_path, 1))
    checkpoint = str(folder / "stopped2/checkpoint-2")
    assert_same(script.outcome(again, resume_from_checkpoint=checkpoint), alone["trained"])


def test_new_weights_are_drawn_as_the_model_wants_them(done: dict[int, Done]) -> None:
    for name, (mean, deviation) in done[2].told[0]["anew"].items():
        if "ln_" in name or name.endswith("bias"):
            assert (mean, deviation) == (float("ln_" in name and name.endswith("weight")), 0.0), name
        else:
            assert abs(mean) < 0.01, name
            assert 0 < deviation < 0.03, name


@worlds
def test_halves_are_gathered_where_the_configuration_says_so(world: int, done: dict[int, Done], folder: Path) -> None:
    """For use; a checkpoint has what the optimizer works on, so a resume loses nothing."""
    for gathers, kind in ((True, torch.bfloat16), (False, torch.float32)):
        saved = safetensors.torch.load_file(folder / f"halves{world} {gathers}/model.safetensors")
        assert {value.dtype for value in saved.values()} == {kind}
        first, again = done[world].told[0][f"halves {gathers}"]
        for name, values in first["weights"].items():
            assert again["weights"][name] == pytest.approx(values, rel=1e-5, abs=1e-6)
    kept = safetensors.torch.load_file(folder / "halves/checkpoint-1/model.safetensors")
    assert {value.dtype for value in kept.values()} == {torch.float32}


@worlds
def test_a_checkpoint_in_older_names_goes_on(world: int, done: dict[int, Done]) -> None:
    first, again = done[world].told[0]["older_names"]
    assert again == pytest.approx(first, rel=1e-5)


@worlds
def test_the_mark_goes_with_the_arguments(world: int, done: dict[int, Done]) -> None:
    for told in done[world].told:
        assert told["marked"] == [False, True]
        assert told["whole_sizes"]["spread"] == 0
