"""Every published name does the same on both sides, or the page for people who come from transformers says why not."""

from __future__ import annotations

import enum
import importlib
from pathlib import Path
from typing import Any

import pytest

import trainwright

from ..contract import surface
from ..parity import data, models
from ..parity.sides import OURS, REFERENCE
from .audit import DIFFERENT, HOOKS, METHODS, STATES, Bench, same, seen

pytestmark = pytest.mark.framework
CASES = METHODS | HOOKS | STATES
PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
# Whole runs, a search, the Hub: compared where they are tested.
ELSEWHERE = {
    "prediction_loop",
    "num_tokens",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
    "create_accelerator_and_postprocess",
    "init_hf_repo",
    "create_model_card",
    "push_to_hub",
    "hyperparameter_search",
    "add_callback",
    "remove_callback",
    "end",
}


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> list[Bench]:
    folder = tmp_path_factory.mktemp("audit")
    return [Bench(side, folder) for side in (OURS, REFERENCE)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in CASES if name not in DIFFERENT])
def test_the_same(name: str, benches: list[Bench]) -> None:
    mine, theirs = (seen(CASES[name], bench) for bench in benches)
    assert same(mine, theirs), f"here {mine!r}\nthere {theirs!r}"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", list(DIFFERENT))
def test_differences_are_reported(name: str, benches: list[Bench]) -> None:
    mine, theirs = (seen(CASES[name], bench) for bench in benches)
    assert not same(mine, theirs), "it does not differ any more"
    assert DIFFERENT[name] in PAGE.read_text(encoding="utf-8")


def test_every_public_method_is_asked() -> None:
    assert set(surface.PUBLIC_METHODS) - ELSEWHERE <= {name.split(" ")[0] for name in METHODS}


OF_OURS = {"Decision"}  # enums that transformers has not
ENUMS = [
    name
    for name in trainwright.__all__
    if name not in OF_OURS and isinstance(getattr(trainwright, name), enum.EnumMeta)
]


@pytest.mark.parametrize("name", ENUMS)
def test_an_enum_has_every_member_of_the_original(name: str) -> None:
    ours = getattr(trainwright, name)
    theirs = original(name)
    assert {member.name: member.value for member in theirs}.items() <= {m.name: m.value for m in ours}.items()
    for member in theirs:
        assert ours(member.value) == member.value or ours(member.value).value == member.value
        assert str(ours(member.value)) == str(member)


def original(name: str) -> Any:
    """Where transformers has a name: at its top, or in one of its trainer's modules."""
    names = ("transformers", "transformers.trainer_utils", "transformers.training_args", "transformers.debug_utils")
    return next(getattr(home, name) for home in map(importlib.import_module, names) if hasattr(home, name))


def test_the_logs_have_the_keys_of_the_original_and_checkpoint_its_files(tmp_path: Path) -> None:
    settings = {
        "max_steps": 4,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "save_strategy": "steps",
        "per_device_train_batch_size": 4,
        "include_num_input_tokens_seen": "all",
    }
    found = []
    for side in (OURS, REFERENCE):
        trainer = side.make(
            model=models.seeded(lambda: models.ReturnsDict(0.0)),
            train_dataset=data.vectors(16),
            eval_dataset=data.vectors(4),
            output_dir=tmp_path / side.name,
            settings=settings,
        )
        side.train(trainer)
        files = {path.name for path in (tmp_path / side.name / "checkpoint-4").iterdir()}
        found.append(([list(entry) for entry in trainer.state.log_history], files))
    (our_keys, our_files), (their_keys, their_files) = found
    their_keys[-1].append("train_tokens_per_second")  # the original has it in every entry but the last
    assert [sorted(keys) for keys in our_keys] == [sorted(keys) for keys in their_keys]
    assert our_files - their_files == {"manifest.json", "training_args.json"}
    assert their_files <= our_files
