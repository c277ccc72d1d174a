"""Bundles: what is written of a bad step, an error, full memory, a hang and a request; training notices nothing."""

import json
import logging
import random
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import default_data_collator

import trainwright
from trainwright.capabilities.incidents import bundle
from trainwright.capabilities.incidents.probe import find_bad_rows
from trainwright.checkpoint.manifest import find_problem
from trainwright.errors import BundleError, NonFiniteError

from ..._support import forked
from ...contract import doubles
from ..guard.poisoned import BATCH, POISONS, Hears, LeavesOut, Model, samples, trained, trainer
from ..guard.test_step_guard import decide_on_the_device

ROW = 5


class Drops(Model):
    """With dropout: its loss is the same only from the same random states."""

    def __init__(self) -> None:
        super().__init__()
        self.body.append(nn.Dropout(0.4))


def dropping() -> nn.Module:
    return doubles.model(Drops)


class DrawsFrom(Model):
    """Its loss depends on numbers of python's and numpy's generators, from its forward pass number `first` on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.num = 0

    def forward(self, x: Any, labels: Any = None, constant: Any = None, flat: Any = None) -> dict[str, Any]:
        self.num += 1
        if self.num >= self.first:
            x = x * (random.random() + float(np.random.rand()))
        return super().forward(x, labels, constant, flat)


@pytest.mark.parametrize(("first", "is_exact"), [(1, True), (2, False)])
def test_a_model_that_draws_from_numpy(first: int, is_exact: bool, tmp_path: Path) -> None:
    """All states are copied where the first step of a run drew from them; a bundle says where one is missing."""
    trained(tmp_path, model=DrawsFrom(first), poison={ROW: POISONS["gradient-alone"]}, settings={"max_steps": 4})
    assert only_one(tmp_path)["is_exact"] == is_exact


class DrawsFromTorch(Model):
    """Its loss depends on numbers of torch's generator, from its forward pass number `first` on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.num = 0

    def forward(self, x: Any, labels: Any = None, constant: Any = None, flat: Any = None) -> dict[str, Any]:
        self.num += 1
        if self.num >= self.first:
            x = x * torch.rand(())
        return super().forward(x, labels, constant, flat)


@pytest.mark.parametrize(("first", "is_exact"), [(1, True), (2, False), (100, True)])
def test_a_model_that_draws_from_torch(first: int, is_exact: bool, tmp_path: Path) -> None:
    """Nothing is copied for a model whose first step drew nothing; a bundle says where a later one did."""
    trained(tmp_path, model=DrawsFromTorch(first), poison={ROW: POISONS["gradient-alone"]}, settings={"max_steps": 4})
    assert only_one(tmp_path)["is_exact"] == is_exact


class NotesListeners(trainwright.TrainerCallback):
    """The number of listeners to the events of a step, after each step."""

    trainer: Any

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        extensions = self.trainer._trainwright.run.extensions
        self.found.append((len(extensions.window), len(extensions.after_step)))


@pytest.mark.parametrize(("model", "num_copying"), [(doubles.model(Model), 0), (dropping(), 1)])
def test_random_states_are_copied_only_where_the_model_draws(model: Any, num_copying: int, tmp_path: Path) -> None:
    notes = NotesListeners()
    notes.trainer = trainer(tmp_path, model=model, settings={"max_steps": 3}, callbacks=[notes])
    notes.trainer.train()
    assert notes.found == [(num_copying, 0)] * 3


def folders(output_dir: Path) -> list[Path]:
    found = bundle.bundles(output_dir / "incidents")
    assert [find_problem(folder) for folder in found] == [None] * len(found)
    return found


def named(micro_batches: list[list[int]]) -> list[list[str]]:
    return [[f"train[{number}]" for number in numbers] for numbers in micro_batches]


def bad_names(about: Any) -> list[str]:
    return [one["name"] for one in about["bad_samples"]]


def only_one(output_dir: Path) -> dict[str, Any]:
    (folder,) = folders(output_dir)
    about: dict[str, Any] = json.loads((folder / "incident.json").read_text())
    return {**about, "folder": folder}


