"""The laws of extensions: ours and a user's, alone and in pairs.

What they count of a window that is tried again, dropped or cut off is in `tests/loop/test_window_law.py`.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import Curriculum, Decision, Extension, MicroBatch, StepFacts, Trainer, TrainerCallback
from trainwright._types import EXTENSIONS_NAME
from trainwright.capabilities.async_evaluation import capability
from trainwright.capabilities.quarantine.file import add_to_quarantine
from trainwright.capability_table import RESERVED_NAMES
from trainwright.checkpoint.training_state import load_plain
from trainwright.errors import ArgumentError, ExtensionError
from trainwright.loop.extension import EVENTS, FORWARD, REVERSED, Extensions
from trainwright.preflight import prove

from .._support.listeners import find_listeners
from .._support.two_processes import run as run_ranks
from ..capabilities.async_evaluation.async_evaluations import Held
from ..contract import doubles
from ..loop import test_window_law as window_law
from .members import Member, read_members


class Diary(Extension):
    """Writes down each event, and fails in one of them."""

    name = "diary"

    def __init__(
        self, name: str = "diary", order: int = 0, fails_in: str = "", entries: list[str] | None = None
    ) -> None:
        self.name = name
        self.order = order
        self.fails_in = fails_in
        self.entries = [] if entries is None else entries

    def _note(self, event: str) -> None:
        self.entries.append(f"{self.name}.{event}")
        if event == self.fails_in:
            raise Broken(event)


class Broken(Exception):
    pass


def _noting(event: str) -> Any:
    results = {
        "decide": Decision.APPLY,
        "facts": {},
        "log": {},
        "evaluated": {},
        "share": [1.0],
        "keeps": set(),
        "state_dict": {"number": 1},
    }

    def note(self: Diary, *args: Any) -> Any:
        self._note(event)
        return copy.copy(results.get(event))

    return note


for _event in (*EVENTS, "mark", "rewind", "state_dict", "load_state_dict"):
    setattr(Diary, _event, _noting(_event))


class NotesLoss(Extension):
    """As a user writes one: a mean on the device, a value for the log, a state, and no veto."""

    name = "mean_loss"

    def __init__(self) -> None:
        self.total = torch.zeros(())

    def micro_batch(self, batch: MicroBatch) -> None:
        self.total += batch.loss.detach()

    def log(self) -> dict[str, float]:
        return {"sum_of_losses": float(self.total)}

    def mark(self) -> torch.Tensor:
        return self.total.clone()

    def rewind(self, mark: torch.Tensor) -> None:
        self.total = mark

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


# -- pairs ------------------------------------------------------------------------------------------------------------


def records(trainer: Any) -> None:
    plain = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        trainer.record("one", 1.0)
        return plain(*args, **kwargs)

    trainer.compute_loss = compute_loss


def scale_loss(ledger: Any) -> Any:
    return 1.0 + ledger.visits


MEMBERS = {
    "skip": Member("guard", {"on_nonfinite": "skip"}),
    "rollback": Member("guard", {"on_spike": "rollback", "rollback_every": 1}),
    "incidents": Member("incidents", {"incidents": True}),
    "recorded metrics": Member("recorded_metrics", prepare=records),
    "ledger": Member("ledger", {"ledger": True}),
    "curriculum": Member("curriculum", {"curriculum": True}, changes_training=True),
    "average": Member("averages", {"average": "ema"}),
    "live control": Member("control", {"live_control": True}),
    "evaluation beside": Member("async_evaluation", {"eval_async": True, "eval_strategy": "steps", "eval_steps": 1}),
    "quarantine": Member(
        "quarantine",
        prepare=lambda trainer: add_to_quarantine(trainer.args.output_dir, [3]),
        changes_training=True,
    ),
    "first look": Member("first_look", {"preflight": True}),
    "checkpoint items": Member(
        "checkpoint_items", prepare=lambda trainer: trainer.checkpoint_items.update(one=torch.nn.Linear(1, 1))
    ),
    "lease": Member("lease", {"save_strategy": "steps", "save_steps": 3, "save_async": False}),
    "mirror": Member(
        "mirror",
        {"save_strategy": "steps", "save_steps": 3, "checkpoint_mirror": "memory://laws/run", "save_total_limit": 1},
    ),
    "a user's": Member("diary", prepare=lambda trainer: trainer.add_extension(Diary())),
    "another of a user's": Member("mean_loss", prepare=lambda trainer: trainer.add_extension(NotesLoss())),
    **read_members(),
}
NOTHING_ELSE = {
    "on_nonfinite": "ignore",
    "on_spike": "off",
    "incidents": False,
    "preflight": False,
    "gradient_accumulation_steps": 2,
    "logging_steps": 2,
    "seed": 5,
}


class Seen(TrainerCallback):
    """The extensions of a run, and its table of events, in the first step."""

    def __init__(self) -> None:
        self.extensions: list[Extension] = []
        self.tables: dict[str, list[Extension]] = {}

    def of(self, trainer: Any) -> Seen:
        self._trainer = trainer
        return self

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.tables:
            found = self._trainer._trainwright.run.extensions
            self.extensions = list(found)
            self.tables = {event: [method.__self__ for method in find_listeners(found, event)] for event in EVENTS}


def made(folder: Path, *names: str, **more: Any) -> Any:
    """Returns the trainer of a short run with some members, which have not prepared it yet."""
    settings: dict[str, Any] = dict(NOTHING_ELSE)
    for name in names:
        settings |= MEMBERS[name].settings
    settings |= more
    if settings.get("checkpoint_mirror", "").startswith("memory:"):
        settings["checkpoint_mirror"] = f"memory://laws/{folder.name}"  # of no other run
    samples = doubles.samples()
    if settings.pop("curriculum", False):
        samples = Curriculum(samples, scale_loss, every=1, delay=1)
    return doubles.trainer(folder, settings=settings, train_dataset=samples, eval_dataset=doubles.samples(4))


def trained(folder: Path, *names: str) -> tuple[dict[str, torch.Tensor], Seen]:
    """Returns the weights of a short run with some members, and what it was made of."""
    trainer = made(folder, *names)
    for name in names:
        MEMBERS[name].prepare(trainer)
    seen = Seen()
    trainer.add_callback(seen.of(trainer))
    trainer.train()
    return doubles.weights(trainer), seen


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], dict[str, torch.Tensor]]:
    """Returns the weights of runs with the members that change training, and of one without any."""
    changing = [name for name, member in MEMBERS.items() if member.changes_training]
    cases: list[tuple[str, ...]] = [(), *((name,) for name in changing)]
    weights = {case: trained(tmp_path_factory.mktemp("alone"), *case)[0] for case in cases}
    assert not any(doubles.same(weights[()], weights[name,]) for name in changing)
    return weights


@pytest.fixture(autouse=True)
def evaluates_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations beside training need no process."""
    monkeypatch.setattr(capability, "evaluation_process", Held().instead_of)


