"""The laws of evaluation beside training: the numbers, the choice and the weights are those of a run that waits."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from trainwright import TrainerCallback
from trainwright.capabilities.async_evaluation import capability, evaluators
from trainwright.capabilities.async_evaluation.extension import AsyncEvaluation
from trainwright.capabilities.async_evaluation.requests import EVALUATE, SIGNS, EvaluationRequest, Requests, Result
from trainwright.capabilities.async_evaluation.watcher import Watcher
from trainwright.capabilities.mirror.remote import RemoteStore
from trainwright.errors import ArgumentError, CheckpointError, ProcessFailedError
from trainwright.journal.record import read
from trainwright.loop.extension import EVENTS

from ..._support.engines import needs
from ..._support.listeners import find_listeners
from ..._support.two_processes import launch
from ..._support.two_processes import run as run_ranks
from ...cli.commands import SMALL, call
from ...contract import doubles
from ...parity import data, models
from ..averages.average_runs import ON_CPU
from .async_evaluations import (
    EVERY,
    STEPS,
    GatedErrors,
    Held,
    errors,
    evaluations,
    make,
    noisy,
    stops_early,
    timeless,
    until,
)


def children(others: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Returns the children of this process without those that there were before, of tests before this one."""
    return [child for child in psutil.Process().children() if child not in others]


@pytest.fixture
def others() -> list[psutil.Process]:
    return children()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Returns what evaluates in the place of the child process."""
    one = Held()
    monkeypatch.setattr(capability, "evaluation_process", one.instead_of)
    return one


def run(folder: Path, held: Held, *, resume: Any = None, **settings: Any) -> tuple[Any, Any]:
    callbacks = [held, *settings.pop("callbacks", ())]
    trainer, heard = make(folder, **{"eval_async": True, **settings}, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, heard


def blocking(folder: Path, **settings: Any) -> tuple[Any, Any]:
    trainer, heard = make(folder, **settings)
    trainer.train()
    return trainer, heard


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoint-*")}


# -- with a child process ---------------------------------------------------------------------------------------------


@pytest.mark.process
def test_run_with_child_process_has_numbers_and_the_choice_of_blocking_one(
    tmp_path: Path, others: list[psutil.Process]
) -> None:
    """A collator that draws, two sets, an average of the weights: bit by bit, with the step of each in the journal."""
    settings = {
        "eval_dataset": {"one": doubles.samples(10), "two": doubles.samples(7)},
        "average": "ema",
        "metric_for_best_model": "two_mae",
        "save_total_limit": 1,
    }
    plain, before = blocking(tmp_path / "plain", data_collator=noisy, **settings)
    trainer, heard = make(tmp_path / "beside", data_collator=noisy, eval_async=True, **settings)
    trainer.train()
    assert evaluations(trainer) == evaluations(plain)
    assert [(step, values) for step, _, values in heard.evaluations] == [
        (step, values) for step, _, values in before.evaluations
    ]
    assert trainer.state.best_metric == plain.state.best_metric
    assert trainer.state.best_global_step == plain.state.best_global_step
    assert doubles.same(doubles.weights(plain), doubles.weights(trainer))
    assert trainer.state.log_history[-1]["step"] == STEPS
    assert "train_loss" in trainer.state.log_history[-1]
    assert names(tmp_path / "beside") == names(tmp_path / "plain")
    journals = [read(folder).values for folder in (tmp_path / "beside", tmp_path / "plain")]
    metrics = [name for name in journals[1] if name.startswith("eval_") and name == next(iter(timeless({name: 0})), "")]
    assert metrics
    assert all(journals[0][name] == journals[1][name] for name in metrics)
    assert not list((tmp_path / "beside" / "_evaluations").rglob("*.safetensors")), "weights are deleted"
    assert not children(others), "the process has ended"


SPEAKER = """
import json, os, sys
folder, dies = sys.argv[1:]
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    name = line.strip()
    mark = os.path.join(folder, "died")
    if dies == "dies" and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), 9)
    with open(os.path.join(folder, "_evaluations", name, "result.json"), "w") as file:
        file.write(json.dumps({"events": [], "metrics": {"step": name}}))
    print(json.dumps({"done": name}), flush=True)
