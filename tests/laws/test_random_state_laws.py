"""A checkpoint of any step resumes to the same bits, whoever draws random numbers, and from whichever step on.

Who draws: the dataset, the model, a callback, all of them, or none. They draw by python, numpy and torch, also the
second of two normal numbers, which numpy and python keep from the first. A generator that moves for the first time
shortly before a save is the case that is wrong where one that stood still is not copied before each fetch.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainwright
from trainwright.checkpoint import rng

from .._support.small import Diary, data, differing, make_trainer, models, weights

ROWS = 24
BATCH = 4
STEPS = 7
WHO = ("data", "model", "callback", "all", "none")


def draw() -> float:
    """Returns a number in which each generator has a part."""
    return random.gauss(0, 1) + float(np.random.randn()) + torch.randn(()).item()


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Rows in the order in which the first epoch reads them."""
    diary = Diary(data.vectors(ROWS))
    make_trainer(tmp_path_factory.mktemp("order"), train_dataset=diary, num_train_epochs=1).train()
    return diary.reads[:ROWS]


class Drawing:
    """A run whose dataset, model or callback draws, from a step on; the dataset at rows that are read from then on."""

    def __init__(self, who: str, first: int, order: list[int]) -> None:
        self._who = who
        self._first = first
        self._late = frozenset(order[BATCH * first :])
        self.step = 0

    def draws(self, who: str) -> bool:
        return self._who in (who, "all") and self.step >= self._first

    def draws_row(self, index: int) -> bool:
        return self._who in ("data", "all") and index in self._late

    def trained(self, folder: Path, *, saves: str, resume: str | None = None) -> tuple[Mapping[str, Any], Any]:
        """Returns the weights and random states at the end; saves are "planned", or "asked for" by a callback."""
        model = models.seeded(models.ReturnsDict)
        run = self

        class Data(torch.utils.data.Dataset[Any]):
            rows = data.vectors(ROWS)

            def __len__(self) -> int:
                return len(self.rows)

            def __getitem__(self, index: int) -> Any:
                row = dict(self.rows[index])
                return {**row, "x": row["x"] + draw()} if run.draws_row(index) else row

        class Callback(trainwright.TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                run.step = state.global_step

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                run.step = state.global_step
                if run.draws("callback"):
                    with torch.no_grad():
                        next(model.parameters()).add_(0.01 * draw())
                control.should_save = control.should_save or saves == "asked for"

        def disturb(module: object, args: object, kwargs: dict[str, Any]) -> Any:
            if model.training and run.draws("model"):
                return (), {**kwargs, "x": kwargs["x"] + draw()}
            return None

        model.register_forward_pre_hook(disturb, with_kwargs=True)
        self.step = 0
        trainer = make_trainer(
            folder,
            model=model,
            train_dataset=Data(),
            callbacks=[Callback()],
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            num_train_epochs=2,
            logging_steps=3,
            save_strategy="steps" if saves == "planned" else "no",
            save_steps=1,
        )
        if resume is not None:
            random.seed(99)
            np.random.seed(99)
            torch.manual_seed(99)
            self.step = int(resume)
        trainer.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
        assert trainer.state.global_step == STEPS
        return weights(trainer.model), rng.capture()


@pytest.mark.costly
@pytest.mark.parametrize("saves", ["planned", "asked for"])
@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("who", WHO)
@pytest.mark.one_in(4)
def test_each_checkpoint_resumes_to_the_bits_of_the_run(
    who: str, first: int, saves: str, order: list[int], tmp_path: Path
) -> None:
    whole, states = Drawing(who, first, order).trained(tmp_path, saves=saves)
    # From the last to the first: a resumed run writes the checkpoints after its own anew.
    for step in reversed(range(1, STEPS)):
        after, states_after = Drawing(who, first, order).trained(tmp_path, saves=saves, resume=str(step))
        assert [name for name in whole if not torch.equal(whole[name], after[name])] == [], f"from step {step}"
        assert rng.same(states, states_after), f"from step {step}"


# Each draws a normal number, of which python and numpy keep a second one.
GENERATORS: dict[str, Callable[[], float]] = {
    "python": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.randn()),
    "torch": lambda: torch.randn(()).item(),
}
CUT_ROW = 1  # of the first batch that draws: a row of it has drawn before


class SignalledData(torch.utils.data.Dataset[Any]):
    """Draws by one generator from a batch on; may send a signal to this process within that batch."""

    def __init__(self, generator: str, late: list[int], *, is_cut: bool) -> None:
        self._rows = data.vectors(ROWS)
        self._draw = GENERATORS[generator]
        self._late = frozenset(late)
        self._cut = late[CUT_ROW] if is_cut else None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        row = dict(self._rows[index])
        if index == self._cut:
            os.kill(os.getpid(), signal.SIGTERM)
        return {**row, "x": row["x"] + self._draw()} if index in self._late else row


@pytest.mark.costly
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("first", [3, 4])
@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.one_in(3)
def test_a_signal_in_the_fetch_in_which_a_generator_first_moves_saves_its_states(
    generator: str, first: int, accumulated: int, order: list[int], tmp_path: Path
) -> None:
    def trainer(place: str, *, is_cut: bool = False) -> Any:
        return make_trainer(
            tmp_path / place,
            model=models.seeded(models.ReturnsDict),
            train_dataset=SignalledData(generator, order[BATCH * first :], is_cut=is_cut),
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=accumulated,
            num_train_epochs=2,
            save_strategy="steps",
            save_steps=100,
        )

    whole = trainer("whole")
    whole.train()
    states = rng.capture()
    with pytest.raises(SystemExit):
        trainer("cut", is_cut=True).train()
    again = trainer("cut")
    again.train(resume_from_checkpoint=True)
    assert 0 < again.state.global_step == whole.state.global_step
    assert differing(weights(again.model), weights(whole.model)) == {}
    assert rng.same(states, rng.capture())
