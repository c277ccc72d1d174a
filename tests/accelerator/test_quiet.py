"""Between two logs the host waits for the stand-in accelerator no more than in a loop written by hand.

The model's own waits are in both: transformers' masks look at the positions in each forward pass.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .children import on_the_standin
from .quiet_limits import FIRST, LAST

pytestmark = pytest.mark.process

# fp16 waits once: whether the update was skipped decides about the schedule. The loop by hand steps it all the same.
OWN_WAITS = {"fp32": 0, "bf16": 0, "fp16": 1}
# Launches more than by hand. Counting the labels of a window and dividing by them: ne, sum, a copy and two divisions;
# in fp16 the two scales and their comparison; the guard: a mark in the backward pass, the flag, its copy to the host,
# and torch's correction of the optimizer's step counts, one for each group of parameters.
MORE_LAUNCHES = {"no-guards": 5, "plain": 11}
OF_FP16 = 5


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
    "accumulation",
    "no-clipping",
    "tokens",
)
SHORT = ("plain", "loss-output", "packing", "no-clipping")


@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("bf16", SHORT),
        *(pytest.param(precision, CELLS, marks=pytest.mark.slow, id=precision) for precision in OWN_WAITS),
    ],
)
def test_a_step_is_quiet(precision: str, names: tuple[str, ...], tmp_path: Path) -> None:
    found = on_the_standin("quiet.cells", precision, names, folder=tmp_path)
    num_steps = LAST - FIRST
    wrong = {}
    for name, cell in found.items():
        ours = cell["ours"]
        hand = cell["hand"]
        waits = sum(ours["waits"].values()) - sum(hand["waits"].values())
        is_quiet = waits <= OWN_WAITS[precision] * num_steps and ours["pageable"] == 0
        # The guard reads the flag of the step before, while the device computes this one.
        is_behind = sum(ours["behind"].values()) <= num_steps
        if not (is_quiet and is_behind):
            wrong[name] = {"ours": ours["waits"], "behind": ours["behind"], "hand": hand["waits"]}
    assert wrong == {}
    assert found.keys() == set(names)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_a_step_launches_what_it_needs(precision: str, tmp_path: Path) -> None:
    for name, limit in MORE_LAUNCHES.items():
        cell = on_the_standin("quiet.compared", name, precision, {}, folder=tmp_path / name)
        allowed = limit + (OF_FP16 if precision == "fp16" else 0)
        assert sum(cell["more"].values()) <= allowed, cell["more"]
