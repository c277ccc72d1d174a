"""DeepSpeed's ZeRO against one process that does it all: numbers, and checkpoints of any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .._support.engines import needs
from .._support.small import REFERENCE, StopAt
from .._support.two_processes import Done, run
from .cases import judged, library, outcome, trainer_of

pytestmark = [needs("deepspeed"), pytest.mark.process, pytest.mark.timeout(600), pytest.mark.slow]
SAVED = "means, accumulated"
STAGES = {2: "counted, accumulated", 3: "means"}
SCRIPT = Path(__file__).with_name("zero.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[int, Done]:
    """Two processes, then one under a launcher; each goes on from the other's checkpoints."""
    one = trainer_of(SAVED, folder / "by_one", 1, save_strategy="steps", save_steps=2)
    one.add_callback(StopAt(2))
    one.train()
    environment = {"DS_ACCELERATOR": "cpu"}
    finished = {}
    for processes in (1, 2):
        finished[processes] = run(
            SCRIPT, str(folder), folder=folder, processes=processes, timeout_s=250, environment=environment
        )
    return finished


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    names = {SAVED, *STAGES.values()}
    return {name: outcome(trainer_of(name, tmp_path_factory.mktemp("alone"), 1)) for name in names}


def assert_same(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert mine["step"] == other["step"]
    for one, theirs in zip(mine["log"][:-1], other["log"][:-1], strict=True):
        assert one == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    losses, others = ([entry["loss"] for entry in one["log"] if "loss" in entry] for one in (mine, other))
    assert losses == pytest.approx(others, rel=1e-5)
    assert mine["weights"].keys() == other["weights"].keys()
    for name, values in mine["weights"].items():
        assert values == pytest.approx(other["weights"][name], rel=1e-5, abs=2e-7)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_it_trains_as_one_process_does(
    stage: int, processes: int, done: dict[int, Done], alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Windows and their norms; then an evaluation and a prediction."""
    assert_same(done[processes].told[0][f"zero {stage}"], alone[STAGES[stage]])
    trainer = trainer_of(STAGES[stage], tmp_path, 1)
    trainer.train()
    mine = done[processes].told[0][f"zero {stage}: judged"]
    other = judged(trainer)
    assert mine["metrics"] == pytest.approx(other["metrics"], rel=1e-5)
    np.testing.assert_allclose(mine["predictions"], other["predictions"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("processes", [1, 2])
def test_hooks_for_libraries(processes: int, done: dict[int, Done], tmp_path: Path) -> None:
    """Loops of one's own, prepared windows, items of checkpoints, recorded numbers, and a loss that says its items."""
    alone = library(tmp_path, 1)
    for stage in (0, 1, 2, 3):
        for rank, told in enumerate(done[processes].told):
            assert told[f"library {stage}"]["same"] == [True] * 5
            assert told[f"library {stage}"]["counts"] == [[rank, 4]] * 5
        mine = done[processes].told[0][f"library {stage}"]
        log = [{key: entry[key] for key in entry if stage or key != "grad_norm"} for entry in alone["log"]]
        assert_same({**mine, "log": [*mine["log"], {}]}, {**alone, "log": [*log, {}]})


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("source", ["by_one", "by1", "by2"])
def test_two_processes_go_on(stage: int, source: str, done: dict[int, Done], alone: dict[str, dict[str, Any]]) -> None:
    name = source if source == "by_one" else f"zero{stage}_{source}"
    assert_same(done[2].told[0][f"{stage} from {name}"], alone[SAVED])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("source", ["by_one", "by1"])
def test_one_process_goes_on(stage: int, source: str, done: dict[int, Done], alone: dict[str, dict[str, Any]]) -> None:
    name = source if source == "by_one" else f"zero{stage}_{source}"
    assert_same(done[1].told[0][f"{stage} from {name}"], alone[SAVED])


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_without_it_goes_on(
    stage: int, done: dict[int, Done], folder: Path, alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    again = trainer_of(SAVED, tmp_path, 1)
    assert_same(outcome(again, resume_from_checkpoint=str(folder / f"zero{stage}_by2/checkpoint-2")), alone[SAVED])


@pytest.mark.parametrize("stage", STAGES)
def test_transformers_goes_on(
    stage: int, done: dict[int, Done], folder: Path, alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """With its own trainer, alone and without DeepSpeed, from what two processes wrote."""
    theirs = trainer_of(SAVED, tmp_path, 1, side=REFERENCE)
    mine = outcome(theirs, resume_from_checkpoint=str(folder / f"zero{stage}_by2/checkpoint-2"))
    losses, others = ([e["loss"] for e in one["log"] if "loss" in e] for one in (mine, alone[SAVED]))
    assert losses == pytest.approx(others, rel=1e-5)
    for name, values in mine["weights"].items():
        assert values == pytest.approx(alone[SAVED]["weights"][name], rel=1e-5, abs=2e-7)


def test_an_optimizer_and_a_schedule_of_its_own(done: dict[int, Done], alone: dict[str, dict[str, Any]]) -> None:
    """Every "auto" of theirs filled in; the first step's rate is the warm-up's."""
    one, two = (done[n].told[0]["own"] for n in (1, 2))
    assert_same(one, two)
    assert one["step"] == alone["means"]["step"]
    assert done[2].told[0]["kinds"] == ["DeepSpeedEngine", True]


def test_a_second_training_with_an_optimizer_and_a_schedule_of_its_own(done: dict[int, Done]) -> None:
    """From the weights that the first one left, by a schedule that begins again."""
    for processes in (1, 2):
        told = done[processes].told[0]
        first, second = ([entry for entry in told[name]["log"] if "loss" in entry] for name in ("own", "own_second"))
        assert [entry["learning_rate"] for entry in second] == [entry["learning_rate"] for entry in first]
        assert second[0]["loss"] < first[0]["loss"]
    assert_same(*(done[n].told[0]["own_second"] for n in (1, 2)))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_compiled_model_trains_as_another(
    processes: int, done: dict[int, Done], alone: dict[str, dict[str, Any]]
) -> None:
    told = done[processes].told[0]
    assert told["is_compiled"]
    assert_same(told["compiled"], alone["means"])


def test_a_second_training_in_bf16_begins_with_the_first_ones_weights(done: dict[int, Done]) -> None:
    told = done[2].told[0]
    first, second = (
        [entry["loss"] for entry in told[name]["log"] if "loss" in entry] for name in ("mixed", "mixed_second")
    )
    assert second[0] < first[0]


def test_weights_in_bf16_go_on_from_their_masters(done: dict[int, Done]) -> None:
    """The checkpoint has what the optimizer works on, not what is left of it in bf16."""
    full = done[2].told[0]["mixed"]
    again = done[2].told[0]["mixed_again"]
    for name, values in full["weights"].items():
        assert again["weights"][name] == pytest.approx(values, rel=1e-5, abs=1e-6)


def test_a_configuration_that_fights_the_arguments(done: dict[int, Done]) -> None:
    for told in done[2].told:
        assert "ArgumentError" in told["fight"]
        for word in ("train_micro_batch_size_per_gpu=3", "per_device_train_batch_size", "4"):
            assert word in told["fight"]
        assert "zero_optimization.stage" in told["auto"]


def test_shared_sequences_train_as_with_transformers(tmp_path: Path) -> None:
    """DeepSpeed's ALST, asked for as accelerate does, and in the words of DeepSpeed's configuration."""
    script = Path(__file__).with_name("alst.py")
    done = run(script, str(tmp_path), folder=tmp_path, timeout_s=250, environment={"DS_ACCELERATOR": "cpu"})
    for told in done.told:
        theirs = told["theirs"]
        assert len(theirs["log"]) == 4
        for mine in (told["ours"], told["in_its_own_words"]):
            assert mine["log"] == [pytest.approx(entry, rel=1e-5) for entry in theirs["log"]]
            assert mine["weights"].keys() == theirs["weights"].keys()
            for name, values in mine["weights"].items():
                assert values == pytest.approx(theirs["weights"][name], rel=1e-5, abs=1e-6)
