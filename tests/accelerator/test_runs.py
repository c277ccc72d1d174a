"""Runs on the stand-in accelerator: the same numbers as on the CPU, exact resumes, saves beside training, memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from .children import on_the_standin

pytestmark = pytest.mark.process

# Trained beside the CPU in `make test`; the others in `make accelerator`.
SHORT = ("guards", "packing", "lora", "workers")
LONG = (
    "plain",
    "module",
    "no-clipping",
    "accumulation",
    "guards-warn",
    "no-guards",
    "ledger",
    "mixture",
    "loss-output",
    "chunked-loss",
    "checkpointed-activations",
    "evaluation",
    "sgd",
    "adamw-by-hand",
    "tokens",
)


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
def test_a_run_computes_what_it_computes_on_the_cpu(name: str, tmp_path: Path) -> None:
    """Attention is another kernel there, and norms are added up in another order: equal up to rounding."""
    found = on_the_standin("runs.on_both", name, folder=tmp_path)
    assert found["num_losses"] > 5
    assert found["loss_gap"] < 5e-6
    assert found["eval_gap"] < 5e-6
    assert found["weight_gap"] < 5e-5
    assert found["freed_early"] == []


@pytest.mark.parametrize("settings", [{}, pytest.param({"dataloader_num_workers": 1}, marks=pytest.mark.slow)], ids=str)
def test_a_resume_restores_the_generators_of_the_device(settings: dict[str, int], tmp_path: Path) -> None:
    found = on_the_standin("runs.resumed", settings, folder=tmp_path)
    assert found["weight_gap"] == 0.0
    assert found["steps"] == 9
    assert {"python", "numpy", "cpu", "accel"} <= set(found["keys"])
    assert found["kind"] == "Tensor"


def test_one_process_keeps_the_generators_of_all_devices(tmp_path: Path) -> None:
    found = on_the_standin("runs.resumed", {}, folder=tmp_path, devices=2)
    assert found["weight_gap"] == 0.0
    assert found["kind"] == "list"


def test_a_file_without_states_of_the_device_loads(tmp_path: Path) -> None:
    """Versions 0.1 and 0.2 wrote no others than those of CUDA and MPS: the run goes on, with other dropout."""
    found = on_the_standin("runs.resumed", {}, True, folder=tmp_path)
    assert found["steps"] == 9
    assert found["weight_gap"] > 0.0


# Whether the device has room for a copy at the first save, and at the later ones; None: it says so and has not.
ROOM = {"none later": [True, False], "room later": [False, True], "no memory": [None], "room": [True], "none": [False]}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("room", "none", "at once")]


@pytest.mark.parametrize("room", ["none later", "room later", "no memory", *SLOW])
def test_a_save_has_the_weights_of_its_step(room: str, tmp_path: Path) -> None:
    """A copy to the host arrives when somebody waits for it, and the next step changes the weights."""
    settings = {"save_async": room in ROOM}
    found = on_the_standin("runs.saved_while_training", settings, ROOM.get(room, [True]), folder=tmp_path)
    assert found["wrong"] == []
    assert found["freed_early"] == []
    waited = {"room": [2, 4, 6, 8], "none later": [2]}  # what is in pinned memory once stays there
    assert found["waited_on_device"] == waited.get(room, [])


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", pytest.param("adamw_torch", marks=pytest.mark.slow), "sgd"])
def test_a_step_that_overflows_in_fp16_does_not_advance_the_schedule(optimizer: str, tmp_path: Path) -> None:
    """Also where only the device knows at once that the update was skipped (steps 2, 5 and 6)."""
    found = on_the_standin("runs.overflowed", optimizer, folder=tmp_path)
    assert found["changed"] == [True, False, True, True, False, False, True, True]
    assert found["rates"] == pytest.approx([0.8, 0.7, 0.7, 0.6, 0.5, 0.5, 0.5, 0.4])
    assert found["logged"] == pytest.approx([0.6, 0.4])
    assert found["saved"] == 3
    assert found["last"] == pytest.approx(0.3)
    assert found["weight_gap"] == 0.0


def test_a_batch_that_does_not_fit_is_cut(tmp_path: Path) -> None:
    found = on_the_standin("runs.finds_a_batch_size", folder=tmp_path)
    assert found["peaks"]["2"] < found["limit"] < found["peaks"]["16"]
    assert found["steps"] == 6
    assert found["losses"] == pytest.approx(found["whole"], abs=1e-5)


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_device_that_fails_for_good_loses_no_checkpoint(is_async: bool, tmp_path: Path) -> None:
    """The first error is raised, nothing of the broken device is saved, and the newest checkpoint goes on."""
    settings = {"save_async": is_async, "save_on_exception": True}
    found = on_the_standin("runs.broken_and_resumed", settings, folder=tmp_path)
    assert "device-side assert" in found["error"]
    assert found["left"] == ["checkpoint-2", "checkpoint-4"]
    assert found["differing"] == []


def test_memory_of_the_device_is_reported(tmp_path: Path) -> None:
    found = on_the_standin("runs.memory_metrics", folder=tmp_path)
    assert found["init_mem_gpu_alloc_delta"] > 10_000
    assert found["train_mem_gpu_peaked_delta"] > found["train_mem_gpu_alloc_delta"] > 0


def test_a_loop_of_ones_own_trains_the_same(tmp_path: Path) -> None:
    assert on_the_standin("runs.driven", folder=tmp_path) == {"weight_gap": 0.0, "steps": 6}


@pytest.mark.slow
def test_a_search_runs_on_the_device(tmp_path: Path) -> None:
    found = on_the_standin("runs.searched", folder=tmp_path)
    assert found["device"] == "accel"
    assert 0 < found["objective"] < 10


def test_tied_weights_stay_one_parameter(tmp_path: Path) -> None:
    """torch takes them apart when a module moves to a device that it does not know."""
    found = on_the_standin("runs.tied", folder=tmp_path, STANDIN_SWAPS="0")
    assert not found["without us"]
    assert found["is_one"]
    assert found["num_trained"] == found["num_parameters"]
