"""A case of the fuzz on both sides: what each does, and the first difference that no correction explains.

`run` returns facts by name, in the order in which they are compared: the first that differs says most.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import random
import signal
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import safetensors.torch
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from transformers.trainer_utils import TrainerMemoryTracker

import trainwright
from trainwright.errors import TrainwrightError

from . import rows
from .fuzz_corrections import (
    AS_THERE,
    DRAWS,
    ENDS,
    FILES,
    FILES_OF_OURS,
    GROUPED,
    HALF_ON_CPU,
    NON_FINITE,
    OWN_CHECKPOINTS,
    PASSES,
    REPRODUCE,
    SCALARS,
    SHUFFLED,
    TRAINS_ONLY_HERE,
    TWO_FAULTS,
    Correction,
    corrected,
)
from .fuzz_table import (
    CONTAINERS,
    Case,
    Scores,
    best_token,
    is_stream,
    is_t5,
    num_samples,
    settings,
    task_of,
    with_meaning,
)
from .sides import CLOCK, Digest, Side, weights

Facts = dict[str, Any]
EVENTS = [name for name in vars(transformers.TrainerCallback) if name.startswith("on_")]
FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
STATE = (
    "epoch",
    "global_step",
    "max_steps",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "train_batch_size",
    "num_train_epochs",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "trial_name",
    "trial_params",
    "is_hyper_param_search",
)
MEMORY = ("_mem_cpu_", "_mem_gpu_", "before_init_mem", "init_mem")

DERIVED = (
    "label_names",
    "can_return_loss",
    "_train_batch_size",
    "model_accepts_loss_kwargs",
    "is_model_parallel",
    "is_in_train",
    "neftune_noise_alpha",
    "_created_lr_scheduler",
)
# Written into a model's config by `save_pretrained`, where ours saves a copy, and by the first pass through the model.
SET_BY_OTHERS = ("architectures", "dtype", "problem_type")

REFERENCE = Side("transformers", corrected(transformers.Trainer), transformers.TrainingArguments)
REFERENCE_SEQ2SEQ = Side("transformers", corrected(transformers.Seq2SeqTrainer), transformers.Seq2SeqTrainingArguments)
PLAIN = replace(REFERENCE, trainer=corrected(transformers.Trainer, reproduces=True))
PLAIN_SEQ2SEQ = replace(REFERENCE_SEQ2SEQ, trainer=corrected(transformers.Seq2SeqTrainer, reproduces=True))
OURS = Side("trainwright", trainwright.Trainer, trainwright.TrainingArguments)
OURS_SEQ2SEQ = Side("trainwright", trainwright.Seq2SeqTrainer, trainwright.Seq2SeqTrainingArguments)
REPRODUCING = replace(OURS, arguments=partial(trainwright.TrainingArguments, **REPRODUCE))
REPRODUCING_SEQ2SEQ = replace(OURS_SEQ2SEQ, arguments=partial(trainwright.Seq2SeqTrainingArguments, **REPRODUCE))
MODULES = {"transformers": transformers, "trainwright": trainwright}

# -- parts of a trainer -----------------------------------------------------------------------------------------------


class Recorder:
    """Notes each event with the state that it sees."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events