"""


def speaker(folder: Path, *, dies: bool = False, command: str = sys.executable) -> evaluators.EvaluationProcess:
    """Returns a process that speaks as the one that evaluates, and starts in a moment."""
    (folder / "scratch").mkdir()
    words = [command, "-c", SPEAKER, str(folder), "dies" if dies else "lives"]
    return evaluators.EvaluationProcess(words, os.environ, scratch=folder / "scratch", requests=Requests(folder))


def asked(process: evaluators.EvaluationProcess, folder: Path, step: int) -> list[tuple[str, Result]]:
    request = EvaluationRequest(name=f"step-{step}", step=step, epoch=0.0, max_steps=8)
    Requests(folder).begin(request.name)
    process.submit(request)
    until(lambda: process.num_open == 0)
    process.wait(60)
    return process.take()


@pytest.mark.process
@pytest.mark.parametrize("dies", [False, True], ids=["while it waits", "while it evaluates"])
def test_a_process_that_dies_is_replaced(
    dies: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, others: list[psutil.Process]
) -> None:
    process = speaker(tmp_path, dies=dies)
    process.start()
    try:
        assert process.find_problem(60) == ""
        if not dies:
            (child,) = children(others)
            child.kill()
            until(lambda: child.status() == psutil.STATUS_ZOMBIE)
        assert asked(process, tmp_path, 2) == [("step-2", Result(metrics={"step": "step-2"}))]
        assert asked(process, tmp_path, 4) == [("step-4", Result(metrics={"step": "step-4"}))]
    finally:
        process.stop()
    assert ["SIGKILL" in message for message in caplog.messages] == [True]
    assert not children(others)
    assert not (tmp_path / "scratch").exists()


@pytest.mark.process
def test_a_process_that_cannot_be_started_is_a_problem_that_is_named(tmp_path: Path) -> None:
    process = speaker(tmp_path, command=str(tmp_path / "nothing"))
    process.start()
    try:
        assert "cannot be started" in str(process.find_problem(60))
        ((_, result),) = asked(process, tmp_path, 2)
        assert "cannot be started" in result.missing
    finally:
        process.stop()


@pytest.mark.slow  # a new interpreter for each process
@pytest.mark.process
@pytest.mark.parametrize("deaths", [1, 2])
def test_process_that_is_killed_is_told_and_its_evaluation_is_made_again(
    deaths: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text(str(os.getpid()))
    plain, _ = blocking(tmp_path / "plain")
    trainer, _ = make(tmp_path / "beside", eval_async=True, compute_metrics=GatedErrors(tmp_path, deaths=deaths))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    lost = [record.message for record in caplog.records if "was lost" in record.message]
    assert len(lost) == deaths
    assert "The evaluation of step 2 was lost: its process ended with SIGKILL, and is made again in a new one." in lost
    expected = evaluations(plain)
    if deaths == 2:
        assert "Step 2 has no evaluation: its process ended with SIGKILL, 2 times." in caplog.messages
        expected = [one for one in expected if one["step"] != EVERY]
    assert evaluations(trainer) == expected
    assert doubles.same(doubles.weights(plain), doubles.weights(trainer))


def refuse(*args: Any) -> Any:
    raise ValueError("no metric today")


@pytest.mark.slow  # a new interpreter
@pytest.mark.process
def test_an_error_of_an_evaluation_ends_the_run_with_its_traceback(
    tmp_path: Path, others: list[psutil.Process]
) -> None:
    (tmp_path / "run").write_text(str(os.getpid()))
    trainer, _ = make(tmp_path, eval_async=True, metric_for_best_model=None, load_best_model_at_end=False)
    trainer.compute_metrics = refuse
    with pytest.raises(ProcessFailedError, match=r"(?s)The evaluation of step 2 failed.*no metric today"):
        trainer.train()
    assert not children(others)


def test_part_that_cannot_be_handed_over_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer, heard = make(tmp_path, eval_async=True)
    trainer.compute_metrics = GatedErrors(tmp_path)
    trainer.compute_metrics.lock = threading.Lock()
    with pytest.raises(ArgumentError, match=r"its compute_metrics cannot be pickled.*eval_async=False"):
        trainer.train()
    assert heard.trained == 0


def test_without_cloudpickle_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    trainer, _ = make(tmp_path, eval_async=True, compute_metrics=lambda prediction: errors(prediction))
    with pytest.raises(ArgumentError, match=r"its compute_metrics cannot be pickled.*pip install cloudpickle"):
        trainer.train()


@pytest.mark.slow  # a new interpreter
@pytest.mark.process
def test_a_process_that_cannot_begin_refuses_the_run(tmp_path: Path, others: list[psutil.Process]) -> None:
    trainer, heard = make(tmp_path, eval_async=True, eval_device="cuda:99")
    with pytest.raises(ArgumentError, match="could not begin: eval_device='cuda:99' is not there"):
        trainer.train()
    assert heard.trained == 0
    assert not children(others)


# -- with other models ------------------------------------------------------------------------------------------------


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    return models.seeded(lambda: get_peft_model(models.llama(0.1), config))


class Normalised(doubles.Regressor):
    """Has buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(doubles.FEATURES, 8), torch.nn.BatchNorm1d(8))


KINDS: dict[str, tuple[Callable[[], Any], Callable[[int], Any], dict[str, Any]]] = {
    "tied weights": (lambda: models.seeded(lambda: models.gpt2(0.1)), data.sequences, {}),
    "an adapter": (adapted, data.sequences, {}),
    "a classifier in bf16": (lambda: models.seeded(lambda: models.bert(0.1)), data.texts, {"bf16": True}),
    "full bf16 evaluation, which training ignores": (
        lambda: models.seeded(lambda: models.bert(0.1)),
        data.texts,
        {"bf16_full_eval": True},
    ),
    "a loss without logits": (
        lambda: models.seeded(lambda: models.llama(0.1)),
        data.sequences,
        {"loss_kernel": "chunked"},
    ),
    "buffers": (lambda: doubles.model(Normalised), doubles.samples, {}),
    "pytorch files": (lambda: models.seeded(lambda: models.bert(0.1)), data.texts, {"save_safetensors": False}),
}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # which peft reads
@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_all_kinds_are_evaluated_to_the_bit(kind: str, held: Held, tmp_path: Path) -> None:
    model, rows, settings = KINDS[kind]
    parts: dict[str, Any] = {"eval_dataset": rows(10), "train_dataset": rows(32), "compute_metrics": None}
    settings = {"metric_for_best_model": "loss", "max_steps": 4, **settings}
    plain, _ = blocking(tmp_path / "plain", model=model(), **parts, **settings)
    trainer, _ = run(tmp_path / "beside", held, model=model(), **parts, **settings)
    assert len(evaluations(plain)) == 2
    assert evaluations(trainer) == evaluations(plain)
    assert doubles.same(doubles.weights(plain), doubles.weights(trainer))


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 0.1 + 0.2, np.float32(0.1), np.float64(1 / 3), torch.tensor(0.7)]
)
def test_a_result_keeps_its_numbers_to_the_bit(value: Any, tmp_path: Path) -> None:
    Result(events=((EVALUATE, {"eval_a": value}),), metrics={"eval_a": value, "all": np.arange(3)}).write(tmp_path)
    found = Result.read(tmp_path)
    assert found is not None
    assert found.metrics["all"] == [0, 1, 2]
    for number in (found.metrics["eval_a"], found.events[0][1]["eval_a"]):
        assert number == float(value) or (math.isnan(number) and math.isnan(value))