@pytest.mark.parametrize("where", ["host", "device", "device-at-log"])
@pytest.mark.parametrize("kind", ["nan", "loss-alone", "gradient-alone"])
def test_the_bundle_of_a_bad_step(kind: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 2 if where == "device-at-log" else 4}
    shared = {"model": dropping(), "settings": settings}
    torch.manual_seed(3)
    hand = trained(tmp_path / "hand", model=dropping(), settings=settings, callbacks=[LeavesOut(2)])
    hears = Hears()
    if where != "host":
        decide_on_the_device(monkeypatch)
    torch.manual_seed(3)
    one = trained(tmp_path / "run", poison={ROW: POISONS[kind]}, callbacks=[hears], **shared)
    assert doubles.same(doubles.weights(one), doubles.weights(hand))  # the search for the sample leaves no trace
    about = only_one(tmp_path / "run")
    assert about["folder"].name == "step-000002-nonfinite"
    assert (about["kind"], about["step"], about["samples"], bad_names(about)) == (
        "nonfinite",
        2,
        named([[4, 5], [6, 7]]),
        ["train[5]"],
    )
    assert int(about["bad_samples"][0]["fingerprint"], 16)
    assert about["is_exact"]
    assert about["entries_not_finite"] == {"nan": [["x"], []], "loss-alone": [["constant"], []]}.get(kind, [[], []])
    origin = {"nan": "the output of body.0, whose", "loss-alone": "the output of Drops"}
    assert about["origin"].startswith(origin.get(kind, "the gradient at the output of Drops"))
    assert len(about["largest_gradients"]) == 5
    assert about["arguments"]["gradient_accumulation_steps"] == 2
    assert about["environment"]["packages"]["torch"] == version("torch")
    (incident,) = hears.incidents
    assert (incident.path, incident.samples, incident.names) == (str(about["folder"]), (5,), ("train[5]",))
    assert "train[5] (micro-batch 0, item 1) made it; trainer.quarantine(['train[5]']) excludes it." in incident.text
    assert f"trainwright replay {about['folder']}" in incident.text


def test_a_healthy_run_writes_nothing_and_keeps_no_batch(tmp_path: Path) -> None:
    one = trained(tmp_path)
    assert not (tmp_path / "incidents").exists()
    assert one._trainwright.run.progress.window.current is None


def test_one_bundle_for_a_cause_and_five_at_most(tmp_path: Path) -> None:
    """Rows 0 to 12 are bad in each of two epochs: seven causes, of which the newest five are kept."""
    poison = dict.fromkeys(range(0, 14, 2), POISONS["nan"])
    trained(tmp_path, poison=poison, settings={"max_steps": 24, "max_skipped_steps": 0})
    names = [f"step-{step:06d}-nonfinite" for step in (3, 4, 5, 6, 7)]
    assert [folder.name for folder in folders(tmp_path)] == names
    trained(tmp_path, poison={12: POISONS["nan"]})  # the same cause in another run, with other weights
    assert [folder.name for folder in folders(tmp_path)] == [*names[1:], "step-000007-nonfinite-2"]


def test_a_resumed_run_keeps_the_bundle_that_it_has(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 4}
    for settings in ({"max_steps": 4}, {"max_steps": 16, "resume_from_checkpoint": True}):
        trained(tmp_path, poison={2: POISONS["nan"]}, settings=saves | settings)
    assert [folder.name for folder in folders(tmp_path)] == ["step-000002-nonfinite"]


@pytest.mark.parametrize(("policy", "steps"), [("ignore", []), ("warn", [1, 2])])
def test_weights_that_are_not_finite_are_one_cause(policy: str, steps: list[int], tmp_path: Path) -> None:
    trained(tmp_path, poison={1: POISONS["nan"]}, settings={"on_nonfinite": policy})
    assert [folder.name for folder in folders(tmp_path)] == [f"step-{step:06d}-nonfinite" for step in steps]


