"""The table of bad values, policies, engines and ranks, and what each row must end with.

Run as a script of two processes it tells the rows of the engines that it is given: `matrix.py FOLDER RANKS ENGINE...`.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests._support.two_processes import tell
from tests.capabilities.guard.poisoned import BATCH, POISONS, Hears, LeavesOut, trained, trainer
from trainwright.errors import BadStepError, ProcessFailedError

BAD_STEP = 8
EVERY = 5
LAST = 10
SIZE = 2 * BATCH * LAST
SPIKES = {"on_nonfinite": "skip", "spike_warmup": 5, "spike_window": 7, "spike_threshold": 100.0}
VALUES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("on_nonfinite", POISONS[name]) for name in ("nan", "inf", "loss-alone", "gradient-alone")},
    "loss x 1e6": ("on_spike", {"constant": 1e6}),
    "gradient x 1e6": ("on_spike", {"labels": 1e6}),
}
LEFT_OUT: dict[str, tuple[int, ...]] = {
    "skip": (BAD_STEP,),
    "rollback": tuple(range(EVERY + 1, BAD_STEP + 1)),
    "stop": tuple(range(BAD_STEP, LAST + 1)),
    "warn": (),
}
ENGINES: dict[str, dict[str, Any]] = {
    "one process": {},
    "ddp": {},
    "fsdp": {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": "Linear"}},
    # Version 1 of FSDP is refused on the CPU, where torch dies when it puts the states of an optimizer together.
    **{
        f"zero-{stage}": {"deepspeed": {"zero_optimization": {"stage": stage}, "train_batch_size": "auto"}}
        for stage in (1, 2, 3)
    },
}
UNDECIDED = {"on_spike", "rollback"}  # with DeepSpeed, which updates before anything can be decided


def rows(engine: str) -> Iterator[tuple[str, str]]:
    """The bad values and policies of an engine."""
    for value, (field, _) in VALUES.items():
        for policy in LEFT_OUT:
            if not engine.startswith("zero") or not {field, policy} & UNDECIDED:
                yield value, policy


def weights_of(one: Any) -> dict[str, torch.Tensor]:
    whole = one._trainwright.services.engine.whole_weights(one.model)
    state = one.model.state_dict() if whole is None else whole
    return {name: value.clone() for name, value in state.items()}


def settings_of(engine: str, value: str, policy: str) -> dict[str, Any]:
    field = VALUES[value][0]
    guards = {**(SPIKES if field == "on_spike" else {}), field: policy, "rollback_every": EVERY}
    return {"max_steps": LAST, "logging_steps": LAST, **ENGINES[engine], **guards}


class Table:
    """Trains the rows of one engine; the runs that they are compared with are trained once."""

    def __init__(self, engine: str, folder: Path, *, ranks: int = 1) -> None:
        self._engine = engine
        self._folder = folder
        self._ranks = ranks
        self._by_hand: dict[Any, dict[str, torch.Tensor]] = {}

    def outcome(self, value: str, policy: str, *, rank: int = 0) -> list[Any]:
        """Whether weights are those of the run with steps left out by hand, and the sample named; what was heard."""
        poison = VALUES[value][1]
        row = (BAD_STEP - 1) * BATCH * self._ranks + rank * (BATCH * self._ranks - 1)
        hears = Hears()
        expected = self.by_hand(LEFT_OUT[policy], None if policy != "warn" else {row: poison})
        settings = settings_of(self._engine, value, policy)
        one = trainer(self._folder, poison={row: poison}, settings=settings, callbacks=[hears], size=SIZE)
        error = ""
        try:
            one.train()
        except BadStepError as raised:
            error = type(raised).__name__
        except ProcessFailedError as raised:  # of the process that was not the first
            error = next(name for name in ("NonFiniteError", "SpikeError") if name in str(raised))
        found = weights_of(one)
        same = found.keys() == expected.keys() and all(
            torch.equal(found[name].nan_to_num(7.0), expected[name].nan_to_num(7.0)) for name in found
        )
        first = hears.incidents[0]
        alone = policy == "warn" or len(hears.incidents) == 1
        searches = self._engine in ("one process", "ddp") and VALUES[value][0] == "on_nonfinite"
        is_named = first.samples == ((row,) if searches else ())  # in all processes, whichever has it
        return [same and alone and is_named, first.kind, first.step, first.action, error]

    def by_hand(self, left_out: tuple[int, ...], poison: dict[int, dict[str, Any]] | None) -> dict[str, torch.Tensor]:
        """Weights of a run without guards in which the updates of some steps are left out."""
        key = left_out, repr(poison)
        if key not in self._by_hand:
            settings = {"max_steps": LAST, "logging_steps": LAST, "on_nonfinite": "ignore", **ENGINES[self._engine]}
            callbacks = [LeavesOutOfEngine(*left_out)] if "deepspeed" in settings else [LeavesOut(*left_out)]
            one = trained(self._folder, poison=poison, settings=settings, callbacks=callbacks, size=SIZE)
            self._by_hand[key] = weights_of(one)
        return self._by_hand[key]


class LeavesOutOfEngine(LeavesOut):
    """The same for DeepSpeed, whose engine updates: its inner optimizer and the schedule do nothing."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["optimizer"] = kwargs["optimizer"].optimizer
        super().on_train_begin(args, state, control, **kwargs)


def expected(value: str, policy: str, engine: str = "") -> list[Any]:
    """What each row must end with."""
    field = VALUES[value][0]
    if engine.startswith("zero") and policy == "warn" and value != "loss-alone":
        policy = "skip"  # DeepSpeed itself updates nothing where a gradient is not finite
    kind, error = ("nonfinite", "NonFiniteError") if field == "on_nonfinite" else ("spike", "SpikeError")
    return [True, kind, BAD_STEP, policy, error if policy == "stop" else ""]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ranks = sys.argv[2].split(",")
    engines = sys.argv[3:]
    for offset, engine in enumerate(engines):
        table = Table(engine, folder / engine, ranks=int(os.environ["WORLD_SIZE"]))
        for number, (value, policy) in enumerate(rows(engine)):
            if ranks == ["half"]:  # of the table, so that each row is tried on one of two engines
                chosen = [number // 2 % 2] if number % 2 == offset % 2 else []
            else:
                chosen = [int(rank) for rank in ranks]
            for rank in chosen:
                tell(**{f"{engine}, {value}, {policy}, rank {rank}": table.outcome(value, policy, rank=rank)})
