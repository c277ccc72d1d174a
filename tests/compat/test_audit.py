"""Every published name does the same on both sides, or the page for people who come from transformers says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..contract import surface
from ..parity.sides import OURS, REFERENCE
from .audit import DIFFERENT, HOOKS, METHODS, STATES, Bench, same, seen

CASES = METHODS | HOOKS | STATES
PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
# Whole runs, a search, the Hub: compared where they are tested.
ELSEWHERE = {
    "prediction_loop", "num_tokens", "compute_loss_context_manager", "autocast_smart_context_manager",
    "create_accelerator_and_postprocess", "init_hf_repo", "create_model_card", "push_to_hub", "hyperparameter_search",
    "add_callback", "remove_callback", "end",
}  # fmt: skip


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
def test_what_differs_is_told(name: str, benches: list[Bench]) -> None:
    mine, theirs = (seen(CASES[name], bench) for bench in benches)
    assert not same(mine, theirs), "it does not differ any more"
    assert DIFFERENT[name] in PAGE.read_text(encoding="utf-8")


def test_every_public_method_is_asked() -> None:
    assert set(surface.PUBLIC_METHODS) - ELSEWHERE <= {name.split(" ")[0] for name in METHODS}