PAIRS = [*((name,) for name in MEMBERS), *itertools.combinations(MEMBERS, 2)]


@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_extensions_together_train_as_alone(
    names: tuple[str, ...], tmp_path: Path, alone: dict[tuple[str, ...], dict[str, torch.Tensor]]
) -> None:
    """Where neither changes training, weights are those of a run without them; the order is the declared one."""
    weights, seen = trained(tmp_path, *names)
    changing = tuple(name for name in names if MEMBERS[name].changes_training)
    if len(changing) < 2:
        assert doubles.same(weights, alone[changing])
    found = {extension.name for extension in seen.extensions}
    assert {MEMBERS[name].name for name in names} <= found
    orders = [extension.order for extension in seen.extensions]
    assert orders == sorted(orders)
    for event, listening in seen.tables.items():
        orders = [extension.order for extension in listening]
        assert orders == sorted(orders, reverse=event in REVERSED), event
        assert all(overrides(extension, event) for extension in listening), event


OF_SEVERAL = ("share", "shared")  # told where several processes train: capabilities/slow_ranks


def overrides(extension: Extension, event: str) -> bool:
    return getattr(type(extension), event) is not getattr(Extension, event)


# -- order ------------------------------------------------------------------------------------------------------------


def events_of(entries: list[str], event: str) -> list[str]:
    return [one.partition(".")[0] for one in entries if one.endswith(f".{event}")]