# -- when the run hears of it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_result_is_heard_after_the_step_during_which_it_came(delay: int, held: Held, tmp_path: Path) -> None:
    held.delay = delay
    plain, _ = blocking(tmp_path / "plain")
    trainer, heard = run(tmp_path / "beside", held)
    assert evaluations(trainer) == evaluations(plain)
    expected = [(step, min(step + delay, STEPS)) for step in range(EVERY, STEPS + 1, EVERY)]
    assert [(step, trained) for step, trained, _ in heard.evaluations] == expected
    assert doubles.same(doubles.weights(plain), doubles.weights(trainer))
    assert held.is_stopped


def test_training_is_to_the_bit_that_of_a_run_without_evaluation(held: Held, tmp_path: Path) -> None:
    class States(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[torch.Tensor] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append(torch.get_rng_state())

    without = States()
    beside = States()
    settings = {"data_collator": noisy, "load_best_model_at_end": False}
    plain, _ = blocking(tmp_path / "plain", eval_strategy="no", callbacks=[without], **settings)
    trainer, _ = run(tmp_path / "beside", held, callbacks=[beside], **settings)
    assert doubles.same(doubles.weights(plain), doubles.weights(trainer))
    assert all(torch.equal(one, other) for one, other in zip(without.seen, beside.seen, strict=True))


@pytest.mark.parametrize("delay", [1, 4])
def test_early_stopping_comes_as_late_as_the_result_and_chooses_the_same(
    delay: int, held: Held, tmp_path: Path
) -> None:
    held.delay = delay
    plain, _ = blocking(tmp_path / "plain", callbacks=[stops_early()])
    trainer, heard = run(tmp_path / "beside", held, callbacks=[stops_early()])
    assert plain.state.global_step == 2 * EVERY
    assert trainer.state.global_step == 2 * EVERY + delay
    assert [step for step, *_ in heard.evaluations] == [EVERY, 2 * EVERY]
    assert evaluations(trainer) == evaluations(plain), "those of later steps are left out"
    assert trainer.state.best_global_step == plain.state.best_global_step
    assert doubles.same(doubles.weights(plain), doubles.weights(trainer)), "the best checkpoint is loaded"
    assert f"checkpoint-{trainer.state.global_step}" in names(tmp_path / "beside"), "nothing trained is lost"


def test_flags_that_were_set_stay_set_when_a_result_is_told(held: Held, tmp_path: Path) -> None:
    class Asks(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_log = control.should_save = True

    trainer, _ = run(tmp_path, held, callbacks=[Asks()], logging_steps=100, load_best_model_at_end=False)
    assert [one["step"] for one in trainer.state.log_history if "loss" in one] == list(range(1, STEPS + 1))
    assert len(names(tmp_path)) == STEPS


@pytest.mark.parametrize("queue", ["wait", "skip"])
def test_a_full_queue_waits_or_skips(queue: str, held: Held, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held.delay = 6
    with caplog.at_level(logging.WARNING):
        trainer, heard = run(tmp_path, held, eval_queue=queue, max_steps=16, save_steps=16, **NO_BEST)
    assert held.most_open == 2
    evaluated = [one["step"] for one in evaluations(trainer)]
    left_out = [message for message in caplog.messages if "is skipped" in message]
    if queue == "wait":
        assert evaluated == list(range(EVERY, 17, EVERY))
        assert not left_out
    else:
        assert len(evaluated) + len(left_out) == 16 // EVERY
        assert left_out
        assert evaluated[-1] == 16, "the last one is never skipped"
        assert "2 evaluations are under way (eval_queue='skip')" in left_out[0]
    assert [step for step, *_ in heard.evaluations] == evaluated


NO_BEST = {"load_best_model_at_end": False, "metric_for_best_model": None}


def test_the_checkpoint_of_an_open_evaluation_is_not_deleted(held: Held, tmp_path: Path) -> None:
    """The first one is the best, and is known to be so when three others were saved after it."""
    held.delay = 4
    seen: list[set[str]] = []

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(names(tmp_path))

    settings = {"greater_is_better": True, "save_total_limit": 2, "save_async": False}
    trainer, _ = run(tmp_path, held, callbacks=[Looks()], max_steps=12, **settings)
    assert trainer.state.best_global_step == EVERY
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{EVERY}")
    assert all(f"checkpoint-{EVERY}" in found for found in seen[EVERY:])
    assert {"checkpoint-4", "checkpoint-6", "checkpoint-8"} <= set().union(*seen)
    assert names(tmp_path) == {f"checkpoint-{EVERY}", "checkpoint-12"}, "those kept for an evaluation are gone"


@pytest.mark.process
@pytest.mark.parametrize("delay", [4, 100])
def test_the_copy_of_an_open_evaluation_is_not_deleted(held: Held, tmp_path: Path, delay: int) -> None:
    """The first one is the best, and is known to be so when others were copied after it, or all of them."""
    held.delay = delay
    url = (tmp_path / "store").as_uri()
    copies = {"checkpoint_mirror": url, "mirror_total_limit": 2}
    settings = {"greater_is_better": True, "save_total_limit": 2, "save_async": False, **copies}
    trainer, _ = run(tmp_path / "run", held, max_steps=12, **settings)
    assert trainer.state.best_global_step == EVERY
    found = {one.step for one in RemoteStore(url).manifests()}
    assert {EVERY, 12} <= found
    assert names(tmp_path / "run") == {f"checkpoint-{EVERY}", "checkpoint-12"}


def test_an_evaluation_that_is_lost_is_told_and_the_run_goes_on(
    held: Held, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held.lost = {4}
    with caplog.at_level(logging.ERROR):
        trainer, _ = run(tmp_path, held)
    assert [one["step"] for one in evaluations(trainer)] == [2, 6, 8]
    assert "Step 4 has no evaluation: it was lost." in caplog.messages
    assert "Step 4 has no evaluation: it was lost." in [one["text"] for one in read(tmp_path).of("warning")]


def test_weights_that_cannot_be_written_are_told_and_the_run_goes_on(
    held: Held, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = make(tmp_path, eval_async=True, callbacks=[held])
    plain = trainer._save

    def save(output_dir: str, **how: Any) -> None:
        plain(output_dir, **how)
        if "step-4-" in output_dir:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "_save", save)
    with caplog.at_level(logging.ERROR):
        trainer.train()
    assert [one["step"] for one in evaluations(trainer)] == [2, 6, 8]
    assert "Step 4 is not evaluated: its weights cannot be written" in caplog.text
    assert not list((tmp_path / "_evaluations").glob("step-4-*"))


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_there", [True, False], ids=["heard before the end", "still open at the end"])
def test_a_resume_makes_up_what_was_open_in_its_checkpoint(is_there: bool, held: Held, tmp_path: Path) -> None:
    plain, _ = blocking(tmp_path / "plain")

    class Breaks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise KeyError("the machine")

    held.delay = 1 if is_there else 100
    held.never = not is_there
    with pytest.raises(KeyError, match="the machine"):
        run(tmp_path / "beside", held, callbacks=[Breaks()], save_async=False)
    again = Held()
    capability.evaluation_process = again.instead_of  # put back by the fixture
    trainer, heard = run(tmp_path / "beside", again, resume=str(tmp_path / "beside" / "checkpoint-4"))
    assert evaluations(trainer) == evaluations(plain)
    assert heard.evaluations[-1][0] == STEPS
    assert trainer.state.best_global_step == plain.state.best_global_step
    assert doubles.same(doubles.weights(plain), doubles.weights(trainer))
    values = read(tmp_path / "beside").values["eval_mae"]
    assert values == read(tmp_path / "plain").values["eval_mae"]


class SignalledWait(Held):
    """Gives no result, and a signal comes while the run waits for one."""

    def wait(self, seconds: float) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_signal_while_a_full_queue_is_waited_for_loses_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for name, first in (("whole", None), ("signalled", SignalledWait(delay=100))):
        if first is not None:
            monkeypatch.setattr(capability, "evaluation_process", first.instead_of)
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path / name, first)
        held = Held()
        monkeypatch.setattr(capability, "evaluation_process", held.instead_of)
        runs.append(run(tmp_path / name, held, resume=first is not None)[0])
    whole, signalled = runs
    assert losses(signalled) == losses(whole)
    assert evaluations(signalled) == evaluations(whole)
    assert doubles.same(doubles.weights(signalled), doubles.weights(whole))


def losses(trainer: Any) -> list[tuple[int, float]]:
    return [(log["step"], log["loss"]) for log in trainer.state.log_history if "loss" in log]


def test_a_fresh_run_deletes_the_requests_of_a_run_before(held: Held, tmp_path: Path) -> None:
    left = Requests(tmp_path)
    left.open(is_fresh=True)
    left.begin("step-2-0badcafe")
    run(tmp_path, held, max_steps=2)
    assert not left.place("step-2-0badcafe").exists()


def test_a_time_limit_does_not_wait_for_evaluations(held: Held, tmp_path: Path) -> None:
    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                control.should_training_stop = True

    held.never = True
    trainer, heard = run(tmp_path, held, callbacks=[Ends()], max_train_time="1h", **NO_BEST)
    assert trainer.state.global_step == 4
    assert heard.evaluations == []
    again = Held()
    capability.evaluation_process = again.instead_of  # put back by the fixture
    resumed, _ = run(tmp_path, again, resume=True, **NO_BEST)
    assert [one["step"] for one in evaluations(resumed)] == [2, 4, 6, 8]


SCRIPT = Path(__file__).with_name("async_evaluation_script.py")
ROOTS = [Path(__file__).parents[3] / "src", Path(__file__).parents[3]]
ZERO = ["zero 1", "zero 2", "zero 3"]


@pytest.mark.slow  # new interpreters
@pytest.mark.process
@pytest.mark.timeout(300)
def test_run_that_is_killed_leaves_no_process_and_resume_makes_evaluation_up(tmp_path: Path) -> None:
    """Its child hangs in the first evaluation, so that it is open in every checkpoint."""
    plain, _ = blocking(tmp_path / "plain")
    victim = launch(SCRIPT, str(tmp_path), "hang", folder=tmp_path, launcher=())
    try:
        until(lambda: (tmp_path / "child").exists() and (tmp_path / "beside" / "checkpoint-4").exists(), 120)
        child = int((tmp_path / "child").read_text())
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    finally:
        victim.kill()
        victim.communicate()
    told = run_ranks(SCRIPT, str(tmp_path), "resume", folder=tmp_path, processes=1, timeout_s=120).told[0]
    assert told["evaluations"] == evaluations(plain)
    assert told["best"] == plain.state.best_global_step


@pytest.mark.slow  # two processes, and a child
@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["ddp", "fsdp", *(pytest.param(zero, marks=needs("deepspeed")) for zero in ZERO)])
def test_several_processes_hear_of_a_result_after_the_same_step(backend: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"folder": tmp_path, "environment": ON_CPU}
    told = run_ranks(SCRIPT, str(tmp_path), backend, timeout_s=250, **how).told
    assert told[0]["heard"] == told[1]["heard"]
    assert told[0]["weights"] == told[0]["weights of a blocking run"]
    assert told[0]["weights"] == told[0]["weights of a run without evaluation"]
    assert told[0]["best"] == told[0]["best of a blocking run"]
    one = told[0]["evaluations"]
    other = told[0]["evaluations of a blocking run"]
    assert [entry["step"] for entry in one] == [entry["step"] for entry in other] == [2, 4, 6, 8]
    alone = run_ranks(SCRIPT, str(tmp_path), "alone", processes=1, timeout_s=120, **how).told[0]["metrics"]
    for name in ("eval_loss", "eval_mae"):
        found = [entry[name] for entry in one]
        assert found == [metrics[name] for metrics in alone], "to the bit those of one process with the same weights"
        assert found == pytest.approx([entry[name] for entry in other], rel=1e-5), "of two: batches of other sizes"


@needs("deepspeed")
@pytest.mark.slow  # DeepSpeed
@pytest.mark.process
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("zero 1 in bf16", "DeepSpeed keeps them in its optimizer in bf16 and fp16; train in fp32"),
        ("zero 3 in bf16", "ZeRO stage 3 has them in partitions"),
        ("zero 3", "partitioned already, so it cannot be copied into another process"),
    ],
)
def test_zero_that_another_process_cannot_repeat_is_refused(backend: str, reason: str, tmp_path: Path) -> None:
    told = run_ranks(
        SCRIPT, str(tmp_path), f"refused {backend}", folder=tmp_path, processes=1, timeout_s=150, environment=ON_CPU
    ).told[0]
    assert reason in told["reason"]
    assert told["trained"] == 0


