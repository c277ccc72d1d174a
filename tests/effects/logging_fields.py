"""Checks of the fields about what is logged, counted and shown."""

from __future__ import annotations

import logging
import math
import sys
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from trainwright import PrinterCallback, ProgressCallback
from trainwright.config import rules
from trainwright.errors import ArgumentError

from .bench import Bench, Toy, llama, logged, seeded, sentences, steps_with
from .table import shows


@shows("logging_strategy")
def losses_are_logged_by_steps_epochs_or_never(bench: Bench) -> None:
    def steps(strategy: str) -> list[int]:
        return steps_with(bench.train(logging_strategy=strategy, logging_steps=4, num_train_epochs=2), "loss")

    assert (steps("steps"), steps("epoch"), steps("no")) == ([4, 8, 12], [6, 12], [])


@shows("logging_steps")
def losses_are_logged_every_so_many_steps(bench: Bench) -> None:
    assert steps_with(bench.train(logging_steps=2), "loss") == [2, 4, 6]
    assert steps_with(bench.train(logging_steps=0.5), "loss") == [3, 6]


@shows("logging_first_step")
def the_first_step_is_logged_too(bench: Bench) -> None:
    assert steps_with(bench.train(logging_steps=4), "loss") == [4]
    assert steps_with(bench.train(logging_steps=4, logging_first_step=True), "loss") == [1, 4]


class LosesOnce(Toy):
    """Has a loss of NaN at its third batch; its gradients stay finite."""

    def forward(self, x: Any, index: Any = None, labels: Any = None) -> dict[str, torch.Tensor]:
        outputs = super().forward(x, index, labels)
        if self.training and len(self.trained) == 3:
            outputs["loss"] = outputs["loss"] + math.nan
        return outputs


@shows("logging_nan_inf_filter")
def a_loss_of_nan_is_left_out_of_the_mean(bench: Bench) -> None:
    def losses(**settings: Any) -> list[float]:
        trainer = bench.train(model=seeded(LosesOnce), logging_steps=6, learning_rate=0.0, **settings)
        return [logged(trainer, "loss")[0], logged(trainer, "train_loss")[0]]

    assert all(math.isfinite(loss) for loss in losses())
    assert all(math.isnan(loss) for loss in losses(logging_nan_inf_filter=False))


def level_of(bench: Bench, **settings: Any) -> int:
    """The level that a trainer with these settings gives to the package's messages."""
    logging.getLogger("trainwright").setLevel(logging.NOTSET)
    bench.trainer(**settings)
    return logging.getLogger("trainwright").level


@shows("log_level")
def messages_are_shown_from_this_level_on(bench: Bench) -> None:
    assert level_of(bench, log_level="error") == logging.ERROR
    assert level_of(bench, log_level="debug") == logging.DEBUG
    no_effect = {"warmup_steps": 1, "lr_scheduler_type": "constant"}
    bench.train(**no_effect, log_level="warning")
    assert "warmup_steps=1 has no effect" in bench.warnings()
    bench.train(**no_effect, log_level="error")
    assert bench.warnings() == ""


@shows("log_level_replica")
def other_processes_have_a_level_of_their_own(bench: Bench) -> None:
    args = bench.args(log_level="debug", log_level_replica="critical")
    assert args.get_process_log_level() == logging.DEBUG
    bench.as_process(rank=1, local_rank=1)
    assert args.get_process_log_level() == logging.CRITICAL
    assert not args.should_log


@shows("log_on_each_node")
def one_process_of_each_node_logs_or_of_all(bench: Bench) -> None:
    bench.as_process(rank=2, local_rank=0)
    each = bench.args(log_level="debug")
    one = bench.args(log_level="debug", log_on_each_node=False)
    assert (each.should_log, each.get_process_log_level()) == (True, logging.DEBUG)
    assert (one.should_log, one.get_process_log_level()) == (False, logging.WARNING)
    bench.as_process(rank=0, local_rank=0)
    assert one.should_log


