"""Between two logs a step waits for the stand-in accelerator no more than a loop written by hand, and launches no more.

The model's own waits are in both: transformers' masks look at the positions in each forward pass. An operation that
lacks a wait for another stream raises on the stand-in, so each of these runs shows that copies and events are in order.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from .children import on_the_standin
from .quiet_limits import FIRST, LAST

pytestmark = pytest.mark.process

# The guard: a mark in each backward pass, the flag, and torch's correction of the optimizer's step counts, one for each
# group of parameters.
OF_GUARD = {"addcmul": 1, "mul": 1, "ne": 1, "_foreach_sub_": 2}
OF_WARNING = {"mul": 2, "add": 1, "ne": 1}  # it looks at the loss besides, and lets all updates through

PRECISIONS = ("fp32", "bf16", "fp16")
# `on_spike` is not here: it judges loss and norm on the host before an update.
CELLS = (
    "plain",
    "no-guards",
    "guards-warn",
    "ledger",
    "mixture",
    "loss-output",
    "lora",
    "packing",
    "chunked-loss",
    "checkpointed-activations",
    "workers",
    "accumulation",
    "no-clipping",
    "tokens",
)
NUM_PARTS = 5  # of the cells of a precision, each in a process of its own


@pytest.mark.parametrize(
    ("precision", "names"),
    [
        pytest.param("bf16", ("loss-output", "packing"), id="bf16-short"),
        pytest.param("fp16", ("plain",), id="fp16-short"),
        *(
            pytest.param(precision, CELLS[part::NUM_PARTS], marks=pytest.mark.slow, id=f"{precision}-{part}")
            for precision in PRECISIONS
            for part in range(NUM_PARTS)
        ),
    ],
)
def test_a_step_is_quiet(precision: str, names: tuple[str, ...], tmp_path: Path) -> None:
    found = on_the_standin("quiet.cells", precision, names, {}, folder=tmp_path)
    num_steps = LAST - FIRST
    wrong = {}
    for name, cell in found.items():
        ours = cell["ours"]
        hand = cell["hand"]
        waits = sum(ours["waits"].values()) - sum(hand["waits"].values())
        is_quiet = waits <= 0 and ours["pageable"] == 0
        # The flag of the step before, of the guard or of the loss scale, is read while the device computes this one.
        is_behind = sum(ours["behind"].values()) <= num_steps
        if not (is_quiet and is_behind):
            wrong[name] = {"ours": ours["waits"], "behind": ours["behind"], "hand": hand["waits"]}
    assert wrong == {}
    assert found.keys() == set(names)


def test_an_optimizer_that_makes_a_step_wait_is_named_with_one_that_does_not(tmp_path: Path) -> None:
    found = on_the_standin("quiet.waits_by_optimizer", ["adamw_torch", "adamw_torch_fused"], folder=tmp_path)
    assert found["adamw_torch_fused"] == {"waits": 0.0, "said": []}
    assert found["adamw_torch"]["waits"] == 1.0
    (cure,) = found["adamw_torch"]["said"]
    assert "adamw_torch_fused" in cure


LAUNCHING = ("plain", "lora", "accumulation", "no-clipping")


@pytest.mark.parametrize(
    ("precision", "names"),
    [
        pytest.param("fp16", ("plain", "no-clipping"), id="fp16-short"),
        *(pytest.param(precision, LAUNCHING, marks=pytest.mark.slow, id=precision) for precision in PRECISIONS),
    ],
)
def test_a_step_launches_what_a_loop_by_hand_launches(precision: str, names: tuple[str, ...], tmp_path: Path) -> None:
    found = on_the_standin("quiet.cells", precision, names, {"on_nonfinite": "ignore"}, folder=tmp_path)
    assert {name: cell["more"] for name, cell in found.items()} == {name: {} for name in names}


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_guard_launches_what_it_needs(precision: str, tmp_path: Path) -> None:
    found = on_the_standin("quiet.cells", precision, ("plain", "guards-warn"), {}, folder=tmp_path)
    assert Counter(found["plain"]["more"]) <= Counter(OF_GUARD)
    assert Counter(found["guards-warn"]["more"]) <= Counter(OF_WARNING)
