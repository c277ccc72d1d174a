"""Checkpoint: opened once and asked by name; what it returns, what it keeps, and how often a resume reads a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import Trainer, TrainerCallback
from trainwright._types import EXTENSIONS_NAME
from trainwright.checkpoint import rng
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.entries import FILES, name_entry_file
from trainwright.checkpoint.manifest import describe_files
from trainwright.errors import CheckpointError
from trainwright.loop.extension import Extension
from trainwright.run import resume
from trainwright.support.tensor_tree import iterate_tensors

from .._support.opened import opened_files
from .._support.small import StopAt, differing, make_trainer, sign_again, weights
from .._support.two_processes import run as run_processes
from ..loop.test_window_law import make as make_with_everything

STOP = 3
ONCE = ("manifest.json", "trainer_state.json", "training_args.json")
OF_EXTENSIONS = (
    FILES["guard"],
    FILES["recorded_metrics"],
    FILES["ledger"],
    FILES["curriculum"],
    FILES["checkpoint_items"],
)


def make_plain(folder: Path, callbacks: Any) -> Any:
    return make_trainer(folder, callbacks=callbacks, save_async=False)


def make_full(folder: Path, callbacks: Any) -> Any:
    """A trainer with guard, ledger, curriculum, recorded metrics and checkpoint items."""
    return make_with_everything(folder, callbacks=callbacks)


class FirstStep(TrainerCallback):
    """Copies the counts of opened files when the first step is done, and looks at what the run keeps of it."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts
        self.at_first_step: dict[str, int] | None = None
        self.trainer: Any = None
        self.kept_tensors: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.at_first_step is None:
            self.at_first_step = dict(self.counts)
            self.kept_tensors = len(list(iterate_tensors(vars(self.trainer._trainwright.run.resumed.checkpoint))))


def resumed(make: Callable[..., Any], folder: Path, how: Any) -> tuple[Any, FirstStep]:
    """Resumes a run; returns the trainer and what was opened until the end of its first step."""
    with opened_files() as counts:
        callback = FirstStep(counts)
        callback.trainer = trainer = make(folder, [callback])
        trainer.train(resume_from_checkpoint=how)
    assert callback.at_first_step is not None
    return trainer, callback