# -- what is refused, and a run without it ----------------------------------------------------------------------------


def test_a_schedule_of_ones_own_that_follows_a_metric_is_refused(held: Held, tmp_path: Path) -> None:
    model = doubles.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    trainer, heard = make(tmp_path, eval_async=True, model=model)
    trainer.optimizer = optimizer
    trainer.lr_scheduler = schedule
    with pytest.raises(ArgumentError, match="the learning rate follows the metric of an evaluation"):
        trainer.train()
    assert heard.trained == 0
    assert held.is_stopped


@pytest.mark.parametrize("settings", [{}, {"eval_async": True, "eval_strategy": "no"}], ids=["off", "no evaluation"])
def test_run_without_it_has_the_table_of_extensions_that_it_had_before(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    tables: dict[str, tuple[Any, ...]] = {}
    found: list[str] = []
    trainer, _ = make(tmp_path, **settings, **({"load_best_model_at_end": False} if settings else {}))

    class Looks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            extensions = trainer._trainwright.run.extensions
            found[:] = [one.name for one in extensions]
            tables.update({event: find_listeners(extensions, event) for event in EVENTS})

    trainer.add_callback(Looks())
    trainer.train()
    assert found == ["lease", "recorded_metrics", "checkpoint_items", "quarantine", "guard", "incidents"]
    assert tables["after_step"] == tables["keeps"] == tables["trained"] == ()


# -- another machine --------------------------------------------------------------------------------------------------


def evaluate_folder(folder: Path) -> dict[str, float]:
    from safetensors.torch import load_file

    model = doubles.model()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    rows = doubles.samples(10)
    with torch.no_grad():
        guesses = model(torch.stack([row["x"] for row in rows]))["logits"]
    return {"mae": float(abs(guesses - torch.tensor([row["labels"] for row in rows])).mean())}


def test_a_watcher_makes_the_evaluations_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.capabilities.async_evaluation.watcher.LOOKS_EVERY_S", 0.01)
    monkeypatch.setattr("trainwright.capabilities.async_evaluation.evaluators.LOOKS_EVERY_S", 0.01)
    plain, _ = blocking(tmp_path / "plain")
    made: list[int] = []
    watcher = Watcher(tmp_path / "beside", evaluate_folder)
    thread = threading.Thread(target=lambda: watcher.watch(lambda request, _: made.append(request.step)))
    thread.start()
    trainer, heard = make(tmp_path / "beside", eval_async="watch")

    class Waits(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                requests = Requests(tmp_path / "beside")
                until(lambda: bool(list(requests.folder.glob(SIGNS))))

    trainer.add_callback(Waits())
    trainer.train()
    thread.join(timeout=60)
    assert not thread.is_alive(), "it ends with the run"
    assert made == [2, 4, 6, 8]
    assert [one["eval_mae"] for one in evaluations(trainer)] == pytest.approx(
        [one["eval_mae"] for one in evaluations(plain)], rel=1e-5
    )
    assert [step for step, *_ in heard.evaluations] == made
    assert trainer.state.best_global_step == plain.state.best_global_step
    assert doubles.same(doubles.weights(plain), doubles.weights(trainer))


def test_a_run_that_nobody_watches_leaves_evaluations_out_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluators, "WATCHER_GONE_S", 0.0)
    with caplog.at_level(logging.WARNING):
        trainer, _ = make(tmp_path, eval_async="watch", load_best_model_at_end=False)
        trainer.train()
    assert trainer.state.global_step == STEPS
    assert evaluations(trainer) == []
    text = "\n".join(caplog.messages)
    assert "step 6 is skipped: 2 evaluations are under way, and no process watches the run" in text
    assert "The run ends before the evaluation of step 2, 4 is there." in text


CLAIMS: dict[str, Callable[[Path], object]] = {
    "a watcher's": lambda path: path.write_text(json.dumps({"watcher": "gone"})),
    "a name that leads out": lambda path: path.write_text(json.dumps({"watcher": "../../x"})),
    "a pipe": os.mkfifo,
    "a link": lambda path: path.symlink_to("/dev/zero"),
    "a directory": Path.mkdir,
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.timeout(60)
def test_the_claim_of_a_watcher_that_is_gone_is_taken_over(
    claim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwright.capabilities.async_evaluation.watcher.LOOKS_EVERY_S", 0.001)
    requests = Requests(tmp_path)
    requests.open(is_fresh=True)
    request = EvaluationRequest(name=requests.new_name(2), step=2, epoch=0.5, max_steps=8)
    requests.begin(request.name)
    (requests.place(request.name) / "eval").mkdir()
    requests.submit(request)
    CLAIMS[claim](requests.place(request.name) / "claim.json")
    now = iter(range(0, 10_000, 20))  # seconds
    watcher = Watcher(tmp_path, lambda folder: {"mae": 1.0}, clock=lambda: float(next(now)))
    assert watcher.watch(lambda *_: requests.close()) == 1
    result = Result.read(requests.place(request.name))
    assert result is not None
    assert result.metrics == {"eval_mae": 1.0, "epoch": 0.5}


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"events": [["delete", {}]], "metrics": {}}', '{"events": 3, "metrics": {}}']
)
def test_a_result_that_is_none_is_told_and_never_believed(content: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(ValueError):  # noqa: PT011 -- of JSON, or ours
        Result.read(tmp_path)


@pytest.mark.parametrize("values", [{}, {"name": "../../x"}, {"name": "a", "step": "2"}])
def test_a_request_that_is_none_is_not_read(values: dict[str, Any], tmp_path: Path) -> None:
    whole = EvaluationRequest(name="step-1-a", step=1, epoch=0.5, max_steps=2).to_dict()
    with pytest.raises(ValueError, match="not a request for an evaluation"):
        EvaluationRequest.from_dict({**whole, **values} if values else {})


@pytest.mark.slow  # two commands and a model of transformers
@pytest.mark.process
def test_the_command_line_watches_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [
        "text,label",
        *(f"{'red' if n % 2 else 'blue'} one {n % 5},{'odd' if n % 2 else 'even'}" for n in range(64)),
    ]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    (tmp_path / "held.csv").write_text("\n".join(lines[:17]))
    recipe = SMALL.replace("  eval_share: 0.25\n", "  eval: held.csv\n")
    (tmp_path / "plain.yaml").write_text(recipe.replace("output_dir: run", "output_dir: plain"))
    (tmp_path / "beside.yaml").write_text(
        f"{recipe}  eval_async: watch\n  max_steps: 8\n".replace("  max_steps: 8\n", "", 1)
    )
    assert call("train", "plain.yaml").exit_code == 0
    command = [sys.executable, "-m", "trainwright", "eval", "run", "--data", "held.csv", "--watch", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        assert call("train", "beside.yaml").exit_code == 0
        out, _ = watcher.communicate(timeout=120)
    finally:
        if watcher.poll() is None:
            os.killpg(watcher.pid, signal.SIGKILL)
            watcher.wait()
    told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [one["step"] for one in told] == [4, 8]
    plain = read(tmp_path / "plain").values
    beside = read(tmp_path / "run").values
    for name in ("eval_loss", "eval_accuracy"):
        assert beside[name] == plain[name]


# -- processes that hold pipes, hang or do not answer ------------------------------------------------------------------

HOLDER = """
import json, os, subprocess, sys, time
folder, kind = sys.argv[1:]

def hold():
    if (child := os.fork()) == 0:
        time.sleep(1000)
        os._exit(0)
    open(os.path.join(folder, f"holder-{child}"), "w").close()

if kind == "never ready":
    hold()
    time.sleep(1000)
if kind == "ends at once":
    hold()
    os._exit(3)
if kind == "half a line":
    hold()
    os.write(1, b'{"rea')
    os._exit(3)
os.write(1, json.dumps({"ready": True}).encode() + b"\\n")
for line in sys.stdin:
    hold()
    if kind == "dies":
        os.kill(os.getpid(), 9)
    if kind == "answers at its end":
        os.write(1, json.dumps({"failed": "x" * 500_000}).encode() + b"\\n")
        os._exit(0)
    time.sleep(1000)
"""


def holder(folder: Path, kind: str) -> evaluators.EvaluationProcess:
    """Returns a process with a child that holds its pipes."""
    (folder / "scratch").mkdir()
    words = [sys.executable, "-c", HOLDER, str(folder), kind]
    return evaluators.EvaluationProcess(words, os.environ, scratch=folder / "scratch", requests=Requests(folder))


def held_pids(folder: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob("holder-*")]


def is_gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.process
@pytest.mark.parametrize("kind", ["ends at once", "half a line"])
def test_end_of_process_that_starts_is_seen_although_child_holds_its_pipes(kind: str, tmp_path: Path) -> None:
    process = holder(tmp_path, kind)
    process.start()
    try:
        assert "exit code 3 when it was started" in str(process.find_problem(60))
        until(lambda: all(map(is_gone, held_pids(tmp_path))))
        assert len(held_pids(tmp_path)) == 1
    finally:
        process.stop()


@pytest.mark.process
def test_end_of_process_that_evaluates_is_seen_although_child_holds_its_pipes(tmp_path: Path) -> None:
    process = holder(tmp_path, "dies")
    process.start()
    try:
        assert process.find_problem(60) == ""
        [(_, result)] = asked(process, tmp_path, 2)
        assert "SIGKILL, 2 times" in result.missing
        until(lambda: all(map(is_gone, held_pids(tmp_path))))
        assert len(held_pids(tmp_path)) == 2, "one of each attempt"
    finally:
        process.stop()


@pytest.mark.process
def test_what_a_process_answers_before_its_end_is_read_to_its_end(tmp_path: Path) -> None:
    process = holder(tmp_path, "answers at its end")
    process.start()
    try:
        [(_, result)] = asked(process, tmp_path, 2)
        assert result.error == "x" * 500_000
    finally:
        process.stop()


@pytest.mark.process
@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "SIGSTOP"])
@pytest.mark.parametrize("kind", ["never ready", "never done"])
def test_the_end_of_a_run_ends_the_process_and_its_children(kind: str, is_stopped: bool, tmp_path: Path) -> None:
    process = holder(tmp_path, kind)
    process.start()
    if kind == "never done":
        process.submit(EvaluationRequest(name="step-2", step=2, epoch=0.0, max_steps=8))
    until(lambda: held_pids(tmp_path) != [])
    [held_pid] = held_pids(tmp_path)
    if is_stopped:
        os.kill(os.getpgid(held_pid), signal.SIGSTOP)
    if kind == "never ready":
        assert process.find_problem(0.01) is None, "it is asked again, after a look at signals"
    ends = threading.Thread(target=process.stop, daemon=True)
    ends.start()
    ends.join(60)
    assert not ends.is_alive()
    until(lambda: is_gone(held_pid))
    assert not (tmp_path / "scratch").exists()


@pytest.mark.process
def test_a_process_that_never_starts_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluators, "START_LIMIT_S", 0.5)
    process = holder(tmp_path, "never ready")
    process.start()
    try:
        assert "has not read the trainer after 0.5 s" in str(process.find_problem(60))
    finally:
        process.stop()
    until(lambda: all(map(is_gone, held_pids(tmp_path))))


