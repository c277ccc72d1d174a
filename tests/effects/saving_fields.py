"""Checks of the fields about checkpoints."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from trainwright import EarlyStoppingCallback, TrainerCallback
from trainwright.capabilities.lease import lease
from trainwright.capabilities.lease.lease import Lease
from trainwright.errors import ArgumentError

from .bench import Bench, StopAt, checkpoints
from .evaluation_fields import scores
from .table import shows


def saved_at(bench: Bench, **settings: Any) -> list[int]:
    return checkpoints(bench.train(**settings).args.output_dir)


@shows("save_strategy")
def checkpoints_come_by_steps_epochs_best_or_never(bench: Bench) -> None:
    def steps(strategy: str, **settings: Any) -> list[int]:
        return saved_at(bench, save_strategy=strategy, save_steps=5, num_train_epochs=2, **settings)

    assert (steps("steps"), steps("epoch"), steps("no")) == ([5, 10, 12], [6, 12], [])
    by_score = {"metric_for_best_model": "score", "compute_metrics": scores(1, 3, 2)}
    assert steps("best", eval_strategy="steps", eval_steps=4, **by_score) == [4, 8]


@shows("save_steps")
def checkpoints_come_every_so_many_steps(bench: Bench) -> None:
    assert saved_at(bench, save_strategy="steps", save_steps=2) == [2, 4, 6]
    assert saved_at(bench, save_strategy="steps", save_steps=0.5) == [3, 6]


@shows("save_total_limit")
def older_checkpoints_go(bench: Bench) -> None:
    often = {"save_strategy": "steps", "save_steps": 1}
    assert saved_at(bench, **often) == [1, 2, 3, 4, 5, 6]
    assert saved_at(bench, **often, save_total_limit=2) == [5, 6]


@shows("save_only_model")
def nothing_but_the_model_is_saved(bench: Bench) -> None:
    def files(**settings: Any) -> set[str]:
        folder = Path(bench.train(save_strategy="steps", save_steps=6, **settings).args.output_dir) / "checkpoint-6"
        return {path.name for path in folder.iterdir()}

    training = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert {"model.safetensors", *training} <= files()
    assert "model.safetensors" in files(save_only_model=True)
    assert not training & files(save_only_model=True)


@shows("save_on_each_node")
def the_first_process_of_each_node_saves_or_of_all(bench: Bench) -> None:
    each = bench.trainer(save_on_each_node=True)
    one = bench.trainer()
    bench.as_process(rank=2, local_rank=0)
    for trainer, saves in ((each, True), (one, False)):
        assert trainer.args.should_save is saves
        trainer.save_model()
        assert (Path(trainer.args.output_dir) / "model.safetensors").exists() is saves
    bench.as_process(rank=3, local_rank=1)
    assert not each.args.should_save


def mirrored_at(tmp: Path, bench: Bench, **settings: Any) -> tuple[list[int], dict[str, Any]]:
    """The steps of the copies after a run, and the arguments of another one that continues from them."""
    url = (tmp / "mirror").absolute().as_uri()
    bench.train(checkpoint_mirror=url, save_strategy="steps", **{"save_steps": 1} | settings)
    return checkpoints(str(tmp / "mirror")), {"checkpoint_mirror": url}


@shows("checkpoint_mirror", marks="process")
def checkpoints_are_copied_and_an_empty_directory_goes_on_from_them(bench: Bench) -> None:
    steps, mirror = mirrored_at(Path("all"), bench)
    assert steps[-1] == 6
    again = bench.trainer(**mirror, max_steps=8)
    assert checkpoints(again.args.output_dir) == []
    again.train(resume_from_checkpoint="auto")
    assert again.state.global_step == 8
    assert checkpoints(again.args.output_dir)[0] == 6


@shows("mirror_every", marks="process")
def copies_are_further_apart_than_saves(bench: Bench) -> None:
    assert mirrored_at(Path("rarely"), bench, mirror_every="1h")[0] == [1, 6]  # the first one, and the last


@shows("mirror_total_limit", marks="process")
def older_copies_go(bench: Bench) -> None:
    steps, _ = mirrored_at(Path("few"), bench, mirror_total_limit=1)
    assert steps == [6]


@shows("mirror_max_mb_per_s", marks="process")
def copies_are_sent_slowly(bench: Bench) -> None:
    begun = time.monotonic()
    mirrored_at(Path("slow"), bench, save_steps=6, mirror_max_mb_per_s=0.01)  # several kilobytes
    assert time.monotonic() - begun > 0.5


class Signals(TrainerCallback):
    """Sends this process SIGTERM in the second step, as a cluster does that wants its machine back."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@shows("enable_jit_checkpoint")
def a_signal_saves_what_nothing_else_would(bench: Bench) -> None:
    def saved(**settings: Any) -> list[int]:
        trainer = bench.trainer(callbacks=[Signals()], **settings)
        with pytest.raises(SystemExit) as ended:
            trainer.train()
        assert ended.value.code == 128 + signal.SIGTERM
        return checkpoints(trainer.args.output_dir)

    assert saved() == []
    assert saved(enable_jit_checkpoint=True) == [2]


def resumed(bench: Bench, folder: str, **given: Any) -> Any:
    trainer = bench.trainer(output_dir=folder, **given)
    trainer.train(resume_from_checkpoint=True)
    return trainer


@shows("ignore_data_skip")
def the_epoch_starts_again_after_a_resume(bench: Bench) -> None:
    first = bench.train(callbacks=[StopAt(2)])
    whole = bench.train().model.trained
    assert resumed(bench, first.args.output_dir).model.trained == whole[2:]
    first = bench.train(callbacks=[StopAt(2)])
    assert resumed(bench, first.args.output_dir, ignore_data_skip=True).model.trained[:4] == whole[:4]


@shows("restore_callback_states_from_checkpoint")
def callbacks_get_the_settings_of_the_checkpoint(bench: Bench) -> None:
    watched = {"metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2, "log_level": "error"}

    def patience(*, restores: bool) -> int:
        first = bench.train(callbacks=[EarlyStoppingCallback(9), StopAt(2)], **watched)
        callback = EarlyStoppingCallback(7)
        settings = {**watched, "restore_callback_states_from_checkpoint": restores}
        resumed(bench, first.args.output_dir, callbacks=[callback], **settings)
        return callback.early_stopping_patience

    assert patience(restores=False) == 7
    assert patience(restores=True) == 9


@shows("output_dir_wait_s")
def a_run_waits_for_the_directory_of_another(bench: Bench) -> None:
    first = bench.trainer(save_strategy="steps", save_steps=6)
    holder = Lease(first.args.output_dir)
    assert holder.attempt() is None
    with pytest.raises(ArgumentError, match="in use by"):
        first.train()
    bench.monkeypatch.setattr(lease.time, "sleep", lambda seconds: holder.release())
    first.args.output_dir_wait_s = 60.0
    first.train()
    assert checkpoints(first.args.output_dir) == [6]
