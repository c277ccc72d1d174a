"""Processes that share the layers of a model (tensor parallelism) against one that holds it whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from .._support.two_processes import Done, run
from .layouts import BY_ONE, MODEL, SAVED, judged, outcome_of_parts, trainer_of, whole, write_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]
LAUNCHES = [2, pytest.param(4, marks=pytest.mark.slow)]  # two share layers; and such pairs with data of their own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("laid_out")
    write_model(folder / MODEL)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    trainer = trainer_of(whole(folder / MODEL), folder / BY_ONE, save_strategy="steps", save_steps=4)
    return {**outcome_of_parts(trainer), **judged(trainer)}


@pytest.fixture(scope="module")
def launch(folder: Path, alone: dict[str, Any]) -> Callable[[int], Done]:
    @functools.cache
    def launched(processes: int) -> Done:
        mine = folder / str(processes)
        mine.mkdir()
        for name in (MODEL, BY_ONE):
            (mine / name).symlink_to(folder / name)
        script = Path(__file__).with_name("laid_out.py")
        return run(script, str(mine), folder=mine, processes=processes, timeout_s=300)

    return launched


@pytest.fixture(scope="module", params=LAUNCHES)
def done(request: pytest.FixtureRequest, launch: Callable[[int], Done]) -> Done:
    return launch(request.param)


@pytest.fixture(scope="module")
def pair(launch: Callable[[int], Done]) -> Done:
    return launch(2)


def assert_same(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert mine["step"] == other["step"]
    steps, others = ([(e["loss"], e["grad_norm"]) for e in one["log"] if "loss" in e] for one in (mine, other))
    assert [number for step in steps for number in step] == pytest.approx(
        [number for step in others for number in step], rel=1e-5
    )
    assert mine["weights"].keys() == other["weights"].keys()
    for name, values in mine["weights"].items():
        assert_close(values, other["weights"][name])


def assert_close(mine: Any, other: Any) -> None:
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=1e-4, atol=5e-6)


def test_losses_norms_and_weights_are_those_of_one_process(done: Done, alone: dict[str, Any]) -> None:
    for told in done.told:
        assert_same(told["parts"], alone)


def test_each_process_holds_its_part_of_the_layers(done: Done) -> None:
    for told in done.told:
        assert told["share"] < 1.02 / len(done.told)


def test_processes_that_share_layers_count_as_one_for_the_data(done: Done) -> None:
    for told in done.told:
        assert (told["total"], told["sizes"]) == (16, [2, 1])
        assert told["told_accelerate"]


def test_evaluations_have_each_sample_once(done: Done, alone: dict[str, Any]) -> None:
    for told in done.told:
        assert told["judged"]["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert told["judged"]["labels"] == alone["labels"]
        torch.testing.assert_close(
            torch.tensor(told["judged"]["predictions"]), torch.tensor(alone["predictions"]), rtol=1e-4, atol=1e-4
        )


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["parts", BY_ONE])
def test_a_checkpoint_goes_on_where_it_was(done: Done, alone: dict[str, Any], source: str) -> None:
    for told in done.told:
        assert_same(told[f"from {source}"], alone)


def test_one_process_goes_on_from_it(done: Done, folder: Path, alone: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(whole(folder / MODEL), tmp_path)
    assert_same(
        outcome_of_parts(trainer, resume_from_checkpoint=str(folder / str(len(done.told)) / "parts" / SAVED)), alone
    )


def test_checkpoints_are_whole(done: Done) -> None:
    states = {"rng_state.pth"} if len(done.told) == 2 else {"rng_state_0.pth", "rng_state_1.pth"}
    assert set(done.told[0]["files"]) == states | {
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "trainer_state.json",
        "training_args.bin",
        "training_args.json",
    }


def test_the_final_model_is_read_by_from_pretrained(done: Done, folder: Path, alone: dict[str, Any]) -> None:
    model, info = transformers.LlamaForCausalLM.from_pretrained(  # type: ignore[misc]
        folder / str(len(done.told)) / "final", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, value in model.state_dict().items():
        assert_close(value.double().flatten().tolist(), alone["weights"][name])


def test_the_best_is_loaded_back_into_the_parts(pair: Done) -> None:
    for told in pair.told:
        loaded, seen = told["best"]
        assert loaded == pytest.approx(max(seen[:2]), rel=1e-5)
        assert seen[0] != seen[1]


def test_half_precision(pair: Done, alone: dict[str, Any]) -> None:
    expected = [entry["loss"] for entry in alone["log"] if "loss" in entry][:2]
    for told in pair.told:
        assert told["half"] == pytest.approx(expected, rel=2e-2)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("whole", "ModelError", "tp_size=2 LlamaForCausalLM whole from_pretrained DistributedConfig(tp_size=2)"),
        ("other size", "ArgumentError", "tp_size=3 tp_size=2"),
        ("fsdp", "ArgumentError", "fsdp fsdp_size"),
        ("fp16", "ArgumentError", "fp16 bf16"),
        ("launcher", "ArgumentError", "tp_size=5 5 2 --nproc-per-node"),
    ],
)
def test_refused_before_the_first_step(pair: Done, case: str, kind: str, words: str) -> None:
    for told in pair.told:
        message = told[f"refused: {case}"]
        assert kind in message  # the other process may have been first
        assert all(word in message for word in words.split())
