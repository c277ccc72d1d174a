"""No loss is credited to another row, and no other row is excluded, whatever becomes of the data between two runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .._support.two_processes import run
from . import named

FEW = len(named.KINDS)
# Each draw trains three times, and a counter keeps the folders of draws apart that hypothesis repeats.
LAWS = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def check(seed: int, folder: Path, *, workers: int = 0) -> None:
    place = folder / f"{seed}-{len(list(folder.iterdir()))}"
    named.check(place, named.drawn(seed, workers=workers))


@pytest.mark.costly
@pytest.mark.parametrize("seed", range(3 * FEW))
def test_names_are_right_whatever_becomes_of_the_data(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.slow  # a thousand draws, of which the tests above are the first
@pytest.mark.timeout(3600)
@settings(max_examples=1000, **LAWS)  # type: ignore[arg-type]
@given(seed=st.integers(0, 10**9))
def test_no_wrong_name_in_a_thousand_draws(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.process
@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(100, 100 + 2 * FEW))
def test_names_are_right_with_workers(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path, workers=2)


@pytest.mark.process
def test_names_are_right_with_two_processes(tmp_path: Path) -> None:
    done = run(Path(named.__file__), str(tmp_path / "runs"), "200", str(200 + FEW), folder=tmp_path)
    assert [told["done"] for told in done.told] == [FEW] * 2


@pytest.mark.slow  # the same for a hundred draws, in two processes
@pytest.mark.timeout(900)
def test_no_wrong_name_in_a_hundred_draws_of_two_processes(tmp_path: Path) -> None:
    done = run(Path(named.__file__), str(tmp_path / "runs"), "300", "400", folder=tmp_path, timeout_s=600)
    assert [told["done"] for told in done.told] == [100] * 2