@pytest.mark.process
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), RuntimeError("odd")], ids=repr)
def test_what_ends_the_thread_is_told(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = speaker(tmp_path)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(process, "_begin", fails)
        process.start()
        assert type(error).__name__ in str(process.find_problem(60))
    monkeypatch.setattr(process, "_evaluated", fails)
    try:
        for step in (2, 4):
            [(_, result)] = asked(process, tmp_path, step)
            assert type(error).__name__ in result.missing
    finally:
        process.stop()


WHOLE = [
    {"dataloader_num_workers": 1},
    {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
]


@contextlib.contextmanager
def victim(folder: Path, mode: str, **settings: Any) -> Iterator[subprocess.Popen[Any]]:
    """Starts a run of `async_evaluation_script.py`; in the end all that it started is gone."""
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": os.pathsep.join(map(str, ROOTS))}
    (folder / "tmp").mkdir(exist_ok=True)
    with (folder / "log").open("ab") as log:
        one = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), mode, json.dumps(settings)],
            env=environment,
            cwd=ROOTS[1],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    started: dict[int, psutil.Process] = {}

    def look() -> None:
        with contextlib.suppress(psutil.Error):
            started.update({child.pid: child for child in psutil.Process(one.pid).children(recursive=True)})

    one.look = look  # type: ignore[attr-defined]
    one.started = started  # type: ignore[attr-defined]
    try:
        yield one
    finally:
        look()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        for child in started.values():
            with contextlib.suppress(psutil.Error):
                child.kill()
        one.wait(30)