@shows("include_num_input_tokens_seen")
def input_tokens_are_counted(bench: Bench) -> None:
    def counted(mode: str | bool) -> Any:
        data = {"train_dataset": sentences(4, num_padding=2), "eval_dataset": None}
        return bench.train(model=llama(), **data, include_num_input_tokens_seen=mode)

    for mode, num_tokens in (("all", 6), (True, 6), ("non_padding", 4)):
        trainer = counted(mode)
        assert trainer.state.num_input_tokens_seen == 4 * num_tokens
        assert logged(trainer, "num_input_tokens_seen")[:2] == [2 * num_tokens, 4 * num_tokens]
        assert logged(trainer, "train_tokens_per_second")[-1] > 0
    trainer = counted("no")
    assert trainer.state.num_input_tokens_seen == 0
    assert logged(trainer, "num_input_tokens_seen") == []


@shows("disable_tqdm")
def lines_take_the_place_of_the_bar(bench: Bench) -> None:
    def shown(**settings: Any) -> tuple[set[type], str, str]:
        bench.capsys.readouterr()
        trainer = bench.train(**settings)
        kinds = {type(c) for c in trainer.callback_handler.callbacks} & {PrinterCallback, ProgressCallback}
        return kinds, *bench.capsys.readouterr()

    bench.monkeypatch.setattr("trainwright.callbacks.progress._can_redraw", lambda: True)
    kinds, out, err = shown(disable_tqdm=False)
    assert kinds == {ProgressCallback}
    assert "6/6" in err
    kinds, out, err = shown(disable_tqdm=True)
    assert kinds == {PrinterCallback}
    assert "step=6/6 loss=" in out
    assert "batch     " in out  # the plan is shown as with the bar
    assert "6/6 [" not in out + err


@shows("report_to", marks="framework")  # "all" imports every tracker that is installed
def trackers_are_told(bench: Bench) -> None:
    def kinds(**settings: Any) -> list[str]:
        names = [type(c).__name__ for c in bench.trainer(**settings).callback_handler.callbacks]
        return [name for name in names if name not in ("DefaultFlowCallback", "PrinterCallback")]

    assert kinds() == kinds(report_to="none") == kinds(report_to=[]) == []
    assert kinds(report_to="tensorboard") == ["TensorBoardCallback"]
    assert "TensorBoardCallback" in kinds(report_to="all")
    with pytest.raises(ArgumentError, match=r"report_to='paper' is not a tracker\. Choose of .*tensorboard"):
        kinds(report_to="paper")


def _told_to_trackio(bench: Bench, **settings: Any) -> MagicMock:
    """A stand-in of Trackio's client, after a run with these settings."""
    client = MagicMock()
    client.context_vars.current_space_id.get.return_value = settings.get("trackio_space_id")
    client.context_vars.current_run.get.return_value = None
    bench.monkeypatch.setitem(sys.modules, "trackio", client)
    bench.train(report_to="trackio", **settings)
    assert client.log.called
    return client


def _is_told(bench: Bench, field: str, value: str, name: str) -> None:
    """Trackio opens the run with the value under `name`; without a tracker it has no effect, which is said."""
    assert _told_to_trackio(bench, **{field: value}).init.call_args.kwargs[name] == value
    assert _told_to_trackio(bench).init.call_args.kwargs[name] != value
    assert [message for message in rules.advise(bench.args(**{field: value})) if message.startswith(field)]


@shows("run_name")
def a_run_has_a_name_at_its_tracker(bench: Bench) -> None:
    _is_told(bench, "run_name", "first", "name")


@shows("project")
def a_run_is_filed_under_its_project(bench: Bench) -> None:
    _is_told(bench, "project", "ours", "project")


@shows("trackio_space_id")
def trackio_shows_the_run_in_a_space(bench: Bench) -> None:
    _is_told(bench, "trackio_space_id", "me/space", "space_id")


@shows("trackio_bucket_id")
def trackio_stores_the_run_in_a_bucket(bench: Bench) -> None:
    _is_told(bench, "trackio_bucket_id", "me/bucket", "bucket_id")


@shows("trackio_static_space_id")
def trackio_publishes_the_run_at_its_end(bench: Bench) -> None:
    where: dict[str, Any] = {"trackio_space_id": "me/space"}
    published = _told_to_trackio(bench, **where, trackio_static_space_id="me/static").freeze.call_args.kwargs
    assert published["new_space_id"] == "me/static"
    assert not _told_to_trackio(bench, **where, trackio_static_space_id=False).freeze.called