def test_the_lower_order_comes_first_and_last_at_the_end(tmp_path: Path) -> None:
    entries: list[str] = []
    settings = {"save_strategy": "steps", "save_steps": 1, "save_async": False, "max_steps": 1}
    evaluates = {"eval_strategy": "steps", "eval_steps": 1}
    trainer = doubles.trainer(tmp_path, settings=settings | evaluates, eval_dataset=doubles.samples(4))
    for name, order in (("late", 30), ("early", -200), ("middle", 5)):
        trainer.add_extension(Diary(name, order, entries=entries))
    trainer.train()
    trainer.args.max_steps = 2
    trainer.train(resume_from_checkpoint=True)
    in_order = ["early", "middle", "late"]
    for event in FORWARD:
        if event not in ("refused", *OF_SEVERAL):
            found = events_of(entries, event)
            assert found, event
            assert found == in_order * (len(found) // 3), event
    for event in ("finish", "close"):
        found = events_of(entries, event)
        assert found == in_order[::-1] * 2, event


def test_rewind_and_errors_are_told_in_reverse(tmp_path: Path) -> None:
    entries: list[str] = []

    class Full(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if "late.rewind" not in entries:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            if self.state.global_step == 2:
                raise Broken
            return super().compute_loss(*args, **kwargs)

    trainer = doubles.trainer(tmp_path, Full, settings={"auto_find_batch_size": True})
    for name, order in (("late", 30), ("early", -200)):
        trainer.add_extension(Diary(name, order, entries=entries))
    with pytest.raises(Broken):
        trainer.train()
    for event in ("rewind", "on_error", "close"):
        assert events_of(entries, event) == ["late", "early"], event


def test_events_of_a_step_come_in_their_order(tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    diary = Diary()
    trainer = doubles.trainer(tmp_path, settings=settings)
    trainer.add_extension(diary)
    trainer.train()
    entries = [entry.partition(".")[2] for entry in diary.entries]
    first = entries.index("mark")
    assert entries[:first] == ["open", "model_ready", "before_plan", "begin", "state_dict", "facts"]
    assert entries[first + 1 : first + 6] == ["window", "micro_batch", "micro_batch", "decide", "after_step"]
    assert entries.index("committed") > entries.index("save")
    for event in ("keeps", "committed"):  # from the thread that writes, so at any moment after that
        entries.remove(event)
    rest = [entry for entry in entries[first + 6 :] if entry != "settle"]
    assert rest == [
        "log",
        "before_save",
        "check_save",
        "save",
        "state_dict",
        "after_epoch",
        "trained",
        "finish",
        "close",
    ]
    for event in ("log", "before_save", "finish"):
        assert entries[entries.index(event) - 1] == "settle", event


def test_an_extension_without_events_is_in_no_table() -> None:
    class Idle(Extension):
        name = "idle"

    assert Idle().listens_to() == set()
    table = Extensions([Idle()])
    assert [event for event in EVENTS if find_listeners(table, event)] == []
    assert table.marks() == []
    assert table.saving.states() == {}


def test_an_extension_may_leave_out_an_event() -> None:
    class Quiet(Diary):
        def listens_to(self) -> set[str]:
            return super().listens_to() - {"micro_batch", "rewind"}

    table = Extensions([Quiet()])
    assert table.micro_batch == ()
    assert len(table.after_step) == 1
    assert table.marks() == []


def test_one_that_came_within_a_window_is_not_rewound_and_one_without_a_mark_is() -> None:
    rewound: list[tuple[str, Any]] = []

    class Rewinds(Extension):
        def __init__(self, name: str, *, is_marked: bool) -> None:
            self.name = name
            self._is_marked = is_marked

        def listens_to(self) -> set[str]:
            return super().listens_to() - (set() if self._is_marked else {"mark"})

        def mark(self) -> str:
            return f"mark of {self.name}"

        def rewind(self, mark: Any) -> None:
            rewound.append((self.name, mark))

    table = Extensions([Rewinds("marked", is_marked=True), Rewinds("quiet", is_marked=False)])
    marks = table.marks()
    table.add(Rewinds("late", is_marked=True))
    table.rewind_to(marks)
    assert rewound == [("quiet", None), ("marked", "mark of marked")]


# -- decisions --------------------------------------------------------------------------------------------------------


class Decides(Diary):
    """Decides in one way about step 2."""

    def __init__(self, decision: Any, name: str = "decides", order: int = 0) -> None:
        super().__init__(name, order)
        self.decision = decision
        self.refusals: list[int] = []

    def decide(self, facts: StepFacts) -> Any:
        self._note("decide")
        return self.decision if facts.step == 2 else Decision.APPLY

    def refused(self, step: int) -> None:
        self.refusals.append(step)


@pytest.mark.parametrize("decision", [Decision.SKIP, Decision.STOP])
def test_a_refused_update_changes_nothing_and_is_reported_once(decision: Decision, tmp_path: Path) -> None:
    first = doubles.trainer(tmp_path / "one", settings={"max_steps": 1, "lr_scheduler_type": "constant"})
    first.train()
    trainer = doubles.trainer(tmp_path / "two", settings={"max_steps": 2, "lr_scheduler_type": "constant"})
    extension = Decides(decision)
    later = Decides(Decision.APPLY, "later", 50)
    trainer.add_extension(extension)
    trainer.add_extension(later)
    trainer.train()
    assert trainer.state.global_step == 2
    assert doubles.same(doubles.weights(first), doubles.weights(trainer))
    assert extension.refusals == later.refusals == [2]
    assert len(events_of(later.entries, "decide")) == 1, "the first that refuses decides"


def test_stop_ends_the_run_in_order(tmp_path: Path) -> None:
    trainer = doubles.trainer(tmp_path, settings={"max_steps": 5})
    extension = Decides(Decision.STOP)
    trainer.add_extension(extension)
    output = trainer.train()
    assert output.global_step == 2
    assert "train_loss" in trainer.state.log_history[-1]
    assert [entry.partition(".")[2] for entry in extension.entries[-2:]] == ["finish", "close"]
    assert "decides.on_error" not in extension.entries


@pytest.mark.parametrize(
    ("event", "wanted"),
    [
        ("decide", "a Decision"),
        ("log", "a dict of names"),
        ("evaluated", "a dict of names"),
        ("state_dict", "a dict"),
    ],
)
def test_an_event_that_returns_nothing_is_an_error(event: str, wanted: str, tmp_path: Path) -> None:
    """A forgotten `return` must not refuse every update."""
    wrong = type("Wrong", (Diary,), {event: lambda self, *args: None})
    settings = {"eval_strategy": "steps", "eval_steps": 1}
    trainer = doubles.trainer(tmp_path, settings=settings, eval_dataset=doubles.samples(4))
    trainer.add_extension(wrong())
    with pytest.raises(ExtensionError, match=f"returned None. It must return {wanted}"):
        trainer.train()


def test_state_that_no_checkpoint_can_have_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Odd(Diary):
        def state_dict(self) -> dict[str, Any]:
            return {"path": Path()}

    odd = Odd()
    trainer = doubles.trainer(tmp_path)
    trainer.add_extension(odd)
    with pytest.raises(ArgumentError, match=r"state_dict\(\) of the extension 'diary'\['path'\] is a"):
        trainer.train()
    assert "diary.window" not in odd.entries
    assert odd.entries.count("diary.close") == 1


# -- errors, and how a run ends ---------------------------------------------------------------------------------------

WITH_ALL_EVENTS = {
    "save_strategy": "steps",
    "save_steps": 1,
    "save_async": False,
    "save_on_exception": True,
    "max_steps": 2,
    "on_nonfinite": "ignore",
    "eval_strategy": "steps",
    "eval_steps": 1,
}


class Diaries(Diary):
    """Refuses step 2, so that `refused` is told."""

    def decide(self, facts: StepFacts) -> Decision:
        self._note("decide")
        return Decision.SKIP if facts.step == 2 else Decision.APPLY


@pytest.mark.parametrize("event", [event for event in EVENTS if event not in ("rewind", "on_error", *OF_SEVERAL)])
def test_an_error_in_an_event_ends_the_run_and_names_its_extension(event: str, tmp_path: Path) -> None:
    if event in ("load", "load_state_dict"):
        before = doubles.trainer(tmp_path, settings=WITH_ALL_EVENTS | {"max_steps": 1}, eval_dataset=doubles.samples(4))
        before.add_extension(Diary("broken"))
        before.train()
    trainer = doubles.trainer(tmp_path, settings=WITH_ALL_EVENTS, eval_dataset=doubles.samples(4))
    broken = Diaries("broken", 5, fails_in=event)
    others = [Diary("before", -200), Diary("after", 200)]
    for extension in (broken, *others):
        trainer.add_extension(extension)
    with pytest.raises(Broken, match=event) as caught:
        trainer.train(resume_from_checkpoint=event in ("load", "load_state_dict"))
    assert "Raised in the extension 'broken'." in notes_of(caught.value)
    for extension in (broken, *others):
        assert extension.entries.count(f"{extension.name}.close") == 1
    in_run = event not in ("open", "close")
    assert [extension.entries.count(f"{extension.name}.on_error") for extension in others] == [int(in_run)] * 2
    assert lease_files(tmp_path) == []
    assert not trainer._trainwright.run.is_training


def notes_of(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", ()))


def lease_files(folder: Path) -> list[Path]:
    return list(folder.glob(".lease-*"))


@pytest.mark.parametrize("event", ["rewind", "on_error", "close"])
def test_an_error_after_an_error_is_a_note_of_it(event: str, tmp_path: Path) -> None:
    class Failing(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 1:
                raise ZeroDivisionError
            return super().compute_loss(*args, **kwargs)

    settings = {"save_on_exception": True, "save_strategy": "steps", "save_steps": 5, "save_async": False}
    trainer = doubles.trainer(tmp_path, Failing, settings=settings)
    broken = Diary("broken", 5, fails_in=event)
    others = [Diary("before", -200), Diary("after", 200)]
    for extension in (broken, *others):
        trainer.add_extension(extension)
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.train()
    if event != "rewind":
        assert f"Then: Broken('{event}'). Raised in the extension 'broken'." in notes_of(caught.value)
    for extension in (broken, *others):
        assert extension.entries.count(f"{extension.name}.on_error") == 1
        assert extension.entries.count(f"{extension.name}.close") == 1
    assert lease_files(tmp_path) == []
    assert (tmp_path / "checkpoint-1").is_dir() is (event != "rewind"), "what was not rewound is not saved"


def test_a_signal_closes_once(tmp_path: Path) -> None:
    class Signalled(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().compute_loss(*args, **kwargs)

    trainer = doubles.trainer(tmp_path, Signalled, settings={"save_strategy": "steps", "save_steps": 5})
    diary = Diary()
    trainer.add_extension(diary)
    with pytest.raises(SystemExit):
        trainer.train()
    assert diary.entries.count("diary.close") == diary.entries.count("diary.on_error") == 1


def test_a_loop_that_is_left_closes_once(tmp_path: Path) -> None:
    trainer = doubles.trainer(tmp_path)
    diary = Diary()
    trainer.add_extension(diary)
    for step in trainer.steps():
        for batch in step.batches:
            step.backward(step.model(**batch)["loss"])
        step.update()
        break
    assert diary.entries.count("diary.close") == 1
    assert "diary.finish" not in diary.entries
    assert diary.entries.count("diary.micro_batch") == 1


def test_a_refused_run_closes_once(tmp_path: Path) -> None:
    trainer = doubles.trainer(tmp_path, train_dataset=[])
    diary = Diary()
    trainer.add_extension(diary)
    with pytest.raises(ValueError, match="empty"):
        trainer.train()
    heard = [entry for entry in diary.entries if entry != "diary.on_error"]
    assert heard == ["diary.open", "diary.model_ready", "diary.close"]


def test_an_extension_that_leaves_a_run_is_closed_and_hears_no_more(tmp_path: Path) -> None:
    class Leaves(Diary):
        def after_step(self, run: Any) -> None:
            self._note("after_step")
            run.extensions.remove(self)

    trainer = doubles.trainer(tmp_path)
    leaves = Leaves()
    trainer.add_extension(leaves)
    trainer.train()
    assert leaves.entries[-2:] == ["diary.after_step", "diary.close"]
    trainer.train()
    assert leaves.entries.count("diary.open") == leaves.entries.count("diary.close") == 2


# -- a trainer's extensions -------------------------------------------------------------------------------------------


def test_add_extension_refuses_with_the_reason(tmp_path: Path) -> None:
    class Unnamed(Extension):
        pass

    trainer = doubles.trainer(tmp_path)
    with pytest.raises(ArgumentError, match=r"not an extension.*add_callback"):
        trainer.add_extension(TrainerCallback())
    with pytest.raises(ArgumentError, match="not an extension"):
        trainer.add_extension(Diary)
    with pytest.raises(ArgumentError, match="Unnamed has no name"):
        trainer.add_extension(Unnamed())
    for name in RESERVED_NAMES:
        with pytest.raises(ArgumentError, match=f"already an extension named '{name}'"):
            trainer.add_extension(Diary(name))
    trainer.add_extension(Diary())
    with pytest.raises(ArgumentError, match="already an extension named 'diary'"):
        trainer.add_extension(Diary())

    class Adds(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            trainer.add_extension(Diary("late"))

    trainer.add_callback(Adds())
    with pytest.raises(ArgumentError, match="during training"):
        trainer.train()


def test_every_extension_of_ours_has_a_name_that_no_user_can_take(tmp_path: Path) -> None:
    _, seen = trained(tmp_path, *(name for name in MEMBERS if name not in ("a user's", "another of a user's")))
    trainer = doubles.trainer(tmp_path / "other")
    assert len(seen.extensions) >= 9
    for extension in seen.extensions:
        with pytest.raises(ArgumentError, match="already"):
            trainer.add_extension(Diary(extension.name))


def test_a_removed_extension_takes_no_part_in_the_next_run(tmp_path: Path) -> None:
    trainer = doubles.trainer(tmp_path)
    diary = Diary()
    trainer.add_extension(diary)
    trainer.remove_extension(diary)
    trainer.remove_extension(diary)
    trainer.train()
    assert diary.entries == []


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))], ids=["deepcopy", "pickle"]
)
def test_a_copy_has_extensions_of_its_own(copied: Callable[[Any], Any], tmp_path: Path) -> None:
    trainer = doubles.trainer(tmp_path)
    extension = NotesLoss()
    trainer.add_extension(extension)
    trainer.train()
    before = extension.total.clone()
    other = copied(trainer)
    other.train()
    assert torch.equal(extension.total, before)
    assert "sum_of_losses" in other.state.log_history[0]


def test_a_shallow_copy_keeps_its_extensions_when_another_is_added(tmp_path: Path) -> None:
    trainer = doubles.trainer(tmp_path)
    other = copy.copy(trainer)
    diary = Diary()
    other.add_extension(diary)
    trainer.train()
    assert diary.entries == []


def test_a_second_run_begins_the_extension_again(tmp_path: Path) -> None:
    trainer = doubles.trainer(tmp_path)
    diary = Diary()
    trainer.add_extension(diary)
    trainer.train()
    trainer.train()
    for event in ("open", "begin", "finish", "close"):
        assert diary.entries.count(f"diary.{event}") == 2, event


def test_a_check_up_runs_no_extension_of_the_user(tmp_path: Path) -> None:
    trainer = doubles.trainer(tmp_path)
    diary = Diary()
    trainer.add_extension(diary)
    trainer.check()
    assert diary.entries == []


@pytest.mark.costly
def test_a_proof_runs_no_extension_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do the processes that it starts: their recipe has the parts and settings of a trainer, and no extension."""
    monkeypatch.setattr(prove, "processes", lambda trainer, num_steps: (True, "not here", ""))
    trainer = doubles.trainer(tmp_path)
    diary = Diary()
    trainer.add_extension(diary)
    report = trainer.prove(num_steps=2)
    assert [proof.holds for proof in report.proofs] == [True] * 4
    assert diary.entries == []


@pytest.mark.costly
def test_speed_measures_without_extensions_of_the_user(tmp_path: Path) -> None:
    """The run itself has them; the copies in which `speed` compares settings do not."""
    trainer = doubles.trainer(tmp_path, settings={"speed": "auto", "max_steps": 2})
    diary = Diary()
    trainer.add_extension(diary)
    trainer.train()
    assert diary.entries.count("diary.micro_batch") == 2


@pytest.mark.costly
def test_each_trial_of_a_search_begins_the_extension_again(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    diary = Diary()
    trainer = doubles.trainer(
        tmp_path, model_init=lambda: doubles.model(), eval_dataset=doubles.samples(8), settings={"max_steps": 2}
    )
    trainer.add_extension(diary)
    trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)},
        n_trials=2,
        direction="minimize",
        backend="optuna",
    )
    for event in ("open", "begin", "finish", "close"):
        assert diary.entries.count(f"diary.{event}") == 2, event


# -- a state for each process -----------------------------------------------------------------------------------------


def test_a_state_is_saved_and_given_back(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "lr_scheduler_type": "constant"}
    whole = doubles.trainer(tmp_path / "whole", settings=settings | {"max_steps": 4})
    expected = NotesLoss()
    whole.add_extension(expected)
    whole.train()
    for max_steps in (2, 4):
        trainer = doubles.trainer(tmp_path / "cut", settings=settings | {"max_steps": max_steps})
        extension = NotesLoss()
        trainer.add_extension(extension)
        trainer.train(resume_from_checkpoint=max_steps == 4)
    assert torch.equal(extension.total, expected.total)
    assert load_plain(tmp_path / "cut" / "checkpoint-4" / EXTENSIONS_NAME)["mean_loss"]["total"] == expected.total


def test_a_state_in_the_background_is_that_of_its_step(tmp_path: Path) -> None:
    """Plain values too: a list that the next step changes is copied."""

    class Lists(Extension):
        name = "lists"

        def __init__(self) -> None:
            self.steps: list[int] = []

        def after_step(self, run: Any) -> None:
            self.steps.append(run.progress.state.global_step)

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.steps = state["steps"]

    settings = {"save_strategy": "steps", "save_steps": 1, "save_async": True}
    trainer = doubles.trainer(tmp_path, settings=settings)
    trainer.add_extension(Lists())
    trainer.train()
    for step in (1, 2, 3):
        state = load_plain(tmp_path / f"checkpoint-{step}" / EXTENSIONS_NAME)
        assert state["lists"]["steps"] == list(range(1, step + 1))


def test_an_extension_without_a_saved_state_begins_anew(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    doubles.trainer(tmp_path, settings=settings).train()
    trainer = doubles.trainer(tmp_path, settings=settings | {"max_steps": 3})
    diary = Diary()
    trainer.add_extension(diary)
    trainer.train(resume_from_checkpoint=True)
    assert "diary.load_state_dict" not in diary.entries
    assert diary.entries.count("diary.after_step") == 1


@pytest.mark.process
@pytest.mark.timeout(200)
def test_each_process_has_a_state_of_its_own(tmp_path: Path) -> None:
    done = run_ranks(Path(__file__).with_name("extensions_of_two.py"), str(tmp_path / "run"), folder=tmp_path)
    seen = [told["seen"] for told in done.told]
    assert [told["before"] for told in done.told] == [told["loaded"] for told in done.told]
    assert sorted(seen[0] + seen[1]) == list(range(16)), "four steps of two times two samples, each in one process"
    assert set(seen[0]).isdisjoint(seen[1])


class Ids(Extension):
    """Notes which samples each micro-batch says that it has, and which it has."""

    name = "ids"

    def __init__(self) -> None:
        self.said: list[list[int]] = []
        self.there: list[list[int]] = []

    def micro_batch(self, batch: MicroBatch) -> None:
        self.said.append(list(batch.sample_ids))  # type: ignore[arg-type]
        self.there.append(batch.inputs["i"].tolist())


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_a_micro_batch_names_its_samples(is_cut: bool, tmp_path: Path) -> None:
    error = window_law.OUT_OF_MEMORY if is_cut else None
    cls = type("Cut", (window_law.Counting,), {"error": error})
    trainer = window_law.make(tmp_path, cls, auto_find_batch_size=is_cut)
    ids = Ids()
    trainer.add_extension(ids)
    trainer.train()
    assert ids.said == ids.there
    assert sorted({len(one) for one in ids.said}) == ([2, 4] if is_cut else [4])


def test_no_batch_is_held_after_a_run(tmp_path: Path) -> None:
    trainer = window_law.make(tmp_path)
    trainer.train()
    assert trainer._trainwright.run.progress.window.current is None
    assert trainer._trainwright.run.progress.window.part is None