def scratch_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "tmp").glob("trainwright-evaluation-*"))


def nothing_left(one: Any, folder: Path) -> bool:
    return all(is_gone(pid) for pid in one.started) and scratch_of(folder) == []


@pytest.mark.slow  # new interpreters
@pytest.mark.process
@pytest.mark.timeout(200)
@pytest.mark.parametrize("settings", WHOLE, ids=["one", "persistent"])
def test_workers_of_the_dataloader_evaluate_too(settings: dict[str, Any], tmp_path: Path) -> None:
    plain, _ = blocking(tmp_path / "plain")
    with victim(tmp_path, "train", **settings) as one:
        until(lambda: (one.look(), one.poll() is not None)[1], 150)  # type: ignore[attr-defined]
        assert one.returncode == 0, (tmp_path / "log").read_text()[-3000:]
        told = json.loads((tmp_path / "told").read_text())
        assert told["evaluations"] == evaluations(plain)
        assert told["best"] == plain.state.best_global_step
        until(lambda: nothing_left(one, tmp_path))


@pytest.mark.slow  # new interpreters
@pytest.mark.process
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("mode", "number"),
    [
        ("never starts", signal.SIGTERM),
        ("never starts", signal.SIGKILL),
        ("forks and never evaluates", signal.SIGTERM),
        ("forks and never evaluates", signal.SIGINT),
        ("forks and never evaluates", signal.SIGKILL),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_signal_ends_the_run_and_the_process_in_each_of_its_phases(
    mode: str, number: signal.Signals, tmp_path: Path
) -> None:
    with victim(tmp_path, mode) as one:
        until(lambda: (tmp_path / "child").exists() or one.poll() is not None, 120)
        one.look()  # type: ignore[attr-defined]
        assert one.started, (tmp_path / "log").read_text()[-3000:]  # type: ignore[attr-defined]
        os.kill(one.pid, number)
        until(lambda: one.poll() is not None, 60)
        code = {signal.SIGTERM: 143, signal.SIGINT: 1, signal.SIGKILL: -9}[number]
        assert one.returncode in (code, -number), (tmp_path / "log").read_text()[-3000:]
        until(lambda: nothing_left(one, tmp_path), 30)


@pytest.mark.slow  # new interpreters
@pytest.mark.process
@pytest.mark.timeout(200)
def test_copies_of_run_that_was_killed_with_process_are_swept_by_next(tmp_path: Path) -> None:
    with victim(tmp_path, "never evaluates") as one:
        until(lambda: (tmp_path / "child").exists() or one.poll() is not None, 120)
        one.look()  # type: ignore[attr-defined]
        child = int((tmp_path / "child").read_text())
        os.kill(child, signal.SIGSTOP)  # so that it cannot tidy up
        os.kill(one.pid, signal.SIGKILL)
        one.wait(30)
        os.kill(child, signal.SIGKILL)
        until(lambda: is_gone(child))
    assert len(scratch_of(tmp_path)) == 1
    with victim(tmp_path, "train") as one:
        until(lambda: (one.look(), one.poll() is not None)[1], 150)  # type: ignore[attr-defined]
        assert one.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert scratch_of(tmp_path) == []


@pytest.mark.slow  # new interpreters
@pytest.mark.process
@pytest.mark.timeout(200)
def test_the_process_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("typer", "xxhash", "torch", "json", "trainwright", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})")
    monkeypatch.chdir(tmp_path)
    trainer, heard = make(tmp_path / "run", eval_async=True, max_steps=2)
    trainer.train()
    assert not (tmp_path / "imported").exists()
    assert len(heard.evaluations) == 1


