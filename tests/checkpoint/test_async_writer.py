"""Checkpoints that are written while training goes on: the same bytes, one at a time, and nobody finds half of one."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from trainwright import Trainer, TrainerCallback
from trainwright.checkpoint import deferred_io, store
from trainwright.checkpoint.deferred_io import HostBuffers
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore, verified
from trainwright.errors import CheckpointError, CheckpointWriteError

from .._support.small import data, make_trainer, models, module

SAVING = {"save_strategy": "steps", "save_steps": 4, "num_train_epochs": 1}
KINDS: dict[str, Any] = {
    "plain": dict,
    "transformers": lambda: {"model": models.seeded(models.bert), "train_dataset": data.texts(26)},
    "tied": lambda: {"model": models.seeded(models.gpt2), "train_dataset": data.sequences(26)},
}


def content(folder: Path) -> dict[str, bytes]:
    """Without the two files that name the directory or the time."""
    own = ("manifest.json", "training_args.json", "training_args.bin")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name not in own}


class Threads:
    """The names of the threads that committed checkpoints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        commit = CheckpointStore.commit

        def observed(*args: Any) -> Path:
            self.names.append(threading.current_thread().name)
            return commit(*args)

        monkeypatch.setattr(CheckpointStore, "commit", observed)

    def pop(self) -> set[str]:
        names = set(self.names)
        self.names.clear()
        return names


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


BEHIND = {"checkpoint-writer"}
AT_ONCE = {"MainThread"}


@pytest.mark.parametrize("parts", KINDS.values(), ids=KINDS.keys())
def test_the_bytes_are_those_of_a_save_that_waits(parts: Any, threads: Threads, tmp_path: Path) -> None:
    make_trainer(tmp_path / "a", **SAVING, **parts()).train()
    assert threads.pop() == BEHIND
    make_trainer(tmp_path / "b", **SAVING, save_async=False, **parts()).train()
    assert threads.pop() == AT_ONCE
    for step in (4, 7):
        one, other = (content(tmp_path / name / f"checkpoint-{step}") for name in "ab")
        assert one.keys() == other.keys()
        assert [name for name in one if one[name] != other[name]] == []


