"""Files of checkpoints that callbacks, overrides and people change after they were written: they verify again."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from trainwright import Trainer, TrainerCallback
from trainwright.checkpoint import changes
from trainwright.checkpoint.changes import read_marks
from trainwright.checkpoint.manifest import Manifest, describe_files, find_problem
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError

from .._support import forked
from .._support.small import data, make_trainer
from ..cli.commands import call

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
Change = Callable[[Path], None]


def halve(folder: Path) -> None:
    """Other bytes of the same length, in place."""
    path = folder / "model.safetensors"
    halved = {name: tensor / 2 for name, tensor in safetensors.torch.load_file(path).items()}
    content = safetensors.torch.save(halved, metadata={"format": "pt"})
    assert len(content) == path.stat().st_size
    path.write_bytes(content)


def reshard(folder: Path) -> None:
    names = {}
    for number, (name, tensor) in enumerate(safetensors.torch.load_file(folder / "model.safetensors").items()):
        names[name] = f"model-{number}.safetensors"
        safetensors.torch.save_file({name: tensor / 2}, folder / names[name], metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def without_optimizer(folder: Path) -> None:
    (folder / "optimizer.pt").unlink()


def add_notes(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "README.md").write_text("of this model")


def rewrite_all(folder: Path) -> None:
    """Another directory takes its place, without a manifest."""
    copy = folder.with_name("being-rewritten")
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("manifest.json"))
    halve(copy)
    shutil.rmtree(folder)
    copy.rename(folder)


def empty_the_one_before(folder: Path) -> None:
    """Only the newest is to keep its optimizer."""
    step = int(folder.name.removeprefix("checkpoint-"))
    (folder.with_name(f"checkpoint-{step - 2}") / "optimizer.pt").unlink(missing_ok=True)


def delete(folder: Path) -> None:
    shutil.rmtree(folder)


CHANGES: list[Change] = [halve, reshard, without_optimizer, add_notes, rewrite_all, empty_the_one_before, delete]


class Changes(TrainerCallback):
    def __init__(self, change: Change) -> None:
        self.change = change

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        for _ in range(20_000):  # with save_async=True it may come later
            if folder.is_dir():
                break
            threading.Event().wait(0.001)
        self.change(folder)


def overriding(name: str, change: Change) -> type[Trainer]:
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        getattr(Trainer, name)(self, *args, **kwargs)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.state.global_step % 2 == 0 and not (folder / "seen").exists():
            change(folder)

    return type("Overriding", (Trainer,), {name: method})


def by_callback(folder: Path, change: Change, **settings: Any) -> Any:
    return make_trainer(folder, callbacks=[Changes(change)], **settings)


def by_override(folder: Path, change: Change, **settings: Any) -> Any:
    return make_trainer(folder, cls=overriding("_save_checkpoint", change), **settings)


WAYS = {
    "on_save": lambda folder, change, **more: by_callback(folder, change, **SAVING, **more),
    "on_save-behind": lambda folder, change, **more: by_callback(folder, change, save_async=True, **SAVING, **more),
    "override": lambda folder, change, **more: by_override(folder, change, **SAVING, **more),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_verify_with_what_a_listener_made_of_them(way: str, change: Change, tmp_path: Path) -> None:
    WAYS[way](tmp_path, change).train()
    steps = [] if change is delete else [2, 4, 6]
    store = CheckpointStore(tmp_path)
    assert store.steps() == steps
    for folder in map(store.path, steps):
        assert find_problem(folder) is None
        manifest = Manifest.read(folder)
        assert manifest is not None
        assert manifest.files == describe_files(folder), "with what was added, without what was deleted"
    assert not list(tmp_path.glob("*/.*"))


@pytest.mark.parametrize("way", WAYS)
def test_the_best_model_is_loaded_as_a_listener_left_it(way: str, tmp_path: Path) -> None:
    scores = {0: 0.0, 2: 1.0, 4: 3.0, 6: 2.0}
    trainer = WAYS[way](
        tmp_path,
        halve,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=data.vectors(4),
        compute_metrics=lambda _: {"score": scores[trainer.state.global_step]},
    )
    trainer.train()
    best = safetensors.torch.load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert all(torch.equal(tensor, best[name]) for name, tensor in trainer.model.state_dict().items())


def test_a_resume_takes_the_weights_that_a_listener_wrote(tmp_path: Path) -> None:
    WAYS["on_save"](tmp_path, halve).train()
    halved = safetensors.torch.load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    resumed = make_trainer(tmp_path, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(tensor, halved[name]) for name, tensor in resumed.model.state_dict().items())


def test_what_override_changes_in_the_save_of_signal_or_error_counts_too(tmp_path: Path) -> None:
    """No `on_save` follows these saves."""
    trainer = by_override(tmp_path, halve, save_on_exception=True, save_strategy="no", max_steps=6)

    class Fails(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise ZeroDivisionError

    trainer.add_callback(Fails)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert find_problem(tmp_path / "checkpoint-2") is None


def test_weights_that_a_listener_made_infinite_are_marked(tmp_path: Path) -> None:
    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        spoilt = {name: tensor / 0 for name, tensor in safetensors.torch.load_file(path).items()}
        safetensors.torch.save_file(spoilt, path, metadata={"format": "pt"})

    WAYS["on_save"](tmp_path, spoil).train()
    assert CheckpointStore(tmp_path).non_finite() == {2, 4, 6}


# -- what it costs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The directories whose files were asked for their marks, and the files that were read again."""
    found: dict[str, list[str]] = {"marks": [], "read": []}
    describe = changes.describe_file

    def marks(folder: Path) -> Any:
        found["marks"].append(folder.name)
        return read_marks(folder)

    def read(path: Path) -> Any:
        found["read"].append(path.name)
        return describe(path)

    monkeypatch.setattr(changes, "read_marks", marks)
    monkeypatch.setattr(changes, "describe_file", read)
    monkeypatch.setattr(changes, "TIME_STEP_NS", -1)  # this disk tells all times apart
    return found


