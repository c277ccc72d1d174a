"""Checks of the fields by which a run saves itself: by the clock, on an error, into the cluster's queue."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from trainwright import TrainerCallback
from trainwright.callbacks.preemption import SlurmRequeue
from trainwright.state import interrupts

from .bench import Bench, checkpoints
from .table import shows


class Slow(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.05)


class Breaks(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise LookupError


def saved_at(bench: Bench, **settings: Any) -> list[int]:
    return checkpoints(bench.train(callbacks=[Slow()], **settings).args.output_dir)


@shows("max_train_time")
def it_saves_and_stops_in_time(bench: Bench) -> None:
    limited = bench.train(callbacks=[Slow()], num_train_epochs=20, max_train_time=0.5)
    last = limited.state.global_step
    assert last < 120
    assert checkpoints(limited.args.output_dir) == [last]


@shows("save_every")
def it_saves_by_the_clock(bench: Bench) -> None:
    assert saved_at(bench) == []
    assert saved_at(bench, save_every=0.1) != []


@shows("save_keep_every")
def one_stays_for_each_length_of_time(bench: Bench) -> None:
    often = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    assert saved_at(bench, **often) == [6]
    assert saved_at(bench, **often, save_keep_every=0.01) == [1, 2, 3, 4, 5, 6]
    assert saved_at(bench, **often, save_keep_every="1h") == [1, 6]


@shows("save_keep_every_steps")
def those_of_some_steps_stay(bench: Bench) -> None:
    often = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    assert saved_at(bench, **often, save_keep_every_steps=2) == [2, 4, 6]


@shows("save_on_exception")
def the_last_step_before_an_error_is_saved(bench: Bench) -> None:
    def saved(**settings: Any) -> list[int]:
        trainer = bench.trainer(callbacks=[Breaks()], **settings)
        with pytest.raises(LookupError):
            trainer.train()
        return checkpoints(trainer.args.output_dir)

    assert saved() == []
    assert saved(save_on_exception=True) == [3]


class Signals(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@shows("slurm_requeue")
def the_job_goes_back_into_the_queue(bench: Bench) -> None:
    """With a stand-in for Slurm's command; tests/resume/test_run_cut_off.py has one on PATH."""
    calls: list[list[str]] = []
    bench.monkeypatch.setenv("SLURM_JOB_ID", "17")
    bench.monkeypatch.setattr(SlurmRequeue.__init__, "__kwdefaults__", {"run": calls.append})
    for settings, expected in (({}, []), ({"slurm_requeue": True}, [["scontrol", "requeue", "17"]])):
        trainer = bench.trainer(callbacks=[Signals()], **settings)
        with pytest.raises(SystemExit):
            trainer.train()
        assert calls == expected
    assert checkpoints(trainer.args.output_dir) == [2]


@shows("signal_grace_s")
def further_signals_within_it_do_not_end_a_run_at_once(bench: Bench) -> None:
    ended: list[int] = []
    bench.monkeypatch.setattr(interrupts.os, "kill", lambda pid, number: ended.append(number))
    bench.monkeypatch.setattr(interrupts.os, "write", lambda file, text: None)
    for grace_s in (10.0, 0.0):
        trainer = bench.trainer(callbacks=[SignalsTwice()], signal_grace_s=grace_s)
        with pytest.raises(SystemExit):
            trainer.train()
        assert ended == ([] if grace_s else [signal.SIGTERM])


class SignalsTwice(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
                time.sleep(0.001)
