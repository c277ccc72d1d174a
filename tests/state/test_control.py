"""The five flags: what a new training, epoch or step clears, and the form of their state."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import transformers

from trainwright import ExportableState, TrainerControl

ALL = {field.name: True for field in fields(TrainerControl)}


@pytest.mark.parametrize("moment", ["_new_training", "_new_epoch", "_new_step"])
def test_the_same_flags_are_cleared_as_in_transformers(moment: str) -> None:
    ours = TrainerControl(**ALL)
    theirs = transformers.TrainerControl(**ALL)
    getattr(ours, moment)()
    getattr(theirs, moment)()
    assert vars(ours) == vars(theirs)
    assert not all(vars(ours).values())


def test_its_state_makes_an_equal_one() -> None:
    control = TrainerControl(should_save=True, should_epoch_stop=True)
    assert control.state() == transformers.TrainerControl(**vars(control)).state()
    assert TrainerControl.from_state(control.state()) == control


def test_an_exportable_without_a_state_says_what_is_missing() -> None:
    class Forgetful(ExportableState):
        pass

    with pytest.raises(NotImplementedError, match=r"Forgetful.*state\(\)"):
        Forgetful().state()


def test_arguments_and_attributes_come_back() -> None:
    class Counter(ExportableState):
        def __init__(self, start: int) -> None:
            self.start = start
            self.count = start

        def state(self) -> dict[str, Any]:
            return {"args": {"start": self.start}, "attributes": {"count": self.count}}

    counter = Counter(3)
    counter.count = 8
    assert vars(Counter.from_state(counter.state())) == {"start": 3, "count": 8}
