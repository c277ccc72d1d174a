"""Random states there and back, and in the form that transformers reads."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from trainwright.capabilities.incidents import bundle
from trainwright.checkpoint import rng

from .._support.small import REFERENCE, make_trainer


def draws() -> list[Any]:
    """Also the second of two normal numbers, which numpy and python compute together and keep."""
    return [
        random.gauss(0, 1),
        random.random(),
        float(np.random.randn()),
        float(np.random.rand()),
        torch.randn(3).tolist(),
        torch.rand(()).item(),
    ]


def stir() -> None:
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    draws()


def test_restoring_repeats_all_draws() -> None:
    stir()
    states = rng.capture()
    first = draws()
    draws()
    rng.restore(states)
    assert draws() == first


def test_plain_states_give_the_same_draws() -> None:
    drawing = [
        random.random,
        lambda: random.gauss(0, 1),
        lambda: np.random.rand(700),
        np.random.randn,
        stir,
        lambda: torch.rand(3),
        np.random.randn,
        lambda: np.random.set_state(np.random.RandomState(3).get_state()),
    ]
    for draw in drawing:
        draw()
        states = rng.capture()
        first = draws()
        rng.restore(rng.plain(states))
        assert rng.same(rng.capture(), states)
        assert draws() == first
        assert not rng.same(rng.capture(), states)


def test_another_generator_of_numpy_is_kept_too(tmp_path: Path) -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in numpy's stubs
    np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
    try:
        rng.save(tmp_path / "rng_state.pth", rng.capture())
        first = draws()
        rng.restore(rng.load(tmp_path / "rng_state.pth"))
        assert draws() == first
        folder = tmp_path / "bundle"
        folder.mkdir()
        bundle.write_random_states(rng.plain(rng.load(tmp_path / "rng_state.pth")), folder)
        rng.restore(bundle.read_random_states(folder))
        assert draws() == first
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


def test_states_are_copied_by_the_functions_that_are_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that a library has replaced is the one that is called."""
    called: list[str] = []
    for module, name in (
        (random, "getstate"),
        (np.random, "get_state"),
        (torch, "get_rng_state"),
        (random, "setstate"),
        (np.random, "set_state"),
        (torch, "set_rng_state"),
    ):
        original = getattr(module, name)

        def noting(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            called.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(module, name, noting)
    rng.restore(rng.capture())
    assert called == ["getstate", "get_state", "get_rng_state", "setstate", "set_state", "set_rng_state"]


def test_through_a_file(tmp_path: Path) -> None:
    stir()
    rng.save(tmp_path / "rng_state.pth", rng.capture())
    first = draws()
    rng.restore(rng.load(tmp_path / "rng_state.pth"))
    assert draws() == first


def test_the_file_holds_nothing_but_numbers_and_tensors(tmp_path: Path) -> None:
    rng.save(tmp_path / "rng_state.pth", rng.capture())
    torch.load(tmp_path / "rng_state.pth", weights_only=True)  # without any class that is let in by name


@pytest.mark.framework
def test_transformers_reads_ours(tmp_path: Path) -> None:
    stir()
    rng.save(tmp_path / "rng_state.pth", rng.capture())
    first = draws()
    stir()
    trainer = make_trainer(tmp_path / "run", REFERENCE)
    stir()
    trainer._load_rng_state(str(tmp_path))
    assert draws() == first


@pytest.mark.framework
def test_ours_reads_transformers(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", REFERENCE)
    assert isinstance(trainer, transformers.Trainer)
    stir()
    trainer._save_rng_state(str(tmp_path))
    first = draws()
    stir()
    rng.restore(rng.load(tmp_path / "rng_state.pth"))
    assert draws() == first


@pytest.mark.parametrize("place", ["state", "training"])
def test_saving_draws_nothing(place: str, tmp_path: Path) -> None:
    stir()
    before = rng.capture()
    if place == "state":
        rng.save(tmp_path / "rng_state.pth", rng.capture())
    else:
        trainer = make_trainer(tmp_path / "run")
        trainer.create_optimizer_and_scheduler(10)
        rng.restore(before)
        trainer._save_checkpoint(trainer.model, None)
    after = draws()
    rng.restore(before)
    assert draws() == after
