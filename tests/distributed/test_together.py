"""Two processes against one: the same windows, logs, evaluations and checkpoints, and nothing sent between steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainwright.errors import CheckpointError

from .._support.small import StopAt
from .._support.two_processes import Done, run
from .cases import WINDOWS, judged, outcome, rows, trainer_of

SAVED = "means, accumulated"

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def done(folder: Path) -> Done:
    one = trainer_of(SAVED, folder / "by_one", 1, save_strategy="steps", save_steps=2)
    one.add_callback(StopAt(2))
    one.train()
    return run(Path(__file__).with_name("together.py"), str(folder), folder=folder, timeout_s=110)


def flat(weights: dict[str, list[float]]) -> list[float]:
    return [value for values in weights.values() for value in values]


def assert_close(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert mine["step"] == other["step"]
    assert flat(mine["weights"]) == pytest.approx(flat(other["weights"]), rel=1e-5, abs=2e-7)


# -- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WINDOWS)
def test_two_processes_are_one_with_the_same_effective_batch(done: Done, name: str, tmp_path: Path) -> None:
    """Also in the last window of an epoch, with a tail that the two share unevenly or only one of them has."""
    trainer = trainer_of(name, tmp_path, 1, eval_strategy="epoch")
    alone = outcome(trainer)
    for told in done.told:
        assert_close(told[name], alone)
        assert told[name]["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        for mine, other in zip(told[name]["log"], alone["log"], strict=True):
            assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)
    alone_judged = judged(trainer)
    for told in done.told:
        together = told[f"{name}: judged"]
        assert together["metrics"] == pytest.approx(alone_judged["metrics"], rel=1e-5)
        assert together["labels"] == alone_judged["labels"]
        np.testing.assert_allclose(together["predictions"], alone_judged["predictions"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WINDOWS)
def test_both_processes_tell_the_same(done: Done, name: str) -> None:
    for what in (name, f"{name}: judged"):
        first, second = ({**told[what]} for told in done.told)
        assert first == second


@pytest.mark.parametrize(("name", "each_step"), [("means", []), ("counted", ["all_reduce"])])
def test_nothing_is_sent_between_steps(done: Done, name: str, each_step: list[str]) -> None:
    """Beside DDP's own: nothing where losses are means, the number of items where they are counted; more at a log.

    The first step also has the answer to whether a loss of the user's own is divided by that number.
    """
    steps = done.told[0][f"{name}: collectives"]
    assert len(steps) == 6
    for number, calls in enumerate(steps):
        after_a_log = number == 4
        asks = each_step if number == 0 else []
        assert [call for call in calls if call != "all_gather"] == each_step + asks
        assert ("all_gather" in calls) == after_a_log


def test_the_number_of_items_is_waited_for_where_the_loss_is_divided(done: Done) -> None:
    """One message and one wait in a step, but no process waits before its first forward pass; weights are the same."""
    for told in done.told:
        assert told["events_sent"] == ["sent", "forward", "waited", "forward"] * 4
        assert told["events_summed"][:4] == ["summed", "waited", "forward", "forward"]
        assert told["late_is_equal"]
        assert told["own_loss_is_finite"]


def test_loss_with_item_count_is_averaged_over_the_window(done: Done) -> None:
    name = "counted, accumulated"
    for told in done.told:
        assert_close(told["by_items"], told[name])
        for mine, other in zip(told["by_items"]["log"], told[name]["log"], strict=True):
            assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)
        assert told["judged_by_items"]["metrics"] == pytest.approx(told[f"{name}: judged"]["metrics"], rel=1e-5)


def test_recorded_numbers_are_those_of_both_processes_and_send_nothing_more(done: Done) -> None:
    first, second = done.told
    assert first["recorded_log"] == second["recorded_log"]
    logs = [entry for entry in first["recorded_log"] if "value" in entry]
    assert [entry["step"] for entry in logs] == [2, 4, 6]
    assert sum(entry["num_rows"] for entry in logs) == 2 * 22  # and no row of a batch that only stands in
    for number, entry in enumerate(logs):
        pairs = [pair for told in done.told for pair in told["recorded"][2 * number : 2 * number + 2]]
        by_hand = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
        assert entry["value"] == pytest.approx(by_hand, rel=1e-12)
        assert entry["highest"] == max(value for value, _ in pairs)
        assert entry["of one"] == 1.0
    assert first["recorded_collectives"][:2] == first["counted: collectives"][:2]
    assert sorted(first["recorded_collectives"][2]) == sorted(first["counted: collectives"][4])  # with a log before
    again = [entry for entry in first["recorded_after_resume"] if "value" in entry]
    names = ("value", "num_rows", "highest", "of one", "step")
    assert [[entry[name] for name in names] for entry in again] == [[e[name] for name in names] for e in logs]
    metrics = first["recorded_metrics"]
    pairs = [pair for told in done.told for pair in told["recorded_in_evaluation"]]
    assert metrics["eval_num_rows"] == 9
    assert metrics["eval_of one"] == 1.0
    assert metrics["eval_highest"] == pytest.approx(max(value for value, _ in pairs), rel=1e-12)


# -- what processes exchange -----------------------------------------------------------------------------------------


def test_ragged_results_are_joined_in_order_of_rank(done: Done) -> None:
    for told in done.told:
        a, scalar, is_one = told["gathered"]
        assert a == [[0, -100], [0, -100], [1, 1], [1, 1], [1, 1]]
        assert scalar == [0.0, 1.0]
        assert len(is_one) == 5
        assert told["summed"] == 3
        assert told["agreed"] == "decided by 0"
        assert told["objects"] == [{"rank": 0}, {"rank": 1}]


def test_an_error_of_the_one_that_decides_is_everybodys(done: Done) -> None:
    for told in done.told:
        assert told["agreed_error"] == "LookupError: no checkpoint there"
        assert told["nothing"].startswith("CheckpointNotFoundError: No valid checkpoint found in output directory")
        assert told["different"].startswith("DataError: Processes bring different results")


def test_the_main_process_goes_first_and_the_others_say_less(done: Done) -> None:
    main, other = done.told
    assert (main["found"], other["found"]) == (False, True)
    assert (main["levels"], other["levels"]) == (20, 40)
    assert (main["should"], other["should"]) == ([True, True], [False, False])


def test_the_group_has_the_backend_that_was_asked_for(done: Done) -> None:
    for told in done.told:
        assert "MPI" in told["without_mpi"]
        assert told["backend"] == "gloo"


# -- dispatching -----------------------------------------------------------------------------------------------------


def test_the_main_process_reads_for_all(done: Done, tmp_path: Path) -> None:
    settings = {"num_train_epochs": 1, "train_dataset": rows(17)[:16]}
    alone = outcome(trainer_of("counted", tmp_path, 1, **settings))
    for rank, told in enumerate(done.told):
        assert_close(told["Reads dispatched"], alone)
        assert told["Reads resumed"]["weights"] == told["Reads dispatched"]["weights"]
        assert told["Reads read"] == (16 if rank == 0 else 0)


def test_the_main_process_reads_a_stream_to_an_end_that_all_see(done: Done) -> None:
    main, other = done.told
    assert main["Stream dispatched"]["step"] == 3  # 8, 8, and one with another to make the parts equal
    assert (main["Stream read"], other["Stream read"]) == (17, 0)
    assert main["Stream dispatched"] == other["Stream dispatched"]
    assert main["Stream resumed"]["weights"] == main["Stream dispatched"]["weights"]


@pytest.mark.parametrize("name", ["budget", "packing", "budget of a stream", "packing of a stream"])
def test_formed_batches_have_every_sample_once(done: Done, name: str) -> None:
    one, other = (told[name] for told in done.told)
    assert one == other
    assert one["counts"] == one["lengths"]
    assert one["step"] > 2


@pytest.mark.parametrize("name", ["budget of a stream", "packing of a stream"])
def test_batches_formed_of_a_stream_go_on_where_they_were(done: Done, name: str) -> None:
    for told in done.told:
        assert told[f"{name}, resumed"] == told[name]


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_the_random_states_of_every_process(done: Done, folder: Path) -> None:
    for told in done.told:
        assert {"rng_state_0.pth", "rng_state_1.pth", "manifest.json", "optimizer.pt"} <= set(told["saved"])
        assert "rng_state.pth" not in told["saved"]

    manifest = json.loads((folder / "by_two/checkpoint-2/manifest.json").read_text())
    assert manifest["world_size"] == 2
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(manifest["files"])


def test_one_process_writes_behind_training_and_all_return_when_it_is_done(done: Done) -> None:
    for rank, told in enumerate(done.told):
        behind, at_once = (["checkpoint-writer"], ["MainThread"]) if rank == 0 else ([], [])
        steps = told["at_once"][1]
        assert steps
        assert told["behind"] == [behind, steps]
        assert told["at_once"][0] == at_once


def test_a_resume_goes_on_with_the_same_and_another_number_of_processes(
    done: Done, folder: Path, tmp_path: Path
) -> None:
    whole = outcome(trainer_of(SAVED, tmp_path / "whole", 1))
    for told in done.told:
        assert_close(told["resumed"], whole)
        assert_close(told["resumed_of_one"], whole)
    two_to_one = trainer_of(SAVED, tmp_path / "one", 1)
    assert_close(outcome(two_to_one, resume_from_checkpoint=str(folder / "by_two/checkpoint-2")), whole)
    assert done.out.count("has no random states of process 1") == 1


def test_a_missing_file_of_one_process_is_named(done: Done, folder: Path, tmp_path: Path) -> None:
    source = folder / "by_two/checkpoint-2"
    for name in ("checkpoint-2", "checkpoint-4"):
        shutil.copytree(source, tmp_path / name)
    (tmp_path / "checkpoint-4/rng_state_1.pth").unlink()
    for asked in (str(tmp_path / "checkpoint-4"), True):
        trainer = trainer_of(SAVED, tmp_path, 1, max_steps=3)
        if asked is True:  # the one before it is whole
            assert trainer.train(resume_from_checkpoint=True).global_step == 3
            continue
        with pytest.raises(CheckpointError, match=r"rng_state_1\.pth"):
            trainer.train(resume_from_checkpoint=asked)


def test_the_plan_is_shown_once(done: Done) -> None:
    assert "Traceback" not in done.out