class LooksOnly(TrainerCallback):
    looks_at_files = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


@pytest.mark.parametrize("callbacks", [[], [LooksOnly]], ids=["none", "one that looks at no file"])
def test_without_a_listener_nothing_is_asked(callbacks: Any, looks: dict[str, list[str]], tmp_path: Path) -> None:
    make_trainer(tmp_path, callbacks=callbacks, **SAVING).train()
    assert looks == {"marks": [], "read": []}


def test_unchanged_files_are_not_read_again(looks: dict[str, list[str]], tmp_path: Path) -> None:
    by_callback(tmp_path, lambda folder: None, **SAVING).train()
    assert looks["read"] == []
    assert len(looks["marks"]) == 2 * (1 + 2 + 3), "each checkpoint before and after each save"


def test_only_the_changed_file_is_read_again(looks: dict[str, list[str]], tmp_path: Path) -> None:
    by_callback(tmp_path, halve, **SAVING).train()
    assert looks["read"] == ["model.safetensors"] * 3


def test_a_change_within_one_tick_of_the_disk_is_found(tmp_path: Path) -> None:
    """Same size, time and inode: a file as young as its mark is read."""
    path = tmp_path / "config.json"
    path.write_text("old")
    manifest = Manifest(step=1, run_id="r", files=describe_files(tmp_path))
    manifest.write(tmp_path)
    watch = changes.ChangeWatch(lambda path: None)
    watch.add(tmp_path, manifest)
    before = path.stat()
    path.write_text("new")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    watch.settle()
    assert find_problem(tmp_path) is None


# -- a process that dies in between ------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.checkpoint.test_changes import Changes, SAVING, halve
from tests._support.small import make_trainer
from trainwright.checkpoint import changes

folder, place = sys.argv[1:]

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def change(checkpoint):
    if checkpoint.name == "checkpoint-4":
        halve(checkpoint)
        if place == "listener":
            die()
        changes.write_manifest = die