def test_equal_weights_share_their_place_with_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.checkpoint.store.MIN_BYTES", 1)
    trained(
        tmp_path,
        poison={ROW: POISONS["nan"]},
        settings={"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "save_async": False},
    )
    checkpoint = tmp_path / "checkpoint-2" / "model.safetensors"
    assert checkpoint.samefile(only_one(tmp_path)["folder"] / "model.safetensors")


def test_a_rollback_comes_after_the_bundle(tmp_path: Path) -> None:
    """The weights in it are those of before the bad step, and not those of the snapshot."""
    settings = {"on_nonfinite": "rollback", "rollback_every": 50, "max_steps": 3}
    trained(tmp_path / "run", poison={ROW: POISONS["gradient-alone"]}, model=dropping(), settings=settings)
    about = only_one(tmp_path / "run")
    assert (about["action"], about["is_exact"]) == ("rollback", True)
    hand = trained(tmp_path / "hand", model=dropping(), settings={"max_steps": 3}, callbacks=[LeavesOut(3)])
    weights = safetensors.torch.load_file(about["folder"] / "model.safetensors")
    assert doubles.same(weights, doubles.weights(hand))


def test_the_error_of_too_many_steps_names_the_bundle(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"trainwright replay .*step-000003-nonfinite"):
        trained(tmp_path, poison={ROW: POISONS["nan"]}, settings={"on_nonfinite": "stop"})
    assert only_one(tmp_path)["action"] == "stop"


def test_the_bundle_of_a_spike_has_its_threshold(tmp_path: Path) -> None:
    settings = {"on_spike": "warn", "spike_warmup": 4, "learning_rate": 1e-3}
    trained(tmp_path, poison={13: {"labels": 1e4}}, model=dropping(), settings=settings)
    about = only_one(tmp_path)
    assert (about["kind"], about["step"], about["threshold"], about["is_exact"]) == ("spike", 7, 6.0, True)
    assert about["samples"] == named([[12, 13]])
    assert about["values"]["loss"] > 1e6


class Raises(Drops):
    def forward(self, x: Any, labels: Any = None, constant: Any = None, flat: Any = None) -> Any:
        outputs = super().forward(x, labels, constant, flat)
        if self.training and flat.max() > 1:
            raise (torch.OutOfMemoryError("memory is full") if flat.max() > 2 else ZeroDivisionError("of the model"))
        return outputs


def raising() -> nn.Module:
    return doubles.model(Raises)


@pytest.mark.parametrize(("flat", "kind"), [(2.0, "error"), (3.0, "oom")])
def test_the_bundle_of_an_error(flat: float, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    error = ZeroDivisionError if kind == "error" else torch.OutOfMemoryError
    with pytest.raises(error), caplog.at_level(logging.WARNING):
        trained(tmp_path, model=doubles.model(Raises), poison={ROW: {"flat": flat}})
    about = only_one(tmp_path)
    assert about["folder"].name == f"step-000003-{kind}"
    assert (about["samples"], bad_names(about)) == ((named([[4, 5]]), ["train[5]"]) if kind == "error" else ([], []))
    assert about["is_exact"] == (kind == "error")
    assert f"Replay it with: trainwright replay {about['folder']}" in caplog.text


class AlwaysRaises(Drops):
    error = ZeroDivisionError

    def forward(self, x: Any, labels: Any = None, constant: Any = None, flat: Any = None) -> Any:
        raise self.error("whatever the sample")


class IsNotImplemented(AlwaysRaises):
    error = NotImplementedError


@pytest.mark.parametrize(("cls", "size"), [(AlwaysRaises, BATCH), (IsNotImplemented, 1)])
def test_an_error_of_every_sample_blames_none(
    cls: type[AlwaysRaises], size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(cls.error), caplog.at_level(logging.WARNING):
        trained(tmp_path, model=doubles.model(cls), settings={"per_device_train_batch_size": size})
    assert bad_names(only_one(tmp_path)) == []
    assert "whatever the sample" in caplog.text
    assert "quarantine" not in caplog.text


def test_an_error_outside_of_a_step_has_no_bundle(tmp_path: Path) -> None:
    class RaisesLater(trainwright.TrainerCallback):
        def on_log(self, *args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, callbacks=[RaisesLater()])
    assert folders(tmp_path) == []


def called_at(step: int, what: Callable[[], object]) -> trainwright.TrainerCallback:
    class Calls(trainwright.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step + 1 == step:
                what()

    return Calls()


def test_a_bundle_on_request(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", model=dropping())
    written: list[Path] = []
    one = trainer(tmp_path / "one", model=dropping())
    one.add_callback(called_at(3, lambda: written.append(one.capture_incident("looks odd"))))
    with pytest.raises(BundleError, match=r"call capture_incident\(\) in a callback"):
        one.capture_incident()
    torch.manual_seed(42)
    one.train()
    assert doubles.same(doubles.weights(one), doubles.weights(plain))
    about = only_one(tmp_path / "one")
    assert written == [about["folder"]]
    assert (about["kind"], about["what"], about["step"], about["samples"]) == (
        "request",
        "looks odd",
        3,
        named([[4, 5]]),
    )


def test_the_bundle_of_a_hang_has_the_stacks(tmp_path: Path) -> None:
    one = trainer(tmp_path, settings={"hang_timeout": 100})
    one.add_callback(called_at(2, lambda: one._trainwright.run.progress.interrupts.meeting.on_hang("Process 0 waits.")))
    one.train()
    about = only_one(tmp_path)
    assert (about["kind"], about["step"], about["what"]) == ("hang", 2, "Process 0 waits.")
    assert "in on_pre_optimizer_step" in (about["folder"] / "stacks.txt").read_text()
    assert bundle.read_batches(about["folder"])[0]["x"].shape == (BATCH, doubles.FEATURES)


@pytest.mark.process
def test_a_process_that_hangs_writes_its_bundle_before_it_ends(tmp_path: Path) -> None:
    done = forked.run([str(Path(__file__).with_name("hanging.py")), str(tmp_path)], timeout=120)
    assert done.returncode == 1, done.stderr
    about = only_one(tmp_path)
    assert about["folder"].name == "step-000003-hang"
    assert about["samples"] == []
    assert "has finished no step and no batch of an evaluation for" in done.stderr + done.stdout
    assert re.search(r"hanging\.py\", line \d+ in forward", (about["folder"] / "stacks.txt").read_text())
    (batch,) = bundle.read_batches(about["folder"])
    assert batch["flat"].tolist() == [0.0, 1.0]
    assert (about["folder"] / "model.safetensors").is_file()


class Fills(Model):
    """Asks for more memory than there is, where a sample is marked."""

    def forward(self, x: Any, labels: Any = None, constant: Any = None, flat: Any = None) -> dict[str, Any]:
        if flat.max() > 1:
            torch.empty(1 << 55, dtype=torch.uint8)
        return super().forward(x, labels, constant, flat)


def test_the_bundle_of_an_allocation_that_failed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="allocate"):
        trained(tmp_path, model=doubles.model(Fills), poison={ROW: {"flat": 2.0}})
    about = only_one(tmp_path)
    assert about["folder"].name == "step-000003-oom"
    assert "allocate" in about["what"]
    (batch,) = bundle.read_batches(about["folder"])
    assert batch["flat"].tolist() == [0.0, 2.0]
    assert (about["folder"] / "model.safetensors").is_file()


def test_a_bundle_that_cannot_be_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainwright.capabilities.incidents.recorder.describe_files", full)
    one = trained(tmp_path, poison={ROW: POISONS["nan"]})
    assert one.state.global_step == 8
    assert "Its bundle could not be written: OSError: No space left" in caplog.text
    assert list((tmp_path / "incidents").iterdir()) == []


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, poison: dict[int, Any]) -> None:
        self.rows = samples(24, poison)

    def __iter__(self) -> Any:
        return iter(self.rows)


@pytest.mark.parametrize("kind", ["shuffled", "stream", "loader"])
def test_samples_are_named_as_the_dataset_numbers_them(kind: str, tmp_path: Path) -> None:
    rows = samples(24, {ROW: POISONS["nan"]})
    data = Stream({ROW: POISONS["nan"]}) if kind == "stream" else rows
    settings = {"train_sampling_strategy": "random", "num_train_epochs": 1, "max_steps": 12, "logging_steps": 100}
    one = doubles.trainer(
        tmp_path, model=dropping(), train_dataset=data, settings={**settings, "per_device_train_batch_size": 2}
    )
    if kind == "loader":
        own = DataLoader[dict[str, Any]](rows, 2, shuffle=True, collate_fn=default_data_collator)  # type: ignore[arg-type]
        one.get_train_dataloader = lambda: own
    one.train()
    about = only_one(tmp_path)
    assert bad_names(about) == ([] if kind == "loader" else [f"train[{ROW}]"])
    assert len(about["bad_rows"]) == 1


def test_batches_are_read_back_as_they_were(tmp_path: Path) -> None:
    view = torch.arange(12.0).reshape(3, 4).t()
    batch: dict[str, Any] = {
        "x": view,
        "half": torch.ones(2, dtype=torch.bfloat16),
        "nested": ({"a": [view[1]]}, None, "text", 3, 0.5),
    }
    tail = trainwright._types.TailBatch({"labels": torch.tensor(1)}, num_samples=0, weight=0.5)
    assert bundle.write_batches([{**batch, "odd": {1, 2}}, tail], tmp_path) == ["0.odd"]
    first, second = bundle.read_batches(tmp_path)
    assert first.pop("odd") == "{1, 2}"
    nested, *others = first.pop("nested")
    given, *plain = batch.pop("nested")
    assert others == plain
    assert torch.equal(nested["a"][0], given["a"][0])
    torch.testing.assert_close(first, batch, rtol=0, atol=0)
    assert (second.num_samples, second.weight) == (0, 0.5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("bad", [{3}, {0, 15}, {1, 2, 9}, set(range(16))], ids=str)
def test_bad_rows_are_found_by_halving(bad: set[int]) -> None:
    tried: list[int] = []

    def is_bad(rows: Any) -> bool:
        tried.extend([len(rows)])
        return not bad.isdisjoint(rows)

    assert sorted(find_bad_rows(16, is_bad) or ()) == sorted(bad)
    assert len(tried) <= 30
    assert find_bad_rows(16, lambda rows: len(rows) > 3) == []