@pytest.fixture(params=[make_plain, make_full])
def stopped(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A run that was stopped, with and without extensions: how its trainer is made, and its directory."""
    request.param(tmp_path, [StopAt(STOP)]).train()
    return request.param, tmp_path


@pytest.mark.parametrize("how", ["named", True, "auto"])
def test_a_resume_reads_manifest_state_and_arguments_once(stopped: Any, how: Any) -> None:
    make, folder = stopped
    name = f"checkpoint-{STOP}"
    trainer, callback = resumed(make, folder, str(folder / name) if how == "named" else how)
    assert trainer.state.global_step > STOP
    assert {file: callback.at_first_step.get(f"{name}/{file}") for file in ONCE} == dict.fromkeys(ONCE, 1)
    assert callback.at_first_step[f"{name}/rng_state.pth"] == 2, "it is verified, and loaded once"
    if make is make_full:
        assert all(f"{name}/{file}" in callback.at_first_step for file in OF_EXTENSIONS)
        assert callback.at_first_step[f"{name}/{FILES['guard']}"] == 1
        assert callback.at_first_step[f"{name}/{FILES['recorded_metrics']}"] == 1


def test_the_open_checkpoint_of_a_run_holds_no_tensors_once_it_trains(stopped: Any) -> None:
    make, folder = stopped
    _, callback = resumed(make, folder, str(folder / f"checkpoint-{STOP}"))
    assert callback.kept_tensors == 0


@pytest.mark.parametrize("damaged", ["manifest.json", "trainer_state.json", "scheduler.pt"])
def test_beside_a_damaged_one_the_resumed_checkpoint_is_read_once(damaged: str, tmp_path: Path) -> None:
    make_trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=4, save_async=False).train()
    path = tmp_path / "checkpoint-4" / damaged
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    _, callback = resumed(make_plain, tmp_path, True)
    counts = callback.at_first_step
    assert {file: counts.get(f"checkpoint-2/{file}") for file in ONCE} == dict.fromkeys(ONCE, 1)
    assert counts["checkpoint-4/manifest.json"] >= 1


@pytest.mark.process
def test_each_of_two_processes_reads_manifest_and_state_once(tmp_path: Path) -> None:
    script = """
        from tests._support.opened import opened_files
        from tests._support.small import StopAt, make_trainer
        from tests._support.two_processes import tell
        make_trainer("run", callbacks=[StopAt(2)], save_async=False).train()
        with opened_files() as counts:
            trainer = make_trainer("run", save_strategy="no")
            trainer.train(resume_from_checkpoint=True)
        names = ("manifest.json", "trainer_state.json")
        tell(counts=[counts[f"checkpoint-2/{name}"] for name in names], step=trainer.state.global_step)
    """
    done = run_processes(script, folder=tmp_path)
    assert [told["counts"] for told in done.told] == [[1, 1], [1, 1]]
    assert all(told["step"] > 2 for told in done.told)


@pytest.mark.process
@pytest.mark.parametrize("has_manifest", [True, False])
def test_processes_that_see_different_checkpoints_are_told(has_manifest: bool, tmp_path: Path) -> None:
    script = f"""
        import os
        import shutil
        from pathlib import Path
        from tests._support.small import StopAt, make_trainer, sign_again
        from tests._support.two_processes import tell
        from trainwright.errors import TrainwrightError
        trainer = make_trainer("run", callbacks=[StopAt(2)], save_async=False)
        trainer.train()
        if trainer.is_world_process_zero():
            shutil.copytree("run", "other/run")
            state = Path("other/run/checkpoint-2/trainer_state.json")
            state.write_text(state.read_text() + " ")
            sign_again(state.parent)
            if not {has_manifest}:
                for folder in ("run", "other/run"):
                    for name in ("manifest.json", "training_args.json"):
                        Path(folder, "checkpoint-2", name).unlink()
        trainer.accelerator.wait_for_everyone()
        if not trainer.is_world_process_zero():
            os.chdir("other")
        trainer = make_trainer("run", save_strategy="no")
        try:
            trainer.train(resume_from_checkpoint="run/checkpoint-2")
        except TrainwrightError as error:  # of the process itself, or of the one that failed first
            os.chdir(Path(os.environ["TOLD_FOLDER"]))
            tell(error=str(error))
    """
    done = run_processes(script, folder=tmp_path)
    assert ["process 1 sees another one" in told.get("error", "") for told in done.told] == [True, True], done.out


# -- what it returns ---------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make_trainer(tmp_path, callbacks=[StopAt(STOP)], save_async=False).train()
    return tmp_path / f"checkpoint-{STOP}"


def test_what_is_loaded_is_what_was_verified(saved: Path) -> None:
    checkpoint = Checkpoint(saved)
    assert checkpoint.find_problem() is None
    for name in ("trainer_state.json", "training_args.json"):
        (saved / name).write_text("{}")
    assert checkpoint.state.global_step == STOP
    assert checkpoint.arguments["per_device_train_batch_size"] == 4
    assert Checkpoint(saved).find_problem() is not None


def test_a_run_changes_its_own_copy_of_the_record(saved: Path) -> None:
    checkpoint = Checkpoint(saved)
    before = json.dumps(vars(checkpoint.state), default=str)
    state = resume.initial_state(checkpoint, [])
    assert state.log_history == checkpoint.state.log_history
    state.global_step += 1
    state.log_history.append({"step": 99})
    state.stateful_callbacks["TrainerControl"]["args"]["should_save"] = "changed"
    assert json.dumps(vars(checkpoint.state), default=str) == before


def test_checkpoint_of_transformers_has_no_manifest_and_is_read_all_the_same(saved: Path) -> None:
    for name in ("manifest.json", "training_args.json"):
        (saved / name).unlink()
    checkpoint = Checkpoint(saved)
    assert (checkpoint.manifest, checkpoint.cursor, checkpoint.arguments) == (None, None, None)
    assert (checkpoint.find_problem(), checkpoint.non_finite_mark) == (None, None)
    assert checkpoint.state.global_step == STOP
    assert checkpoint.identity == Checkpoint(saved).identity
    (saved / "trainer_state.json").write_text("{}")
    assert checkpoint.identity != Checkpoint(saved).identity


def test_opening_reads_nothing_and_an_error_names_the_file(tmp_path: Path) -> None:
    with opened_files() as counts:
        checkpoint = Checkpoint(tmp_path / "checkpoint-7")
        assert counts == {}
    assert checkpoint.identity is None
    with pytest.raises(CheckpointError, match=r"checkpoint-7 has no trainer_state\.json, so its step is unknown"):
        _ = checkpoint.state
    checkpoint.path.mkdir()
    (checkpoint.path / "trainer_state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"trainer_state\.json cannot be read: .*Use another checkpoint"):
        _ = checkpoint.state


def test_random_states_are_of_a_process_and_set_once(tmp_path: Path) -> None:
    states = []
    for rank in range(2):
        torch.manual_seed(rank)
        states.append(rng.capture())
        rng.save(tmp_path / rng.file_name(rank, 2), states[rank])
    checkpoint = Checkpoint(tmp_path)
    for rank, expected in enumerate(states):
        assert torch.equal(checkpoint.random_states(rank, 2)["cpu"], expected["cpu"])
        assert checkpoint.restore_random_states(rank, 2)
        assert torch.equal(torch.get_rng_state(), expected["cpu"])
    assert checkpoint.random_states(2, 3) is None
    assert not checkpoint.restore_random_states(2, 3)
    assert torch.equal(checkpoint.random_states(0, 3)["cpu"], states[0]["cpu"]), "the first process has those"
    assert torch.equal(checkpoint.first_random_states()["cpu"], states[0]["cpu"])


# -- entries -----------------------------------------------------------------------------------------------------------


def test_files_of_versions_0_1_and_0_2_keep_their_names() -> None:
    older = {
        "guard": "guard_state.json",
        "recorded_metrics": "recorded_metrics.json",
        "ledger": "ledger.parquet",
        "curriculum": "curriculum.pt",
        "checkpoint_items": "checkpoint_items.pt",
        "data_position": "data_position.pth",
    }
    assert FILES.items() >= older.items()


@pytest.mark.parametrize("name", [*FILES, "ema"])
def test_an_entry_that_was_not_saved_is_empty(name: str, tmp_path: Path) -> None:
    entry = Checkpoint(tmp_path).entry(name)
    assert (entry.path, entry.is_own, entry.state()) == (None, False, {})
    torch.save({"other": {"steps": 1}}, tmp_path / EXTENSIONS_NAME)
    assert Checkpoint(tmp_path).entry(name).state() == {}


class MeanWeights(Extension):
    """An extension with a state, without a file of its own."""

    name = "mean_weights"

    def __init__(self) -> None:
        self.num_steps = 0
        self.begun_at: int | None = None
        self.found: Any = None

    def begin(self, run: Any) -> None:
        self.begun_at = self.num_steps

    def after_step(self, run: Any) -> None:
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "weights": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]

    def load(self, checkpoint: Any) -> None:
        self.found = checkpoint.entry(self.name).state()


def test_the_entry_of_an_extension_of_the_user_is_its_state(tmp_path: Path) -> None:
    first = make_trainer(tmp_path, callbacks=[StopAt(STOP)], save_async=False)
    first.add_extension(MeanWeights())
    first.train()
    second = make_trainer(tmp_path, save_strategy="no")
    extension = MeanWeights()
    second.add_extension(extension)
    second.train(resume_from_checkpoint=True)
    state = Checkpoint(tmp_path / f"checkpoint-{STOP}").entry("mean_weights").state()
    assert (state["num_steps"], state["weights"].tolist()) == (STOP, [1.0, 1.0])
    assert (extension.begun_at, extension.found["num_steps"]) == (STOP, STOP)


def test_a_process_without_an_entry_takes_that_of_the_first_one(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"rank": rank}, tmp_path / rng.file_name(rank, 2, FILES["checkpoint_items"]))
    checkpoint = Checkpoint(tmp_path)
    found = [checkpoint.entry("checkpoint_items", rank=rank, num_processes=2) for rank in range(3)]
    assert [(entry.is_own, entry.state()["rank"]) for entry in found] == [(True, 0), (True, 1), (False, 0)]


@pytest.mark.parametrize("name", ["guard", "curriculum"])
def test_a_state_that_no_run_writes_is_an_error_with_its_file(name: str, tmp_path: Path) -> None:
    def is_sound(state: dict[str, Any]) -> bool:
        return state["a"] > 1

    path = tmp_path / name_entry_file(name)
    for wrong in ({"a": 1}, {"a": "x"}, [1]):
        if name == "guard":
            path.write_text(json.dumps(wrong))
        else:
            torch.save(wrong, path)
        with pytest.raises(CheckpointError, match=rf"{path.name} holds invalid values"):
            Checkpoint(tmp_path).entry(name).state(is_sound)


def test_an_entry_that_is_damaged_names_its_file(tmp_path: Path) -> None:
    for name in ("guard", "curriculum"):
        (tmp_path / name_entry_file(name)).write_bytes(b"\x80?")
        with pytest.raises(CheckpointError, match=name_entry_file(name)):
            Checkpoint(tmp_path).entry(name).state()


# -- overrides ---------------------------------------------------------------------------------------------------------


def test_a_hook_that_names_another_checkpoint_reads_that_one(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=4, save_async=False).train()
    other = tmp_path / "checkpoint-4"

    class Redirected(Trainer):
        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
            assert resume_from_checkpoint == str(tmp_path / "checkpoint-2")
            super()._load_from_checkpoint(str(other), model)

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            assert checkpoint == str(tmp_path / "checkpoint-2")
            super()._load_optimizer_and_scheduler(str(other))

        def _load_rng_state(self, checkpoint: str | None) -> None:
            assert checkpoint == str(tmp_path / "checkpoint-2")
            super()._load_rng_state(str(other))

    class AtBegin(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.weights = weights(model)
            self.updates = {int(one["step"]) for one in kwargs["optimizer"].state.values()}

    begin = AtBegin()
    with opened_files() as counts:
        trainer = make_trainer(tmp_path, cls=Redirected, callbacks=[begin], max_steps=5, save_strategy="no")
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = make_trainer(tmp_path).model
    Checkpoint(other).load_weights(expected, shards=Whole(), load=torch.nn.Module.load_state_dict)
    assert differing(begin.weights, weights(expected)) == {}
    assert begin.updates == {4}
    assert counts["checkpoint-4/rng_state.pth"] == 1 + 1, "read once, and verified because it is ahead of the run"
    assert trainer.state.global_step == 5


class Whole:
    """Reader for checkpoints without shards."""

    def has_weights(self, folder: Path) -> bool:
        return False

    def read_weights(self, folder: Path) -> dict[str, torch.Tensor]:
        raise AssertionError


def test_an_inner_loop_that_names_another_checkpoint_resumes_from_it(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=4, save_async=False).train()

    class Redirected(Trainer):
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            kwargs["resume_from_checkpoint"] = str(tmp_path / "checkpoint-4")
            return super()._inner_training_loop(*args, **kwargs)

    class Steps(TrainerCallback):
        def __init__(self) -> None:
            self.done: list[int] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.done.append(state.global_step)

    steps = Steps()
    trainer = make_trainer(tmp_path, cls=Redirected, callbacks=[steps], max_steps=5, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert steps.done == [5]


def test_a_manifest_signed_again_is_read_when_opened_again(saved: Path) -> None:
    first = Checkpoint(saved)
    assert first.manifest is not None
    (saved / "notes.txt").write_text("mine")
    sign_again(saved)
    second = Checkpoint(saved)
    assert second.manifest.files == describe_files(saved)
    assert "notes.txt" not in first.manifest.files
