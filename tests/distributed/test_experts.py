"""Processes that share out the experts of a model against one that has them all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from .._support.small import StopAt
from .._support.two_processes import Done, run
from .mixtures import CASES, EXPERTS, LAYOUTS, MODEL, SAVED, judged, loaded, outcome, replicas, trainer_of, write_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("experts.py")
ADAM = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-2}
WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]
LAST = list(CASES)[-1]
CELLS = [
    pytest.param(world, layout, id=layout, marks=[pytest.mark.slow] if layout != "fsdp2 ep2" else [])
    for world, layouts in LAYOUTS.items()
    for layout in layouts
]
SLOW_CELLS = [pytest.param(*cell.values, id=cell.id, marks=pytest.mark.slow) for cell in CELLS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    write_model(folder / MODEL)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[..., dict[str, Any]]:
    """What one process with as many micro-batches comes to."""

    @functools.cache
    def trained(parts: int, window: int, with_adam: bool = False, texts: str = "padded") -> dict[str, Any]:
        settings = {"parts": parts, "window": window, "texts": texts, **(ADAM if with_adam else {})}
        return outcome(trainer_of(loaded(folder / MODEL), folder / f"one_{parts}", **settings))

    return trained


@pytest.fixture(scope="module")
def launch(folder: Path) -> Callable[..., Done]:
    @functools.cache
    def launched(world: int, step: str, *layouts: str) -> Done:
        mine = folder / "_".join((str(world), step, *layouts))
        mine.mkdir()
        (mine / MODEL).symlink_to(folder / MODEL)
        if step == "goes_on":
            one = trainer_of(loaded(folder / MODEL), mine / "by_one", **ADAM)
            one.add_callback(StopAt(2))
            one.train()
        return run(SCRIPT, str(mine), step, *layouts, folder=mine, processes=world, timeout_s=400)

    return launched


def numbers(log: list[dict[str, Any]], *names: str) -> list[float]:
    return [entry[name] for entry in log if "loss" in entry for name in names]


def assert_same(mine: dict[str, Any], other: dict[str, Any], *, tolerance: float) -> None:
    assert mine["step"] == other["step"]
    for name in ("loss", "grad_norm", "experts/max_load", "experts/min_load", "experts/unused", "experts/dropped"):
        expected = pytest.approx(numbers(other["log"], name), rel=tolerance, abs=tolerance)
        assert numbers(mine["log"], name) == expected, name
    assert mine["weights"].keys() == other["weights"].keys()
    for name, values in mine["weights"].items():
        torch.testing.assert_close(
            torch.tensor(values), torch.tensor(other["weights"][name]), rtol=tolerance, atol=tolerance, msg=name
        )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("world", "layout"), CELLS)
def test_losses_norms_weights_and_loads_are_those_of_one_process(
    world: int, layout: str, case: str, launch: Callable[..., Done], alone: Callable[..., dict[str, Any]]
) -> None:
    """Padding, packed rows, a process without labels, and the auxiliary loss, which must not grow with processes."""
    other = alone(replicas(LAYOUTS[world][layout]), CASES[case], texts=case.split(",")[0])
    for told in launch(world, "trains_like_one", layout).told:
        assert_same(told[f"{layout}: {case}"], other, tolerance=1e-6)


@pytest.mark.parametrize(("world", "layout"), CELLS)
def test_each_process_has_its_part_of_the_experts(world: int, layout: str, launch: Callable[..., Done]) -> None:
    sizes = LAYOUTS[world][layout]
    copies = sizes.get("dp_replicate_size", 1)
    for told in launch(world, "trains_like_one", layout).told:
        assert told[f"{layout}: experts"] == [EXPERTS * copies // world]


@pytest.mark.parametrize(("world", "layout"), CELLS)
def test_evaluations_are_those_of_one_process(
    world: int, layout: str, launch: Callable[..., Done], folder: Path, tmp_path: Path
) -> None:
    one = trainer_of(loaded(folder / MODEL), tmp_path, parts=replicas(LAYOUTS[world][layout]), window=CASES[LAST])
    one.train()
    alone = judged(one)
    for told in launch(world, "trains_like_one", layout).told:
        mine = told[f"{layout}: judged"]
        assert mine["labels"] == alone["labels"]
        torch.testing.assert_close(torch.tensor(mine["logits"]), torch.tensor(alone["logits"]), rtol=1e-5, atol=1e-5)


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["whole", "parts"])
@pytest.mark.parametrize(("world", "layout"), SLOW_CELLS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(
    world: int, layout: str, form: str, launch: Callable[..., Done]
) -> None:
    for told in launch(world, "goes_on").told:
        assert told[f"{layout}: from {form}"]["weights"] == told[f"{layout}: uninterrupted"]["weights"]
        assert numbers(told[f"{layout}: from {form}"]["log"], "loss") == numbers(
            told[f"{layout}: uninterrupted"]["log"], "loss"
        )


@pytest.mark.parametrize("source", ["another", "one"])
@pytest.mark.parametrize(("world", "layout"), SLOW_CELLS)
def test_a_run_resumes_with_experts_shared_out_otherwise(
    world: int, layout: str, source: str, launch: Callable[..., Done], alone: Callable[..., dict[str, Any]]
) -> None:
    """From a checkpoint in parts of another layout, and from one of one process: the next losses are the same."""
    told = launch(world, "goes_on").told
    if f"{layout}: from {source}" not in told[0]:
        pytest.skip("the first layout has none before it")
    for one in told:
        mine = numbers(one[f"{layout}: from {source}"]["log"], "loss")
        assert mine == pytest.approx(numbers(one[f"{layout}: uninterrupted"]["log"], "loss"), rel=0.02)


@pytest.mark.parametrize("world", [pytest.param(world, marks=pytest.mark.slow) for world in LAYOUTS])
def test_what_checkpoints_hold(world: int, launch: Callable[..., Done]) -> None:
    told = launch(world, "goes_on").told[0]
    for layout in LAYOUTS[world]:
        assert {"model.safetensors", "optimizer.pt"} <= set(told[f"{layout}: whole files"])
        parts = set(told[f"{layout}: parts files"])
        assert {"pytorch_model_fsdp_0", "optimizer_0"} <= parts
        assert not {"model.safetensors", "optimizer.pt"} & parts


@pytest.mark.slow
@pytest.mark.parametrize("form", ["whole", "parts"])
def test_one_process_goes_on_from_it(
    form: str, launch: Callable[..., Done], folder: Path, alone: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    launch(2, "goes_on")
    trainer = trainer_of(loaded(folder / MODEL), tmp_path, parts=2, **ADAM)
    saved = folder / "2_goes_on" / f"fsdp2 ep2 {form}" / SAVED
    mine = numbers(outcome(trainer, resume_from_checkpoint=str(saved))["log"], "loss")
    assert mine == pytest.approx(numbers(alone(2, 2, True)["log"], "loss"), rel=1e-4)


@pytest.mark.slow
def test_the_final_model_is_read_by_from_pretrained(launch: Callable[..., Done], folder: Path) -> None:
    launch(2, "goes_on")
    _, info = transformers.Qwen3MoeForCausalLM.from_pretrained(  # type: ignore[misc]
        folder / "2_goes_on" / "final", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.slow
def test_a_kernel_without_a_backward_pass_is_refused(launch: Callable[..., Done]) -> None:
    for told in launch(2, "refused").told:
        assert all(word in told["megamoe"] for word in ("ArgumentError", "deepgemm_megamoe", "all_to_all"))
