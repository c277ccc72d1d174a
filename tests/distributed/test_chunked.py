"""The chunked loss under FSDP2: the output layer is gathered as often as with the plain loss, not for each chunk."""

from __future__ import annotations

from pathlib import Path

import pytest

from .._support.two_processes import run
from .chunked import NUM_STEPS

pytestmark = pytest.mark.process

SCRIPT = "import sys\nfrom tests.distributed import chunked\nchunked.main(sys.argv[1])\n"
# Under "by size" accelerate gathers the output layer for its own forward pass only: the plain loss, and a warning.
CASES = {"untied": True, "tied": True, "by size": False}


@pytest.mark.parametrize(
    "name", ["untied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tied", "by size"))]
)
def test_chunks_of_the_loss_share_one_gather(name: str, tmp_path: Path) -> None:
    for told in run(SCRIPT, name, folder=tmp_path).told:
        plain = told["plain"]
        chunked = told["chunked"]
        assert plain["gathers"] > 0
        assert chunked["gathers"] == plain["gathers"]
        assert chunked["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert chunked["norms"] == pytest.approx(plain["norms"], rel=1e-4)
        assert told["weight_gap"] < 1e-4
        assert plain["chunks"] == 0
        assert (chunked["chunks"] > 3 * NUM_STEPS) is CASES[name]