# -- hostile files ----------------------------------------------------------------------------------------------------

BAD_REQUESTS: list[dict[str, Any]] = [
    *({"name": name} for name in ("", ".", "..", "../../victim", "a/b", "step-1/../..", "a\nb", "\x1b[2J", 3, None)),
    *({"parts": parts} for parts in (["/victim"], ["../../../victim"], [".."], ["eval", "."], "eval", [3], [[]], None)),
    {"parts": ["eval"] * 1000},
    *({"ignore_keys": keys} for keys in ("logits", [3], {"a": 1}, ["a"] * 100_000)),
    *({"step": step} for step in ("2", -1, True, 1.5, 10**30)),
    *({"max_steps": steps} for steps in ("2", -1, 10**30)),
    *({"num_tokens": tokens} for tokens in (None, -1, 0.5, 10**30)),
    *({"epoch": epoch} for epoch in ("x", None, math.nan, math.inf, -1.0, 10**400)),
]


@pytest.mark.parametrize("values", BAD_REQUESTS, ids=lambda values: str(values)[:40])
def test_a_request_with_another_value_is_none(values: dict[str, Any]) -> None:
    whole = EvaluationRequest(name="step-1-a", step=1, epoch=0.5, max_steps=2).to_dict()
    assert EvaluationRequest.from_dict(whole) == EvaluationRequest(name="step-1-a", step=1, epoch=0.5, max_steps=2)
    with pytest.raises(ValueError, match="not a request for an evaluation"):
        EvaluationRequest.from_dict({**whole, **values})


