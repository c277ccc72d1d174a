"""The handler: who is told what, in which order, and what an answer does."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import transformers

from trainwright import CallbackHandler, DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState
from trainwright.callbacks.base import EVENTS
from trainwright.state.progress import LOGGING

from .._support.small import data, make_trainer, models
from ..contract.surface import EVENTS_OF_OURS


class Hears(TrainerCallback):
    """Writes down every event and what came with it."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []

    @property
    def events(self) -> list[str]:
        return [event for event, _ in self.heard]


def _listener(event: str) -> Any:
    def listen(self: Hears, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.heard.append((event, {"args": args, "state": state, "control": control, **kwargs}))

    return listen


for _event in EVENTS:
    setattr(Hears, _event, _listener(_event))


class StepsOnly(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


def handler(*callbacks: Any) -> CallbackHandler:
    return CallbackHandler([DefaultFlowCallback, *callbacks], "model", "tokenizer", "optimizer", "schedule")


def run(**flags: bool) -> Any:
    return SimpleNamespace(state=TrainerState(), control=TrainerControl(**flags))


def test_the_events_are_those_of_transformers() -> None:
    """And two that theirs does not have."""
    theirs = {name for name in vars(transformers.TrainerCallback) if name.startswith("on_")}
    assert set(EVENTS) == theirs | set(EVENTS_OF_OURS)


@pytest.mark.parametrize("event", EVENTS)
def test_a_listener_gets_what_the_handler_holds(event: str) -> None:
    hears = Hears()
    handlers = CallbackHandler([hears], "model", "tokenizer", "optimizer", "schedule")
    handlers.args = "args"
    handlers.train_dataloader = "train"
    handlers.eval_dataloader = "eval"
    now = run()
    handlers.fire(event, now, extra=3)
    ((heard, given),) = hears.heard
    assert heard == event
    assert given == {
        "args": "args",
        "state": now.state,
        "control": now.control,
        "model": "model",
        "extra": 3,
        "processing_class": "tokenizer",
        "tokenizer": "tokenizer",
        "optimizer": "optimizer",
        "lr_scheduler": "schedule",
        "train_dataloader": "train",
        "eval_dataloader": "eval",
    }


def listeners(of: CallbackHandler, event: str) -> list[Any]:
    """Methods of callbacks that an event calls; those of watchers are left out."""
    return [listener for listener, phase in of._table[event] if phase != LOGGING]


@pytest.mark.parametrize("event", [event for event in EVENTS if event not in ("on_step_end", "on_epoch_end")])
def test_an_event_without_listeners_calls_nothing(event: str) -> None:
    assert listeners(handler(StepsOnly()), event) == []


def test_only_those_who_listen_are_in_the_table() -> None:
    callback = StepsOnly()
    assert [m.__self__ for m in listeners(handler(callback), "on_step_end") if m.__self__ is callback] == [callback]


def test_in_the_order_in_which_they_were_added() -> None:
    order: list[int] = []

    class Numbered(TrainerCallback):
        def __init__(self, number: int) -> None:
            self.number = number

        def on_log(self, *args: Any, **kwargs: Any) -> None:
            order.append(self.number)

    handlers = handler(Numbered(1), Numbered(2))
    handlers.add_callback(Numbered(3))
    handlers.fire("on_log", run())
    assert order == [1, 2, 3]


def test_a_control_that_is_returned_replaces_the_current_one() -> None:
    other = TrainerControl(should_save=True)
    seen: list[Any] = []

    class Returns(TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> Any:
            return other

    class Sees(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(control)

    now = run()
    handler(Returns(), Sees()).fire("on_substep_end", now)
    assert now.control is other
    assert seen == [other]


CLEARED = {
    "on_train_begin": ["should_training_stop"],
    "on_epoch_begin": ["should_epoch_stop"],
    "on_step_begin": ["should_save", "should_evaluate", "should_log"],
    "on_log": ["should_log"],
    "on_evaluate": ["should_evaluate"],
    "on_save": ["should_save"],
}
FLAGS = {"should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log"}


@pytest.mark.parametrize("event", EVENTS)
def test_the_flags_that_event_answers_are_cleared_before_anyone_hears_of_it(event: str) -> None:
    hears = Hears()
    now = run(**dict.fromkeys(FLAGS, True))
    seen: dict[str, bool] = {}
    original = Hears.__dict__[event]

    def listen(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seen.update(vars(control))
        original(hears, args, state, control, **kwargs)

    setattr(hears, event, listen)
    CallbackHandler([hears], None, None, None, None).fire(event, now)
    assert {flag for flag in FLAGS if not seen[flag]} == {*CLEARED.get(event, [])}


@pytest.mark.parametrize("event", [event for event in EVENTS if event not in EVENTS_OF_OURS])
def test_the_handlers_own_methods_do_what_those_of_transformers_do(event: str) -> None:
    """Code that drives callbacks by hand: `handler.on_log(args, state, control, logs)`."""
    extra = {"on_log": "logs", "on_evaluate": "metrics", "on_predict": "metrics"}.get(event)
    values = [{"loss": 1.0}] if extra else []
    ours = Hears()
    theirs = Hears()
    one = TrainerControl(**dict.fromkeys(FLAGS, True))
    other = transformers.TrainerControl(**dict.fromkeys(FLAGS, True))
    parts = ("model", "tokenizer", "optimizer", "schedule")
    returned = getattr(CallbackHandler([ours], *parts), event)("args", TrainerState(), one, *values)
    original = transformers.trainer_callback.CallbackHandler([theirs], *parts)
    getattr(original, event)("args", transformers.TrainerState(), other, *values)
    assert returned is one
    assert vars(one) == vars(other)
    ((_, mine),) = ours.heard
    ((_, original_given),) = theirs.heard
    assert mine.keys() >= original_given.keys()
    if extra:
        assert mine[extra] == {"loss": 1.0}


# -- coming and going ------------------------------------------------------------------------------------------------


def test_an_instance_or_a_class() -> None:
    handlers = handler(StepsOnly)
    assert isinstance(handlers.callbacks[1], StepsOnly)
    hears = Hears()
    handlers.add_callback(hears)
    assert handlers.callbacks[2] is hears
    assert handlers.callback_list.split("\n") == ["DefaultFlowCallback", "StepsOnly", "Hears"]


def test_popped_by_class_or_by_instance() -> None:
    first = Hears()
    second = Hears()
    handlers = handler(first, second)
    assert handlers.pop_callback(Hears) is first
    handlers.fire("on_log", run())
    assert (first.events, second.events) == ([], ["on_log"])
    assert handlers.pop_callback(second) is second
    assert handlers.pop_callback(second) is None
    assert handlers.pop_callback(Hears) is None


def test_removed_by_class_or_by_instance() -> None:
    hears = Hears()
    handlers = handler(hears)
    handlers.remove_callback(Hears)
    handlers.remove_callback(Hears)
    handlers.fire("on_log", run())
    assert hears.events == []
    with pytest.raises(ValueError, match="not among the callbacks: DefaultFlowCallback"):
        handlers.remove_callback(hears)


def test_one_of_a_class_that_is_there_already_is_said(caplog: pytest.LogCaptureFixture) -> None:
    handlers = handler(StepsOnly)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        handlers.add_callback(StepsOnly)
    assert "StepsOnly is among the callbacks already" in caplog.text
    assert len(handlers.callbacks) == 3


def test_without_the_flow_it_says_what_will_not_happen(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        CallbackHandler([StepsOnly], None, None, None, None)
    assert "no DefaultFlowCallback" in caplog.text
    assert "add_callback(DefaultFlowCallback)" in caplog.text
    caplog.clear()
    CallbackHandler([transformers.DefaultFlowCallback], None, None, None, None)
    assert caplog.text == ""


# -- through a trainer -----------------------------------------------------------------------------------------------


def test_a_run_tells_its_story_in_order(tmp_path: Path) -> None:
    hears = Hears()
    make_trainer(
        tmp_path,
        callbacks=[hears],
        gradient_accumulation_steps=3,
        num_train_epochs=1,
        eval_strategy="epoch",
        eval_dataset=data.vectors(4),
        save_strategy="epoch",
        per_device_eval_batch_size=2,
    ).train()
    step = [
        "on_step_begin",
        "on_substep_end",
        "on_substep_end",
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_step_end",
        "on_log",
    ]
    short = [event for event in step if event != "on_substep_end"]
    assert hears.events == [
        "on_init_end",
        "on_train_begin",
        "on_epoch_begin",
        *step,
        *step,
        *short,
        "on_epoch_end",
        "on_prediction_step",
        "on_prediction_step",
        "on_log",
        "on_evaluate",
        "on_save",
        "on_log",
        "on_train_end",
    ]


@pytest.mark.framework
def test_the_same_story_as_in_transformers(tmp_path: Path) -> None:
    from .._support.small import OURS, REFERENCE

    stories = []
    for side in (OURS, REFERENCE):
        hears = Hears()
        make_trainer(
            tmp_path / side.name,
            side,
            callbacks=[hears],
            gradient_accumulation_steps=3,
            eval_strategy="steps",
            eval_steps=2,
            eval_dataset=data.vectors(4),
            save_strategy="steps",
            save_steps=4,
            logging_steps=3,
        ).train()
        stories.append([e for e in hears.events if e not in ("on_prediction_step",)])
    assert stories[0] == stories[1]


def test_what_a_run_hands_over_is_its_own(tmp_path: Path) -> None:
    hears = Hears()
    trainer = make_trainer(
        tmp_path,
        callbacks=[hears],
        processing_class=data.tokenizer(),
        num_train_epochs=1,
        model=models.bert(),
        train_dataset=data.texts(26),
    )
    trainer.train()
    given = dict(hears.heard)["on_step_end"]
    for name in ("model", "optimizer", "lr_scheduler", "processing_class", "args", "state", "control"):
        assert given[name] is getattr(trainer, name), name
    assert len(given["train_dataloader"]) == 7


def test_callbacks_that_were_appended_by_hand_are_heard(tmp_path: Path) -> None:
    hears = Hears()
    trainer = make_trainer(tmp_path, num_train_epochs=1)
    trainer.callback_handler.callbacks.append(hears)
    trainer.train()
    assert hears.events[0] == "on_train_begin"
    assert "on_step_end" in hears.events


class OfTransformers(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("on_step_end")
        if state.global_step == 3:
            control.should_training_stop = True


def test_a_callback_of_transformers_is_heard_and_obeyed(tmp_path: Path) -> None:
    callback = OfTransformers()
    trainer = make_trainer(tmp_path, callbacks=[callback])
    trainer.train()
    assert callback.events == ["on_step_end"] * 3
    assert trainer.state.global_step == 3
    listening = [call for call, _ in trainer.callback_handler._table["on_log"]]
    assert trainer.callback_handler.callbacks[-1].on_log in listening


def test_early_stopping_of_transformers(tmp_path: Path) -> None:
    """Both kinds stop at the same step; only the class differs."""
    import trainwright

    steps = []
    for cls in (trainwright.EarlyStoppingCallback, transformers.EarlyStoppingCallback):
        trainer = make_trainer(
            tmp_path / cls.__module__,
            callbacks=[cls(2)],
            eval_dataset=data.vectors(50)[26:],
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            learning_rate=0.3,
            num_train_epochs=4,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
        )
        trainer.train()
        steps.append(trainer.state.global_step)
    assert steps[0] == steps[1] < 28


def test_callback_objects_of_no_class_of_ours(tmp_path: Path) -> None:
    """Some libraries bring objects that only look like callbacks."""

    class LooksLikeOne:
        steps = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps += 1

    looks = LooksLikeOne()
    make_trainer(tmp_path, callbacks=[looks], num_train_epochs=1).train()
    assert looks.steps == 7


def test_who_replaces_call_event_tells_the_callbacks_himself() -> None:
    hears = Hears()
    watches = Hears()
    told = []
    handled = handler(hears)
    handled.watch(watches)
    before = run(should_log=True)

    def call_event(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        told.append((event, kwargs, control.should_log))
        return TrainerControl(should_save=True)

    handled.call_event = call_event  # type: ignore[method-assign]
    handled.fire("on_log", before, logs={"loss": 1.0})
    assert told == [("on_log", {"logs": {"loss": 1.0}}, False)]
    assert hears.events == []
    assert watches.events == ["on_log"]
    assert before.control.should_save


class CountsItself(DefaultFlowCallback):
    """A callback of this package: not a watcher, although its time is the trainer's."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("on_evaluate")

    def on_incident(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("on_incident")


CountsItself.__module__ = "trainwright.callbacks.of_a_test"


class TellsItself(CallbackHandler):
    """A subclass that counts, and leaves the rest to the base class."""

    calls = 0

    def call_event(self, event: str, *args: Any, **kwargs: Any) -> TrainerControl:
        self.calls += 1
        return super().call_event(event, *args, **kwargs)


def replaced_on_the_instance(callbacks: list[Any]) -> CallbackHandler:
    made = CallbackHandler(callbacks, None, None, None, None)

    def call_event(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        """As SetFit has it."""
        for callback in made.callbacks:
            control = getattr(callback, event)(args, state, control, **kwargs) or control
        return control

    made.call_event = call_event  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    "make",
    [lambda callbacks: TellsItself(callbacks, None, None, None, None), replaced_on_the_instance],
    ids=["subclass", "instance"],
)
@pytest.mark.parametrize("direct", [False, True])
def test_with_a_call_event_of_a_library_everybody_hears_an_event_once(make: Any, direct: bool) -> None:
    ours = CountsItself()
    theirs = Hears()
    watches = Hears()
    handled = make([ours, theirs])
    handled.watch(watches)
    here = run()
    for event in ("on_evaluate", "on_incident"):
        if direct:
            getattr(handled, event)(None, here.state, here.control)
        else:
            handled.fire(event, here)
    heard = ["on_evaluate", "on_incident"]
    assert (ours.events, theirs.events, watches.events) == (heard, heard, heard)
    if isinstance(handled, TellsItself):
        assert handled.calls == (2 if direct else 1)  # on_incident is no event of the original's


def test_a_call_event_that_is_taken_off_again_leaves_the_handlers_own() -> None:
    hears = Hears()
    handled = handler(hears)
    with mock.patch.object(handled, "call_event", return_value=TrainerControl()) as replaced:
        handled.fire("on_evaluate", run())
    assert replaced.call_count == 1
    assert hears.events == []
    handled.fire("on_evaluate", run())
    assert (replaced.call_count, hears.events) == (1, ["on_evaluate"])
