"""Two processes: the numbers of transformers under the same launcher, bit for bit, and the same on both ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from .._support.two_processes import Done, run

ROWS = (
    "plain",
    "accumulated",
    "clipped",
    "every batch synchronised",
    "settings of ddp",
    "static graph",
    "half precision",
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("same")
    return run(Path(__file__).with_name("same_numbers.py"), str(folder), folder=folder)


@pytest.mark.smoke
@pytest.mark.parametrize("row", ROWS)
def test_weights_and_logs_are_those_of_transformers(done: Done, row: str) -> None:
    for rank in (0, 1):
        told = done.told[rank][row]
        assert told["weights"] == {}
        assert told["logs"][0] == told["logs"][1]
        assert told["steps"] == [8, 8]


@pytest.mark.parametrize("row", ROWS)
def test_ddp_is_set_up_as_transformers_does(done: Done, row: str) -> None:
    ours, theirs = done.told[0][row]["ddp"]
    assert ours == theirs


@pytest.mark.parametrize("row", ROWS)
def test_both_processes_end_with_the_same_weights(done: Done, row: str) -> None:
    assert done.told[0][row]["final"] == done.told[1][row]["final"]


def test_nothing_is_left_behind_or_complained_about(done: Done) -> None:
    assert "destroy_process_group" not in done.out
    assert "resource_tracker" not in done.out
