"""A batch carries the ids of exactly the samples whose content is in it, whatever the data is, however it is read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from trainwright.data.streaming import lookahead_buffer
from trainwright.data.streaming.lookahead_buffer import BatchFormer

from .._support.two_processes import run
from . import carried

pytestmark = pytest.mark.costly


@pytest.fixture(autouse=True)
def short_look_aheads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead_buffer, "BatchFormer", partial(BatchFormer, size=8, min_batches=2, block=3))


@pytest.mark.parametrize("name", carried.CASES)
def test_a_batch_names_its_samples(name: str, tmp_path: Path) -> None:
    carried.check(tmp_path, carried.CASES[name])


@pytest.mark.parametrize("name", carried.CASES)
def test_a_batch_names_its_samples_after_a_resume_in_the_epoch(name: str, tmp_path: Path) -> None:
    carried.check(tmp_path, carried.CASES[name], stop=2)


@pytest.mark.process
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name in carried.CASES if name != "stream of datasets"])
def test_a_batch_of_workers_names_its_samples(name: str, tmp_path: Path) -> None:
    carried.check(tmp_path, {**carried.CASES[name], "dataloader_num_workers": 2}, stop=2)


@pytest.mark.parametrize("name", [name for name in carried.CASES if name not in carried.FORMED_STREAMS])
def test_a_batch_names_its_samples_where_others_are_in_quarantine(name: str, tmp_path: Path) -> None:
    carried.check(tmp_path, {**carried.CASES[name], "gradient_accumulation_steps": 1}, quarantine=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.process if "workers" in name else ()) for name in carried.UNKNOWN]
)
def test_ids_that_are_not_known_are_none_rather_than_wrong(name: str, tmp_path: Path) -> None:
    one = carried.trainer(tmp_path, **carried.UNKNOWN[name])
    one.train()
    known = [(ids, rows) for ids, rows in one.seen if ids]
    assert len(known) < len(one.seen)
    assert all(carried.is_named(ids, rows) for ids, rows in known)


@pytest.mark.process
def test_batches_of_two_processes_name_their_samples(tmp_path: Path) -> None:
    done = run(Path(carried.__file__), str(tmp_path / "runs"), folder=tmp_path)
    assert [told["done"] for told in done.told] == [[*carried.SHARED]] * 2
