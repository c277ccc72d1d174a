"""What scripts and libraries read of a trainer besides its methods; compared with transformers where that has it."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import trainwright
from trainwright import TrainerCallback
from trainwright.data.prepared_dataloader import PreparedDataLoader

from .._support.small import (
    OURS,
    REFERENCE,
    AugmentedStream,
    Side,
    data,
    differing,
    make_trainer,
    models,
    module,
)
from .._support.small import weights as weights_of
from .._support.two_processes import run

# -- dataloaders ----------------------------------------------------------------------------------------------------

# Names of accelerate's prepared dataloaders that have no meaning without torchdata's stateful ones, or that only
# accelerate itself calls.
NOT_READ = {"state_dict", "load_state_dict", "adjust_state_dict_for_prefetch", "reset", "set_sampler"}
SIDES = [OURS, pytest.param(REFERENCE, marks=pytest.mark.framework)]


def public_names(dataloader: Any) -> set[str]:
    names = {*dir(type(dataloader)), *vars(dataloader), *dir(dataloader.base_dataloader)}
    return {name for name in names if not name.startswith("_")}


class ReadsTheState(TrainerCallback):
    """Notes what accelerate says at each micro-batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, ...]] = []

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note(kwargs["train_dataloader"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note(kwargs["train_dataloader"])

    def note(self, dataloader: Any) -> None:
        state = dataloader.gradient_state
        self.seen.append(
            (
                state.sync_gradients,
                state.end_of_dataloader,
                dataloader.end_of_dataloader,
                state.in_dataloader,
                state.remainder,
                dataloader.iteration,
            )
        )


@pytest.mark.framework
def test_dataloaders_have_the_attributes_of_prepared_ones(tmp_path: Path) -> None:
    seen: dict[str, list[Any]] = {}
    loaders: dict[str, Any] = {}
    for side in (OURS, REFERENCE):
        callback = ReadsTheState()
        eval_dataset = data.vectors(7)
        trainer = make_trainer(
            tmp_path / side.name,
            side=side,
            eval_dataset=eval_dataset,
            callbacks=[callback],
            gradient_accumulation_steps=2,
            num_train_epochs=2,
        )
        train = trainer.get_train_dataloader()
        judge = trainer.get_eval_dataloader()
        names = (
            "total_batch_size",
            "total_dataset_length",
            "device",
            "skip_batches",
            "use_stateful_dataloader",
            "synchronized_generator",
            "iteration",
            "end_of_dataloader",
        )
        found = [[getattr(loader, name) for name in names] for loader in (train, judge)]
        found += [[loader.total_dataset_length, len(loader.rng_types)] for loader in (train, judge)]
        found.append([(train.end_of_dataloader, train.remainder, train.iteration) for _ in train] + [train.iteration])
        train.set_epoch(5)
        found.append([train.iteration, train.get_sampler() is not None, judge.get_sampler() is not None])
        trainer.train()
        assert side is REFERENCE or not trainer.accelerator.gradient_state.in_dataloader
        seen[side.name] = [*found, callback.seen]
        loaders[side.name] = train
    assert seen["trainwright"] == seen["transformers"]
    assert public_names(loaders["transformers"]) - public_names(loaders["trainwright"]) <= NOT_READ


def test_a_place_within_an_epoch_outlasts_set_epoch(tmp_path: Path) -> None:
    """Callbacks set the epoch of the dataloader when it begins; after a resume the loop has set it already."""
    train = make_trainer(tmp_path).get_train_dataloader()
    train.batch_sampler.seek(2, first_sample=8)
    train.set_epoch(2)
    assert train.batch_sampler.first_sample == 8
    train.iteration = 3
    assert (train.batch_sampler.epoch, train.batch_sampler.first_sample) == (3, 0)


@pytest.mark.parametrize("is_stream", [False, True], ids=["indexed", "stream"])
def test_batches_are_on_the_device_but_for_the_training_loop(is_stream: bool, tmp_path: Path) -> None:
    """The loop copies them itself, beside the computation."""
    samples: Any = data.vectors(8)
    trainer = make_trainer(tmp_path, train_dataset=AugmentedStream(samples) if is_stream else samples, max_steps=2)
    loader = trainer.get_train_dataloader()
    assert isinstance(loader, PreparedDataLoader)
    assert loader.device == torch.device("cpu")
    loader.device = torch.device("meta")
    assert {value.device.type for batch in loader for value in batch.values()} == {"meta"}
    assert {value.device.type for batch in loader.host_batches() for value in batch.values()} == {"cpu"}


@pytest.mark.process
@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)
def test_workers_that_persist_belong_to_one_dataloader(side: Side, tmp_path: Path) -> None:
    sets = {"near": data.vectors(4), "far": data.vectors(6)}
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = make_trainer(tmp_path, side=side, eval_dataset=sets["near"], **workers)
    assert trainer.get_eval_dataloader() is trainer.get_eval_dataloader()
    assert trainer.get_eval_dataloader(sets["near"]) is trainer.get_eval_dataloader()
    trainer = make_trainer(tmp_path, side=side, eval_dataset=sets, **workers)
    near, far = (trainer.get_eval_dataloader(name) for name in sets)
    assert near is not far
    assert [trainer.get_eval_dataloader(name) for name in sets] == [near, far]
    trainer.args.dataloader_persistent_workers = False
    assert trainer.get_eval_dataloader("near") is not near


def test_another_dataset_has_a_dataloader_of_its_own(tmp_path: Path) -> None:
    """Transformers would evaluate the first dataset again."""
    one = data.vectors(4)
    other = data.vectors(6)
    trainer = make_trainer(tmp_path, eval_dataset=one, dataloader_num_workers=1, dataloader_persistent_workers=True)
    first = trainer.get_eval_dataloader()
    second = trainer.get_eval_dataloader(other)
    assert (first.source, second.source) == (one, other)
    assert trainer.get_eval_dataloader(other) is second
    assert trainer.get_eval_dataloader() is first
    trainer.eval_dataset = other
    assert trainer.get_eval_dataloader().source is other


# -- a batch size that was found, after a resume ---------------------------------------------------------------------


@pytest.mark.framework
def test_a_resume_keeps_the_batch_size_that_was_found(tmp_path: Path) -> None:
    weights = {}
    for side in (OURS, REFERENCE):
        folder = tmp_path / side.name
        common = {"side": side, "save_strategy": "steps", "save_steps": 3}
        make_trainer(folder, max_steps=6, per_device_train_batch_size=4, **common).train()
        trainer = make_trainer(folder, max_steps=6, per_device_train_batch_size=8, auto_find_batch_size=True, **common)
        assert trainer._train_batch_size == 8
        weights[side.name] = side.train(trainer, resume_from_checkpoint=str(folder / "checkpoint-3")).weights
        assert trainer._train_batch_size == trainer.state.train_batch_size == 4
    assert differing(weights["trainwright"], weights["transformers"]) == {}


class Full(models.ReturnsDict):
    """Has no room for four samples in one step of the first run."""

    is_full = False
    sizes: list[int]

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        self.sizes = [*getattr(self, "sizes", []), len(x)]
        if self.is_full and len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB.")
        return super().forward(x, labels)


def test_a_resume_cuts_micro_batches_as_its_checkpoint_did(tmp_path: Path) -> None:
    """Memory that is free again does not change the weights of the resumed run."""
    settings = {"auto_find_batch_size": True, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    straight = make_trainer(tmp_path, model=module(kind=Full), **settings)
    straight.model.is_full = True
    straight.train()
    resumed = make_trainer(tmp_path, model=module(kind=Full), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert straight.model.sizes.count(4) == 1
    assert set(resumed.model.sizes) == {2}
    assert differing(weights_of(resumed.model), weights_of(straight.model)) == {}


# -- state of callbacks and flags -------------------------------------------------------------------------------------


class Counts(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
    """As documentation writes it: settings go through the constructor, under a name of their own."""

    def __init__(self, start: int = 0, label: str = "none") -> None:
        self._start = start
        self.label = label
        self.steps = start

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"start": self._start, "label": self.label}, "attributes": {"steps": self.steps}}


class Absent(Counts):
    pass


@pytest.mark.framework
def test_exported_states_are_saved_and_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Settings of callbacks, several of one class, and the flags of the control; one that is missing is named."""
    seen = {}
    judged = {
        "eval_dataset": data.vectors(4),
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 2,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
    }
    for side, early in ((OURS, trainwright.EarlyStoppingCallback), (REFERENCE, transformers.EarlyStoppingCallback)):
        folder = tmp_path / side.name
        common = {"side": side, "save_strategy": "steps", "save_steps": 2, **judged}
        given = [early(5, 0.2), Counts(10, "one"), Counts(20, "two"), Absent(30)]
        make_trainer(folder, callbacks=given, **common).train()
        states = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())["stateful_callbacks"]
        trainer = make_trainer(
            folder,
            callbacks=[early(), Counts(), Counts()],
            **common | {"log_level": "warning"},
            restore_callback_states_from_checkpoint=True,
        )
        trainer.state = type(trainer.state).load_from_json(str(folder / "checkpoint-2" / "trainer_state.json"))
        library = logging.getLogger("transformers")
        library.addHandler(caplog.handler)  # which does not propagate
        try:
            trainer._load_callback_state()
        finally:
            library.removeHandler(caplog.handler)
        assert "Absent" in caplog.text
        caplog.clear()
        now = [one for one in trainer.callback_handler.callbacks if isinstance(one, (early, Counts))]
        flags = vars(trainer.control)
        assert flags["should_training_stop"]
        order = sorted(([type(one).__name__, one.state()] for one in now), key=str)
        seen[side.name] = order, dict(flags)
        saved = {name: states[name] for name in ("EarlyStoppingCallback", "Absent", "TrainerControl")}
        seen[side.name] += (saved, [state["args"] for state in states["Counts"][:2]])
    assert seen["trainwright"][0][0][1] == {"args": {"start": 10, "label": "one"}, "attributes": {"steps": 12}}
    # Transformers adds the states of each save to a list, and restores the first: those of the beginning.
    for one in [entry for entry in seen["transformers"][0] if entry[0] == "Counts"]:
        one[1]["attributes"]["steps"] += 2
    assert seen["trainwright"] == seen["transformers"]


# -- what each process says -------------------------------------------------------------------------------------------

LEVELS = """
import contextlib, io, logging, sys
import transformers, trainwright
from tests._support.small import data, module
from tests._support.two_processes import tell

LEVELS = ["info warning", "debug debug", "error debug", "error error", "passive passive"]
logging.getLogger().handlers.clear()
said = {}
for library in (trainwright, transformers):
    for levels in LEVELS:
        for name in ("transformers", "trainwright"):
            logging.getLogger(name).setLevel(logging.WARNING)
        stream = io.StringIO()
        with contextlib.redirect_stderr(stream), contextlib.redirect_stdout(stream):
            for handler in logging.getLogger("transformers").handlers:
                handler.stream = sys.stderr
            main, replica = levels.split()
            args = library.TrainingArguments("out", use_cpu=True, max_steps=1, save_strategy="no", report_to=[],
                                             log_level=main, log_level_replica=replica)
            library.Trainer(model=module(), args=args, train_dataset=data.vectors(8)).train()
        said[f"{library.__name__} {levels}"] = "Running training" in stream.getvalue()
tell(said=said)
"""


@pytest.mark.process
@pytest.mark.framework
def test_each_process_speaks_by_its_level_at_the_start_of_a_run(tmp_path: Path) -> None:
    for rank, told in enumerate(run(LEVELS, folder=tmp_path).told):
        said: dict[str, dict[str, bool]] = {"trainwright": {}, "transformers": {}}
        for name, was_said in told["said"].items():
            library, levels = name.split(" ", 1)
            said[library][levels] = was_said
        assert said["trainwright"] == said["transformers"], rank
        assert said["trainwright"]["error debug"] == (rank == 1)
        assert said["trainwright"]["debug debug"]


# -- a collator that draws from Python's generator ---------------------------------------------------------------------


class DrawsNegatives:
    """Pads with samples that it draws from Python's `random`, in evaluations too, as GLiNER's collator does."""

    def __init__(self, model: Any = None) -> None:
        self.model = model

    def __call__(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        drawn = [random.choice(samples) for _ in range(random.randint(1, 3))]
        random.shuffle(samples)
        rows = [*samples, *drawn]
        return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


@pytest.mark.parametrize(
    "settings",
    [
        {"eval_steps": 2, "save_steps": 2},
        {"eval_steps": 3, "save_steps": 2, "gradient_accumulation_steps": 2},
        {"eval_steps": 1, "save_steps": 3, "eval_on_start": True, "load_best_model_at_end": False},
        {"eval_strategy": "epoch", "save_steps": 5},
    ],
    ids=["with a save", "apart", "every step", "every epoch"],
)
def test_a_resume_ends_with_the_weights_of_its_own_straight_run(settings: dict[str, Any], tmp_path: Path) -> None:
    common = {
        "max_steps": 9,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_dataset": data.vectors(7),
        "data_collator": DrawsNegatives(),
        "remove_unused_columns": False,
    }
    random.seed(3)
    straight = make_trainer(tmp_path, **common | settings)
    straight.train()
    saved = sorted(tmp_path.glob("checkpoint-*"))[:2]
    for folder in saved:
        random.seed(99)
        resumed = make_trainer(tmp_path, **common | settings)
        resumed.train(resume_from_checkpoint=str(folder))
        assert differing(weights_of(resumed.model), weights_of(straight.model)) == {}, folder.name


# -- a run of no steps ------------------------------------------------------------------------------------------------


@pytest.mark.framework
@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 0},
        {"max_steps": 0, "lr_scheduler_type": "constant", "gradient_accumulation_steps": 2},
        {"max_steps": 0, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"max_steps": 0, "num_train_epochs": 0},
    ],
    ids=["default", "constant", "by epochs", "no epochs"],
)
def test_max_steps_of_zero_means_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    outcomes = []
    files = []
    for side in (OURS, REFERENCE):
        trainer = make_trainer(tmp_path / side.name, side=side, eval_dataset=data.vectors(5), **settings)
        outcomes.append(side.train(trainer))
        files.append(sorted(path.name for path in (tmp_path / side.name).glob("checkpoint-*")))
    assert files[0] == files[1]
    assert outcomes[0].global_step == outcomes[1].global_step == int(settings.get("num_train_epochs") is None)
    assert differing(outcomes[0].weights, outcomes[1].weights) == {}
    logs = [[{k: v for k, v in entry.items() if k != "eval_loss"} for entry in one.log] for one in outcomes]
    assert logs[0] == logs[1]