def hostile_states(victim: Path) -> dict[str, Any]:
    whole = EvaluationRequest(name="step-2-0badcafe", step=2, epoch=0.5, max_steps=STEPS).to_dict()
    climb = "/".join([".."] * 40)
    return {
        "a part elsewhere": {"open": [{**whole, "parts": [str(victim)]}]},
        "a part above": {"open": [{**whole, "parts": [f"{climb}{victim}"]}]},
        "a name elsewhere": {"open": [{**whole, "name": str(victim)}]},
        "a name above": {"open": [{**whole, "name": f"{climb}{victim}"}]},
        "the run itself": {"open": [{**whole, "name": ".."}]},
        "no list": {"open": whole},
        "too many": {"open": [{**whole, "name": f"step-2-{number}"} for number in range(10_000)]},
        "a number": {"open": 3},
    }


@pytest.mark.parametrize("kind", list(hostile_states(Path("/victim"))))
def test_the_state_of_a_strangers_checkpoint_deletes_nothing(
    kind: str, held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "work").write_text("mine")
    state = hostile_states(victim)[kind]
    with monkeypatch.context() as patched:
        patched.setattr(AsyncEvaluation, "state_dict", lambda self: state)
        run(tmp_path / "run", held, max_steps=4, **NO_BEST)
    before = names(tmp_path / "run")
    again = Held()
    capability.evaluation_process = again.instead_of  # put back by the fixture
    with pytest.raises(CheckpointError, match="open evaluations"):
        run(tmp_path / "run", again, resume=True, **NO_BEST)
    assert (victim / "work").read_text() == "mine"
    assert names(tmp_path / "run") == before


@pytest.mark.parametrize(
    "linked", ["_evaluations", "_evaluations/step-2-0badcafe", "_evaluations/step-2-0badcafe/eval"]
)
def test_requests_are_never_deleted_or_written_through_a_link(linked: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    for inner in ("step-2-0badcafe/eval", "eval", "step-4-0badcafe"):
        (victim / inner).mkdir(parents=True)
        (victim / inner / "model.safetensors").write_text("mine")
    (victim / "random_states.pth").write_text("mine")
    before = sorted(path.relative_to(victim) for path in victim.rglob("*"))
    folder = tmp_path / "run"
    link = folder / linked
    link.parent.mkdir(parents=True)
    link.symlink_to(victim, target_is_directory=True)
    requests = Requests(folder)
    request = EvaluationRequest(name="step-2-0badcafe", step=2, epoch=0.5, max_steps=STEPS)
    assert requests.waiting() == []
    for act in (
        lambda: requests.open(is_fresh=False),
        lambda: requests.drop_weights(request),
        lambda: requests.drop(request.name),
        lambda: requests.drop_others(set()),
        lambda: requests.begin(request.name),
        requests.close,
        lambda: requests.open(is_fresh=True),
    ):
        with contextlib.suppress(OSError):
            act()
        assert sorted(path.relative_to(victim) for path in victim.rglob("*")) == before


def test_a_linked_directory_of_requests_refuses_the_run(held: Held, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    run(tmp_path / "run", held, max_steps=4, **NO_BEST)
    shutil.rmtree(tmp_path / "run" / "_evaluations", ignore_errors=True)
    (tmp_path / "run" / "_evaluations").symlink_to(victim, target_is_directory=True)
    again = Held()
    capability.evaluation_process = again.instead_of  # put back by the fixture
    with pytest.raises(ArgumentError, match="_evaluations"):
        run(tmp_path / "run", again, resume=True, **NO_BEST)
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        "3",
        "null",
        '{"events": "log", "metrics": {}}',
        '{"events": [["log", [["a", 1]]]], "metrics": {}}',
        '{"events": [["log", {}, 3]], "metrics": {}}',
        '{"events": [], "metrics": [["a", 1]]}',
        '{"events": [], "metrics": ' + '{"a":' * 100_000 + "1" + "}" * 100_001,
        '{"events": [], "metrics": {"a": ' + "9" * 5000 + "}}",
    ],
    ids=lambda content: content[:40],
)
def test_a_result_of_another_form_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(ValueError):  # noqa: PT011 -- of JSON, or ours
        Result.read(tmp_path)