def _noting(event: str) -> Callable[..., None]:
    def note(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rates = [] if kwargs.get("lr_scheduler") is None else [g["lr"] for g in kwargs["optimizer"].param_groups]
        shown = {name: sorted(kwargs[name]) for name in ("logs", "metrics") if kwargs.get(name)}
        self.events.append(
            (
                event,
                state.global_step,
                state.epoch,
                [getattr(control, flag) for flag in FLAGS],
                rates,
                {name: [key for key in keys if not is_ignored(key)] for name, keys in shown.items()},
            )
        )

    return note


for _event in EVENTS:
    setattr(Recorder, _event, _noting(_event))


def is_ignored(key: str) -> bool:
    return key.endswith("_model_preparation_time") or any(word in key for word in MEMORY)


def steering(module: Any, how: str) -> Any:
    """A callback that a person would write."""
    if how.startswith("patience"):
        return module.EarlyStoppingCallback(early_stopping_patience=int(how.partition("_")[2] or 1))
    flag = {
        "save": "should_save",
        "stop": "should_training_stop",
        "epoch_stop": "should_epoch_stop",
        "evaluate": "should_evaluate",
        "log": "should_log",
    }.get(how.removesuffix("_at_epoch"))

    class Steering(module.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if state.global_step == 3 and flag and not how.endswith("_at_epoch"):
                setattr(control, flag, True)
            return control if how == "returns_control" else None

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if flag and how.endswith("_at_epoch"):
                setattr(control, flag, True)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if how == "writes_logs":
                logs["mine"] = state.global_step

    return Steering()


def subclass(kind: Any, how: str | None) -> Any:
    """A trainer as people write it, with one override."""
    if how is None:
        return kind

    class Mine(kind):  # type: ignore[misc, valid-type]
        pass

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        found = super(Mine, self).compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        return (found[0] * 1.5, found[1]) if return_outputs else found * 1.5

    def log(self: Any, logs: Any, *args: Any, **kwargs: Any) -> None:
        super(Mine, self).log({**logs, "mine": 1.0}, *args, **kwargs)

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return super(Mine, self).training_step(model, inputs, num_items_in_batch) * 2

    def create_scheduler(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer or self.optimizer, 2)
        return self.lr_scheduler

    setattr(Mine, how, locals()[how])
    return Mine


def evaluated_on(case: Case) -> Any:
    how = case.get("eval_data")
    wrap = CONTAINERS[case.get("data", "list")]
    items = task_of(case).items(26)[15:]
    if how == "none":
        return None
    if how == "two":
        return {"a": wrap(items[:5]), "b": wrap(items[5:])}
    return CONTAINERS["stream"](items) if how == "stream" else wrap(items[:1] if how == "one_sample" else items[:6])


def make(case: Case, side: Side, folder: Path, events: list[Any], **more: Any) -> Any:
    """A new trainer of the case on a new model; the weights and the data are the same at every call."""
    task = task_of(case)
    module = MODULES[side.name]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    is_plain = side in (REPRODUCING, REPRODUCING_SEQ2SEQ)
    given = settings(case) | more | (AS_THERE if side.name == "trainwright" and not is_plain else {})
    own_arguments = case.get("their_arguments") and side.name == "trainwright"
    arguments = (REFERENCE_SEQ2SEQ if is_t5(case) else REFERENCE).arguments if own_arguments else side.arguments
    if own_arguments:
        given = {name: value for name, value in given.items() if name not in AS_THERE}
    args = arguments(output_dir=str(folder), **given)
    model = task.build(case.get("dropout", 0.0))
    parts = task.parts(model)
    if case.get("optimizers"):
        parts |= (rows.own_optimizer if case["optimizers"] == "own" else rows.own_optimizer_class)(model)
    if case.get("loss_function"):
        parts |= rows.own_loss(model)
    if case.get("metrics"):
        parts["compute_metrics"] = Scores()
        if case["metrics"] == "best_token":
            parts["preprocess_logits_for_metrics"] = best_token
    if case.get("model_init"):
        parts["model_init"] = lambda: task.build(case.get("dropout", 0.0))
        model = None
    recorder = type("Recording", (Recorder, module.TrainerCallback), {})(events)
    callbacks = [recorder, *([steering(module, case["callback"])] if case.get("callback") else [])]
    return subclass(side.trainer, case.get("subclass"))(
        model=model,
        args=args,
        train_dataset=CONTAINERS[case.get("data", "list")](task.items(num_samples(case))),
        eval_dataset=evaluated_on(case),
        callbacks=callbacks,
        **parts,
    )


# -- what a side does -------------------------------------------------------------------------------------------------


CPU_LIMIT_S = 60.0


def _stop(*_: object) -> None:
    raise TimeoutError(f"a side took more than {CPU_LIMIT_S:.0f} s of CPU time")


@contextlib.contextmanager
def no_memory_threads() -> Iterator[None]:
    """Ends the threads with which the original measures memory; it leaves them to spin where a run ends by an error."""
    trackers: list[TrainerMemoryTracker] = []
    make_tracker = TrainerMemoryTracker.__init__

    def noted(self: TrainerMemoryTracker, *args: Any, **kwargs: Any) -> None:
        trackers.append(self)
        make_tracker(self, *args, **kwargs)

    try:
        with mock.patch.object(TrainerMemoryTracker, "__init__", noted):
            yield
    finally:
        for tracker in trackers:
            tracker.peak_monitoring = False


@contextlib.contextmanager
def quiet_and_clean() -> Iterator[None]:
    """Nothing of a run remains in the process: environment, singletons, switches of torch, levels of loggers."""
    environment = dict(os.environ)
    signals = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    loggers = [logging.getLogger(name) for name in ("trainwright", "transformers", "accelerate", "datasets")]
    levels = [one.level for one in loggers]
    folder = os.getcwd()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S)
    try:
        nowhere = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            with no_memory_threads():
                yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        os.chdir(folder)
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.deterministic = False
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
        for number, handler in signals.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def facts_of(trainer: Any, folder: Path) -> Facts:
    state = trainer.state
    best = state.best_model_checkpoint
    return {
        "log": [_in_order(entry) for entry in state.log_history],
        "state": {name: getattr(state, name) for name in STATE} | {"best": best and Path(best).name},
        "weights": {name: Digest.of(value) for name, value in weights(trainer.model).items()},
        "model settings": _model_settings(trainer.model),
        "trainer": _trainer_settings(trainer),
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")),
        "checkpoints": {path.name: _checkpoint(path) for path in sorted(folder.glob("checkpoint-*"))},
    }


def _model_settings(model: Any) -> dict[str, Any]:
    """What a trainer may have set in a model, besides weights; predictions show its `generation_config`."""
    config = vars(getattr(model, "config", SimpleNamespace()))
    settings = {name: value for name, value in config.items() if name not in SET_BY_OTHERS}
    return {"config": settings, "training": {name: module.training for name, module in model.named_modules()}}


def _trainer_settings(trainer: Any) -> dict[str, Any]:
    """What a trainer has derived and made; accelerate's wrappers of the original are taken off."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    schedule = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    return {name: getattr(trainer, name) for name in DERIVED} | {
        "columns": sorted(set(trainer._signature_columns or [])),
        "control": vars(trainer.control),
        "callbacks": [type(callback).__name__ for callback in trainer.callback_handler.callbacks],
        "made": [type(one).__name__ for one in (optimizer, schedule)],
        "gradients": [parameter.grad is not None for parameter in trainer.model.parameters()],
    }


def _in_order(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of the log without the values of measurements, those of memory at its end."""
    memory = sorted(key for key in entry if any(word in key for word in MEMORY))
    return {
        key: None if key.endswith(CLOCK) else value for key, value in entry.items() if key not in memory
    } | dict.fromkeys(memory)


def _checkpoint(path: Path) -> Facts:
    found: Facts = {}
    if (path / "trainer_state.json").exists():
        record = json.loads((path / "trainer_state.json").read_text())
        found["state"] = {name: record.get(name) for name in STATE}
        found["log"] = [_in_order(entry) for entry in record["log_history"]]
        found["callbacks"] = record["stateful_callbacks"]
    if (path / "model.safetensors").exists():
        tensors = safetensors.torch.load_file(path / "model.safetensors")
        found["weights"] = {name: Digest.of(value) for name, value in sorted(tensors.items())}
    if (path / "scheduler.pt").exists():
        schedule = torch.load(path / "scheduler.pt", weights_only=False)
        found["schedule"] = {name: schedule.get(name) for name in ("last_epoch", "base_lrs", "_last_lr", "_step_count")}
    if (path / "optimizer.pt").exists():
        found["optimizer"] = _with_digests(torch.load(path / "optimizer.pt", weights_only=False))
    if (path / "config.json").exists():
        found["config"] = json.loads((path / "config.json").read_text())
    return found


def _with_digests(value: Any) -> Any:
    """Nested dicts in the order of their keys, with digests for tensors."""
    if isinstance(value, torch.Tensor):
        return Digest.of(value)
    if isinstance(value, dict):
        return {str(key): _with_digests(one) for key, one in sorted(value.items())}
    return [*map(_with_digests, value)] if isinstance(value, list) else value


def run(case: Case, side: Side, used: Counter[Correction], **more: Any) -> Facts:
    """All that a case does on a side: facts in the order in which they happen, the last one an error if there is one.

    `more` are arguments that replace those of the case.
    """
    if side.name == "transformers":
        side = replace(side, trainer=type(side.trainer.__name__, (side.trainer,), {"used": used}))
    facts: Facts = {}
    with quiet_and_clean(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        try:
            for fact, value in _phases(case, side, folder, more):
                facts[fact] = value
        except Exception as error:
            facts["error"] = error
            error.where = _place(error)  # type: ignore[attr-defined]
            error.__traceback__ = None
    return facts


def _place(error: BaseException) -> str:
    """The function that raised, and its callers, without those of the fuzz."""
    frames = [
        one for one in traceback.extract_tb(error.__traceback__) if not Path(one.filename).name.startswith("fuzz")
    ]
    return " < ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in reversed(frames[-6:]))


def _phases(case: Case, side: Side, folder: Path, more: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    output = folder / "out"
    events: list[Any] = []
    trainer = make(case, side, output, events, **more)
    yield "made", list(events)
    before = case.get("before")
    test_set = CONTAINERS[case.get("data", "list")](task_of(case).items(30)[26:])
    if before == "evaluate":
        yield "evaluated before", _metrics(trainer.evaluate())
    if before == "predict":
        yield "predicted before", _prediction(trainer.predict(test_set))
    if before == "train":
        trainer.train()
        yield from _named("before", facts_of(trainer, output))
    yield from _trained("", trainer, output, events)
    if case.get("resume"):
        events = []
        trainer = resuming(case, side, output, events)
        yield "found", Path(str(trainer.resumed_from)).name
        yield from _trained("resumed", trainer, output, events, resume_from_checkpoint=trainer.resumed_from)
    if case.get("eval_data") != "none":
        yield "evaluated", _metrics(trainer.evaluate())
    yield "predicted", _prediction(trainer.predict(test_set))
    yield "events at the end", events


def resuming(case: Case, side: Side, output: Path, events: list[Any]) -> Any:
    """A second trainer, and in `resumed_from` the checkpoint that it goes on from."""
    how = case["resume"]
    trainer = make(case, side, output, events, **extended(case))
    saved = sorted(output.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    chosen = {"first": saved[:1], "last": saved[-1:], "newest": [True]}[how]
    if chosen and chosen != [True]:
        chosen = [str(chosen[0])]
    trainer.resumed_from = chosen[0] if chosen else None
    return trainer


def extended(case: Case) -> dict[str, Any]:
    """The arguments that make a resumed run longer, if it is to be; "resumed_with" are some that are not drawn."""
    name = "max_steps" if "max_steps" in settings(case) else "num_train_epochs"
    longer = {name: settings(case)[name] + (3 if name == "max_steps" else 1)} if case.get("longer") else {}
    return longer | case.get("resumed_with", {})


def _trained(prefix: str, trainer: Any, output: Path, events: list[Any], **how: Any) -> Iterator[tuple[str, Any]]:
    out = trainer.train(**how)
    facts = facts_of(trainer, output)
    summary = {"steps": out.global_step, "loss": out.training_loss, "metrics": sorted(_metrics(out.metrics))}
    yield from _named(prefix, {"log": facts.pop("log"), "events": list(events), **facts, "result": summary})


def _named(prefix: str, facts: Facts) -> Iterator[tuple[str, Any]]:
    return ((f"{prefix} {name}".strip(), value) for name, value in facts.items())


def _metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: None if key.endswith(CLOCK) else value for key, value in metrics.items() if not is_ignored(key)}


def _prediction(found: Any) -> Any:
    return {"metrics": _metrics(found.metrics or {}), "predictions": found.predictions, "labels": found.label_ids}


# -- comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The first fact in which the sides differ, and where in it."""

    fact: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        return f"{self.fact}\n    ours:   {_short(self.ours)}\n    theirs: {_short(self.theirs)}"


def _short(value: Any) -> str:
    text = repr(value)
    if isinstance(value, BaseException):
        text = f"{type(value).__name__}: {str(value)[:300]} ({getattr(value, 'where', '')})"
    return text if len(text) < 600 else text[:600] + " ..."


def compare(case: Case, used: Counter[Correction], *, reproduces: bool = False) -> Difference | None:
    """Runs a case on both sides; the first difference that nothing explains, or None.

    With `reproduces` ours takes back its corrections of numbers, and the original makes none of them.
    """
    sides = (OURS_SEQ2SEQ, REFERENCE_SEQ2SEQ) if is_t5(case) else (OURS, REFERENCE)
    if reproduces:
        case = {name: value for name, value in case.items() if name != "their_arguments"}
        sides = (REPRODUCING_SEQ2SEQ, PLAIN_SEQ2SEQ) if is_t5(case) else (REPRODUCING, PLAIN)
    is_half = "fp16" in case and "bf16" not in case and not reproduces
    used[HALF_ON_CPU] += is_half
    without_half = {name: value for name, value in case.items() if name != "fp16" or not is_half}
    ours = run(without_half, sides[0], used)
    theirs = run(case, sides[1], used)
    mine = ours.pop("error", None)
    other = theirs.pop("error", None)
    for name in theirs:
        if name not in ours:
            break
        if name.endswith("files"):
            more = [path for path in ours[name] if Path(path).name in FILES_OF_OURS and path not in theirs[name]]
            used[FILES] += bool(more)
            ours[name] = [path for path in ours[name] if path not in more]
        if (
            name in ("resumed files", "resumed checkpoints")
            and case["resume"] == "first"
            and "save_total_limit" in case
        ):
            ours[name] = _without_kept(ours[name], theirs[name], used)
        if (found := first_difference(ours[name], theirs[name], name, used)) is not None:
            strays = None if reproduces else next((one for one, is_so in STRAYS if is_so(case)), None)
            if name.startswith("resumed ") and strays and _only_ours_is_straight(case, sides[0], ours, theirs):
                used[strays] += 1
                return None
            return found
    if (mine is None and other is None) or (mine and other and _same_error(mine, other)):
        return None
    for correction, words, row in TRAINS_ONLY_HERE:
        if row in case and other is not None and words in str(other):
            used[correction] += 1
            return compare(without(case, row), used, reproduces=reproduces)
    explained = next((one for one in ENDS if one.explain(case, mine, other)), None)
    if explained is not None and isinstance(mine, TrainwrightError | None):
        used[explained.correction] += 1
        return None
    for row in case if mine and other else ():
        is_named = any(text in str(mine) for text in (f"{row}=", f"({row})"))
        if is_named and "error" in run(rest := without(case, row), sides[1], Counter()):
            used[TWO_FAULTS] += 1
            return compare(rest, used, reproduces=reproduces)
    return Difference("error", mine, other)


def _without_kept(ours: Any, theirs: Any, used: Counter[Correction]) -> Any:
    """Files or checkpoints of ours less whole checkpoints that the original deleted."""
    gone = {path.split("/")[0] for path in ours} - {path.split("/")[0] for path in theirs}
    gone = {folder for folder in gone if folder.startswith("checkpoint-")}
    used[OWN_CHECKPOINTS] += bool(gone)
    left = [path for path in ours if path.split("/")[0] not in gone]
    return {path: ours[path] for path in left} if isinstance(ours, dict) else left


def without(case: Case, row: str) -> Case:
    """A case less one row."""
    return with_meaning({name: value for name, value in case.items() if name != row})


STRAYS: tuple[tuple[Correction, Callable[[Case], bool]], ...] = (
    (DRAWS, lambda case: case.get("model") == "mlm"),
    (GROUPED, lambda case: case.get("train_sampling_strategy") == "group_by_length"),
    (SHUFFLED, lambda case: case.get("accelerator_config") == {"use_seedable_sampler": False}),
    (PASSES, is_stream),
)


def _only_ours_is_straight(case: Case, side: Side, ours: Facts, theirs: Facts) -> bool:
    """Whether the resumed run of ours has the weights of an uninterrupted one, and that of the original has not."""
    if "resumed state" not in ours or "resumed state" not in theirs:
        return False
    found = _end(ours, "resumed ")
    if found == _end(theirs, "resumed "):
        return False
    straight = ours
    if case.get("longer"):
        alone = {name: value for name, value in case.items() if name != "resume"}
        straight = run(alone, side, Counter(), **extended(case))
    return _end(straight) == found


def _end(facts: Facts, prefix: str = "") -> tuple[Any, float]:
    return facts[f"{prefix}weights"], facts[f"{prefix}state"]["epoch"]


def _same_error(ours: BaseException, theirs: BaseException) -> bool:
    """Whether one who catches what the original raises catches ours."""
    return isinstance(ours, type(theirs)) or type(ours).__name__ == type(theirs).__name__


def first_difference(ours: Any, theirs: Any, where: str, used: Counter[Correction]) -> Difference | None:
    """Where two facts part; a loss of an evaluation may differ in the order of its additions."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.get("num_non_finite_losses"):
            ours, theirs = (
                {key: value for key, value in entry.items() if key not in ("loss", "num_non_finite_losses")}
                for entry in (ours, theirs)
            )
            used[NON_FINITE] += 1
        if list(ours) != list(theirs):
            return Difference(f"{where}: names", list(ours), list(theirs))
        return _first(first_difference(ours[key], theirs[key], f"{where} > {key}", used) for key in ours)
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if any(isinstance(name, str) and name == "num_non_finite_losses" for name in ours):  # names, told to an event
            ours = [name for name in ours if name != "num_non_finite_losses"]
            used[NON_FINITE] += 1
        found = _first(
            first_difference(a, b, f"{where} > {i}", used) for i, (a, b) in enumerate(zip(ours, theirs, strict=False))
        )
        return found or (Difference(f"{where}: length", ours[-3:], theirs[-3:]) if len(ours) != len(theirs) else None)
    if isinstance(ours, (np.ndarray, torch.Tensor)) or isinstance(theirs, (np.ndarray, torch.Tensor)):
        if isinstance(theirs, np.ndarray) and theirs.ndim == 0 and np.shape(ours) == (1,):
            theirs = theirs[None]
            used[SCALARS] += 1
        same = type(ours) is type(theirs) and Digest.of(ours) == Digest.of(theirs)
        return None if same else Difference(where, ours, theirs)
    if where.endswith("total_flos") and ours == theirs:  # 0 and 0.0, of a run without a step
        return None
    if isinstance(ours, float) and isinstance(theirs, float):
        is_mean = where.endswith(("_loss", "best_metric")) and "train_loss" not in where
        if math.isclose(ours, theirs, rel_tol=1e-6 if is_mean else 0.0, abs_tol=0.0) or (
            ours != ours and theirs != theirs
        ):
            return None
    return None if ours == theirs and type(ours) is type(theirs) else Difference(where, ours, theirs)


def _first(found: Iterator[Difference | None]) -> Difference | None:
    return next((one for one in found if one is not None), None)