make_trainer(folder, callbacks=[Changes(change)], **SAVING).train()
"""


@pytest.mark.process
@pytest.mark.parametrize("place", ["listener", "before-the-manifest"])
def test_a_kill_before_the_manifest_is_replaced_leaves_the_one_before(place: str, tmp_path: Path) -> None:
    process = forked.start(["-c", KILLED, str(tmp_path), place], cwd=forked.ROOT)
    output = process.communicate(timeout=120)
    assert process.returncode == -9, output
    assert find_problem(tmp_path / "checkpoint-4") is not None
    assert str(CheckpointStore(tmp_path).latest()) == str(tmp_path / "checkpoint-2")


def test_a_manifest_that_cannot_be_replaced_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(changes, "write_manifest", refuse)
    WAYS["on_save"](tmp_path, halve, log_level="warning").train()
    assert f"trainwright verify --accept {tmp_path / 'checkpoint-2'}" in caplog.text


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_trainer(tmp_path / "run", log_level="warning", **SAVING).train()
    return tmp_path / "run"


@pytest.mark.parametrize("change", [halve, reshard, without_optimizer])
def test_the_error_names_the_command_that_accepts_a_change(
    change: Change, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run / "checkpoint-6"
    change(folder)
    command = f"trainwright verify --accept {folder}"
    with pytest.raises(CheckpointError, match=command):
        make_trainer(run, max_steps=6, log_level="warning").train(resume_from_checkpoint=str(folder))
    assert str(CheckpointStore(run).latest()) == str(run / "checkpoint-4")
    assert command in caplog.text
    assert command in call("verify", str(folder)).stdout
    accepted = call("verify", "--accept", str(folder))
    assert accepted.exit_code == 0, accepted.output
    assert find_problem(folder) is None
    assert str(CheckpointStore(run).latest()) == str(folder)
    assert "no run can resume" not in accepted.stdout


def test_accepting_a_checkpoint_that_no_run_can_resume_from_says_so(run: Path) -> None:
    (run / "checkpoint-6" / "trainer_state.json").unlink()
    accepted = call("verify", "--accept", str(run / "checkpoint-6"))
    assert accepted.exit_code == 0
    assert "no run can resume from it" in accepted.stdout


def test_each_difference_is_printed(run: Path) -> None:
    halve(run / "checkpoint-2")
    without_optimizer(run / "checkpoint-4")
    add_notes(run / "checkpoint-6")
    lines = call("verify", "--accept", str(run)).stdout.splitlines()
    assert [line.strip() for line in lines if line.startswith(" ")] == [
        "model.safetensors was changed, and is accepted",
        "optimizer.pt was deleted, and is accepted",
        "notes/README.md was added, and is accepted",
    ]
    assert "intact" in call("verify", str(run)).stdout
    found = json.loads(call("verify", "--accept", "--json", str(run)).stdout)
    assert [one["accepted"] for one in found] == [{}, {}, {}]


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_checkpoint_without_a_sound_manifest_is_not_accepted(damage: str, run: Path) -> None:
    path = run / "checkpoint-6" / "manifest.json"
    if damage == "missing":
        path.unlink()
    else:
        path.write_text("{")
    result = call("verify", "--accept", str(path.parent))
    assert result.exit_code == 1
    assert f"manifest.json is {damage}" in result.stderr


def test_a_link_out_of_the_checkpoint_is_not_accepted(run: Path) -> None:
    (run / "checkpoint-6" / "more").symlink_to("/")
    result = call("verify", "--accept", str(run / "checkpoint-6"))
    assert result.exit_code == 1
    assert "more is a link that leaves" in result.stderr


def test_a_file_outside_that_the_manifest_names_is_not_accepted(run: Path) -> None:
    folder = run / "checkpoint-6"
    Manifest(step=6, run_id="r", files={"../secret": {"size": 1, "xxh3": "0" * 16}}).write(folder)
    result = call("verify", "--accept", str(folder))
    assert result.exit_code == 1
    assert "is outside the directory" in result.stderr