class Gate(TrainerCallback):
    """Commits wait until a later step was trained."""

    def __init__(self, opens_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opens_at = opens_at
        self.event = threading.Event()
        commit = CheckpointStore.commit

        def waiting(*args: Any) -> Path:
            assert self.event.wait(60)
            return commit(*args)

        monkeypatch.setattr(CheckpointStore, "commit", waiting)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.opens_at:
            assert CheckpointStore(args.output_dir).steps() == []
            self.event.set()


def test_training_continues_while_a_checkpoint_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_trainer(tmp_path, **SAVING, save_total_limit=1, callbacks=[Gate(6, monkeypatch)]).train()
    assert CheckpointStore(tmp_path).steps() == [7]
    assert verified(tmp_path / "checkpoint-7")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_what_is_written_later_is_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The gate opens after two more steps changed weights and optimizer in place."""
    make_trainer(tmp_path / "a", **SAVING, callbacks=[Gate(6, monkeypatch)]).train()
    monkeypatch.undo()
    make_trainer(tmp_path / "b", **SAVING, save_async=False).train()
    one, other = (content(tmp_path / name / "checkpoint-4") for name in "ab")
    assert one == other


def test_who_looks_meanwhile_finds_nothing_and_disturbs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Looking for the newest checkpoint finishes what dead processes began, and this one is alive."""
    flush = store.flush
    is_flushing = threading.Event()
    has_looked = threading.Event()

    def waiting(folder: Path) -> None:
        is_flushing.set()
        assert has_looked.wait(60)
        flush(folder)

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 6:
                assert is_flushing.wait(60)  # all is written and listed, and has not its final name yet
                assert store.get_last_checkpoint(tmp_path) is None
                CheckpointStore(tmp_path).clean()
                has_looked.set()

    monkeypatch.setattr(store, "flush", waiting)
    make_trainer(tmp_path, **SAVING, callbacks=[Looks()]).train()
    assert CheckpointStore(tmp_path).steps() == [4, 7]
    assert verified(tmp_path / "checkpoint-4")


def test_a_save_waits_for_the_one_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []
    for name in ("stage", "commit"):
        original = getattr(CheckpointStore, name)
        monkeypatch.setattr(
            CheckpointStore, name, lambda *args, n=name, o=original: (o(*args), order.append(n))[0]
        )  # appended when it is done
    make_trainer(tmp_path, **SAVING | {"save_steps": 1}).train()
    assert order == ["stage", "commit"] * 7


# -- who needs the files at once -------------------------------------------------------------------------------------

HOOKS = (
    "_save_checkpoint",
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
    "_maybe_log_save_evaluate",
)


@pytest.mark.parametrize("name", HOOKS)
def test_an_override_finds_its_files(name: str, threads: Threads, tmp_path: Path) -> None:
    def override(self: Trainer, *args: Any, **kwargs: Any) -> None:
        getattr(Trainer, name)(self, *args, **kwargs)
        if name in ("save_model", "_save"):
            assert (Path(args[0]) / "model.safetensors").is_file()
        if name == "_save_optimizer_and_scheduler":
            assert (Path(args[0]) / "optimizer.pt").is_file()
        if name == "_save_checkpoint" or (name == "_maybe_log_save_evaluate" and self.state.global_step == 4):
            assert verified(tmp_path / f"checkpoint-{self.state.global_step}")

    make_trainer(tmp_path, cls=type("Sub", (Trainer,), {name: override}), **SAVING).train()
    assert threads.pop() == AT_ONCE


class Reads(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert verified(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def test_a_callback_that_is_told_of_a_save_finds_the_checkpoint(threads: Threads, tmp_path: Path) -> None:
    make_trainer(tmp_path, **SAVING, callbacks=[Reads()]).train()
    assert threads.pop() == AT_ONCE


class OnlyCounts(Reads):
    """Says that it does not look at the files."""

    looks_at_files = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize("parts", [{"callbacks": [OnlyCounts()]}, {"report_to": "tensorboard"}])
def test_a_listener_that_does_not_look_at_files_delays_nothing(parts: Any, threads: Threads, tmp_path: Path) -> None:
    make_trainer(tmp_path, **SAVING, **parts).train()
    assert threads.pop() == BEHIND


def test_an_override_on_the_instance_finds_its_files(threads: Threads, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SAVING)
    trainer._save = lambda *args: Trainer._save(trainer, *args)
    trainer.train()
    assert threads.pop() == AT_ONCE


def test_outside_of_training_a_save_is_there_when_it_returns(threads: Threads, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.create_optimizer_and_scheduler(10)
    trainer._save_checkpoint(trainer.model, None)
    assert threads.pop() == AT_ONCE
    assert CheckpointStore(tmp_path).steps() == [0]


def test_the_best_checkpoint_is_there_when_it_is_loaded(threads: Threads, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        **SAVING,
        eval_strategy="steps",
        eval_steps=4,
        load_best_model_at_end=True,
        eval_dataset=data.vectors(8),
    )
    trainer.train()
    assert threads.pop() == BEHIND
    assert Path(trainer.state.best_model_checkpoint).is_dir()


# -- what goes wrong -------------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, *, at: int) -> None:
    commit = CheckpointStore.commit

    def fails(self: CheckpointStore, staging: Path, manifest: Manifest) -> Path:
        if manifest.step == at:
            raise error
        return commit(self, staging, manifest)

    monkeypatch.setattr(CheckpointStore, "commit", fails)


@pytest.mark.parametrize("save_async", [None, False])
@pytest.mark.parametrize("at", [4, 7])
def test_an_error_reaches_the_user(
    at: int, save_async: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one of step 4 at the next save, the one of the last step at the end."""
    failing(monkeypatch, OSError(28, "No space left on device"), at=at)
    trainer = make_trainer(tmp_path, **SAVING, save_async=save_async)
    with pytest.raises(CheckpointWriteError, match=r"No space left on device.*untouched") as caught:
        trainer.train()
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, CheckpointError)
    assert CheckpointStore(tmp_path).steps() == ([] if at == 4 else [4])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("save_async", [None, False])
def test_training_goes_on_if_that_is_asked_for(
    save_async: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch, OSError(28, "No space left on device"), at=4)
    trainer = make_trainer(tmp_path, **SAVING, save_async=save_async, save_failure="continue")
    with caplog.at_level(logging.ERROR, logger="trainwright"):
        trainer.train()
    assert "No space left on device" in caplog.text
    assert CheckpointStore(tmp_path).steps() == [7]
    assert trainer._trainwright.run.progress.saved_step == 7


def test_a_mistake_in_a_hook_is_not_reported_as_a_full_disk(tmp_path: Path) -> None:
    class Wrong(Trainer):
        def _save(self, *args: Any, **kwargs: Any) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        make_trainer(tmp_path, cls=Wrong, **SAVING, save_failure="continue").train()


def test_an_error_of_training_is_not_hidden_by_one_of_the_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch, OSError(5, "the disk"), at=4)

    class Breaks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, logger="trainwright"), pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, **SAVING, callbacks=[Breaks()]).train()
    assert "the disk" in caplog.text


def no_memory(*args: Any, **kwargs: Any) -> None:
    raise MemoryError


def refused_by_the_system(*args: Any) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize(
    ("owner", "name", "patch"),
    [
        (deferred_io, "available_bytes", lambda: 0),
        (HostBuffers, "_fill", no_memory),
        (HostBuffers, "_reserve", refused_by_the_system),
    ],
    ids=["little is available", "a copy fails", "the system refuses"],
)
def test_where_memory_is_short_it_waits(
    owner: Any, name: str, patch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written: list[str] = []
    monkeypatch.setattr(owner, name, patch)
    put = deferred_io.DeferredSink.put

    def observed(self: Any, tree: Any, write: Any) -> None:
        if tree:  # random states are not copied, so no memory is short for them
            put(self, tree, lambda copied: (written.append(threading.current_thread().name), write(copied)))
        else:
            put(self, tree, write)

    monkeypatch.setattr(deferred_io.DeferredSink, "put", observed)
    make_trainer(tmp_path, model=module(), **SAVING | {"log_level": "warning"}).train()
    assert set(written) == AT_ONCE
    assert "Training pauses while a file of a checkpoint is written" in caplog.text
    assert verified(tmp_path / "checkpoint-7")
