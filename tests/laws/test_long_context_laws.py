"""Processes that share sequences (`cp_size`, `sp_size`) train and evaluate as one process does.

One launch runs many cells, since a process takes longer to start than a small model to train.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.engine.long_context import take_masks
from trainwright.engine.sequence_parts import HeadShare, read_attention

from .._support.engines import needs
from .._support.two_processes import Done, run
from .long_context import CELLS, COMPILED, MORE, llama, outcome, trainer_of, write_model
from .long_context_kinds import KINDS

pytestmark = [pytest.mark.process, pytest.mark.timeout(500)]
OF_LAYERS = ["eager, padded", "windowed, packed", "experts, padded", "recomputed, packed", "smoothed", "ledger"]
OF_ZERO = [name for name in MORE if name != "registered, packed"]
OF_EXPERTS = [name for name in MORE if name.startswith("experts")]
# name of a launch -> processes, cells of each kind (see `long_context_run.py`)
LAUNCHES: dict[str, tuple[int, dict[str, list[str]]]] = {
    "quick": (2, {"cp": ["packed, 4"], "sp": ["padded, 1"]}),
    "pairs": (2, {"cp": [*CELLS, *MORE], "sp": [*CELLS, *MORE]}),
    "fours": (4, {"cp 4": [*CELLS], "sp 4": ["padded, 1", "packed, 4", "masked, 4", "one key, packed"]}),
    "replicas": (4, {"cp": [*CELLS], "sp": [*CELLS]}),
    "sharded pairs": (2, {"cp + fsdp": [*CELLS], "sp + fsdp": [*CELLS]}),
    "zero pairs": (
        2,
        {
            "sp + zero 1": [*CELLS],
            "sp + zero 2": [*CELLS],
            "sp + zero 3": [*CELLS, *OF_ZERO],
            "cp + zero 3": [*CELLS, *OF_ZERO],
        },
    ),
    "compiled": (
        2,
        {
            "cp": ["compiled"],
            "sp": ["compiled by block"],
            "cp + fsdp": ["compiled by block"],
            "sp + zero 3": ["compiled by block"],
        },
    ),
    "experts": (2, {"cp + ep": OF_EXPERTS, "sp + ep": OF_EXPERTS}),
    "layers and experts": (4, {"cp + tp ep": OF_EXPERTS, "sp + tp ep": OF_EXPERTS[:2]}),
    "layers alone": (4, {"tp": [*CELLS]}),
    "layers": (4, {"cp + tp": [*CELLS, *OF_LAYERS], "sp + tp": [*CELLS, *OF_LAYERS]}),
    "sharded replicas": (4, {"cp + fsdp": [*CELLS], "sp + copies": [*CELLS]}),
    "zero replicas": (4, {"sp + zero 3": [*CELLS], "cp + zero 2": [*CELLS], "sp 4 + zero 3": ["packed, 4"]}),
    "copies": (8, {"cp + copies": ["padded, 1", "packed, 4", "masked, 4"], "sp + copies": ["packed, 4"]}),
}


def needed_by(kind: str) -> list[pytest.MarkDecorator]:
    """Marks of a kind that not everybody can run."""
    return [needs("deepspeed")] if "zero" in kind else []


CASES = [
    pytest.param(name, kind, cell, marks=[*needed_by(kind), *([] if name == "quick" else [pytest.mark.slow])])
    for name, (_, kinds) in LAUNCHES.items()
    for kind, cells in kinds.items()
    for cell in cells
]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Done]:
    done: dict[str, Done | Exception] = {}

    def launched(name: str) -> Done:
        if name not in done:
            try:
                done[name] = launch_of(name)
            except Exception as error:  # once, not for each cell
                done[name] = error
        result = done[name]
        if isinstance(result, Exception):
            raise result
        return result

    def launch_of(name: str) -> Done:
        folder = tmp_path_factory.mktemp("long_context")
        processes, kinds = LAUNCHES[name]
        cells = [f"{kind}: {cell}" for kind, cells in kinds.items() for cell in cells]
        for cell in {cell for kind, cells in kinds.items() if "tp" in kind or "ep" in kind for cell in cells}:
            write_model(cell, folder)
        script = Path(__file__).with_name("long_context_run.py")
        return run(script, str(folder), *cells, folder=folder, processes=processes, timeout_s=400)

    return launched


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def trained(cell: str) -> dict[str, Any]:
        interpreted = {"torch_compile": False} if cell in COMPILED else {}
        return outcome(trainer_of(cell, folder / cell.replace(", ", "-"), **interpreted))

    return trained


def steps_of(told: dict[str, Any]) -> torch.Tensor:
    """Loss and norm of each step."""
    return torch.tensor([(entry["loss"], entry["grad_norm"]) for entry in told["log"] if "loss" in entry])


def loads_of(told: dict[str, Any]) -> torch.Tensor:
    """Highest and lowest load of an expert, and the share of unused ones, by step."""
    names = ("experts/max_load", "experts/min_load", "experts/unused", "experts/dropped")
    loads = [[entry[name] for name in names] for entry in told["log"] if "loss" in entry]
    assert loads
    return torch.tensor(loads)


def assert_close(mine: Any, other: Any, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(other), rtol=rtol, atol=atol)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks it of transformers
@pytest.mark.parametrize(("name", "kind", "cell"), CASES)
def test_losses_weights_and_evaluations_are_those_of_one_process(
    name: str, kind: str, cell: str, launch: Callable[[str], Done], alone: Callable[[str], dict[str, Any]]
) -> None:
    done = launch(name)
    other = alone(cell)
    for rank, told in enumerate(done.told):
        mine = told[f"{kind}: {cell}"]
        assert mine["step"] == other["step"]
        assert_close(steps_of(mine), steps_of(other))
        if rank == 0 or "zero" not in kind:  # DeepSpeed's weights are put together in the main process
            assert mine["weights"].keys() == other["weights"].keys()
        for weight, values in mine["weights"].items():
            assert_close(values, other["weights"][weight])
        assert_close([*mine["judged"].values()], [*other["judged"].values()])
        assert_close(mine["logits"], other["logits"], atol=1e-5)
        if cell == "experts, masked":  # rows that need not be filled up
            assert_close(loads_of(mine), loads_of(other))
        assert bool(mine["ledger"]) is (cell == "ledger")
        assert_close(mine["ledger"], other["ledger"])


# -- checkpoints and refusals ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def more_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Done]:
    @functools.cache
    def launched(processes: int) -> Done:
        folder = tmp_path_factory.mktemp("more")
        for cell in ("packed, 4", "experts, packed, 4"):
            write_model(cell, folder)
        script = Path(__file__).with_name("long_context_more.py")
        return run(script, str(folder), folder=folder, processes=processes, timeout_s=400)

    return launched


@pytest.fixture(scope="module")
def more(more_of: Callable[[int], Done]) -> Done:
    return more_of(2)


@pytest.mark.slow  # a launch of its own
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needed_by(kind)) for kind in KINDS if kind != "ep"])
def test_run_that_is_cut_off_and_resumed_is_same_to_the_bit(kind: str, more_of: Callable[[int], Done]) -> None:
    for told in more_of(KINDS[kind].processes).told:
        assert told[f"{kind}: resumed"]["weights"] == told[f"{kind}: whole"]["weights"]
        assert told[f"{kind}: resumed"]["logits"] == told[f"{kind}: whole"]["logits"]
        assert torch.equal(steps_of(told[f"{kind}: resumed"]), steps_of(told[f"{kind}: whole"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("cp", "sp"),
        ("sp", "cp + fsdp"),
        ("cp + fsdp", "cp"),
        pytest.param("sp + zero 2", "cp + zero 3", marks=needs("deepspeed")),
        pytest.param("cp + zero 3", "sp", marks=needs("deepspeed")),
        pytest.param("cp", "sp + zero 2", marks=needs("deepspeed")),
        ("cp + ep", "sp + ep"),
        ("sp + ep", "cp + ep"),
        ("cp + tp", "sp + tp"),
        ("sp + tp", "tp"),
        ("tp", "cp + tp"),
    ],
)
def test_a_checkpoint_is_resumed_with_other_sizes(kind: str, other: str, more_of: Callable[[int], Done]) -> None:
    for told in more_of(KINDS[kind].processes).told:
        resumed = told[f"{kind}: from {other}"]
        whole = told[f"{other}: whole"]
        assert_close(steps_of(resumed), steps_of(whole))
        for weight, values in resumed["weights"].items():
            assert_close(values, whole["weights"][weight], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("module", "ModelError", "cp_size=2 OwnLoss transformers fsdp"),
        ("classifier", "ModelError", "cp_size=2 BertForSequenceClassification shift_labels"),
        ("encoder-decoder", "ModelError", "sp_size=2 T5ForConditionalGeneration encoder-decoder"),
        ("state space", "ModelError", "cp_size=2 MambaForCausalLM parts"),
        ("heads", "ModelError", "sp_size=2 3 cp_size"),
        ("attentions", "ModelError", "output_attentions"),
        ("pictures", "DataError", "cp_size pixel_values"),
    ],
)
def test_refused_with_a_sentence(case: str, kind: str, words: str, more: Done) -> None:
    for told in more.told:
        message = told[f"refused: {case}"]
        assert kind in message
        assert all(word in message for word in words.split())


def test_an_attention_that_takes_no_masks_is_that_of_torch(caplog: pytest.LogCaptureFixture) -> None:
    """The package is not needed here: the configuration names it as a model that was loaded with it has it."""
    model = llama()
    model.config._attn_implementation = "flash_attention_2"  # type: ignore[union-attr]
    take_masks(model, HeadShare(None, size=2, place=0))
    assert read_attention(model) == "sdpa"
    assert "'sdpa' instead of 'flash_attention_2'" in caplog.text
    caplog.clear()
    take_masks(model, HeadShare(None, size=2, place=0))
    assert caplog.text == ""
