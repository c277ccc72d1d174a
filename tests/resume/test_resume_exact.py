"""A run that is interrupted and resumed ends with the very weights, and the very log, of one that was not.

The table: kind of dataset, what draws random numbers, accumulation, and the step after which the run stopped. Dropout
is on everywhere.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler
from transformers import DataCollatorForLanguageModeling

from trainwright import EarlyStoppingCallback, Trainer

from .._support import forked
from .._support.small import (
    NUM_SAMPLES,
    Augmented,
    AugmentedStream,
    Diary,
    StopAt,
    accuracy,
    augmented,
    data,
    differing,
    make_trainer,
    models,
    module,
    trained_trainer,
    weights,
    without_clock,
)

pytestmark = pytest.mark.costly

Parts = dict[str, Any]


def with_transform() -> Any:
    """A `datasets.Dataset` that draws when it is read."""
    dataset = data.hf_dataset([{"x": item["x"].tolist(), "labels": item["labels"]} for item in data.vectors(26)])

    def transform(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        items = [augmented({"x": torch.tensor(x)}) for x in batch["x"]]
        return {"x": [item["x"] for item in items], "labels": batch["labels"]}

    dataset.set_transform(transform)
    return dataset


def masked_texts() -> list[dict[str, Any]]:
    return [{"input_ids": item["input_ids"]} for item in data.ragged_texts(26)]


def masking(train_dataset: Any) -> Parts:
    collator = DataCollatorForLanguageModeling(data.tokenizer(), mlm=True, mlm_probability=0.3)
    return {"model": module(kind=models.bert_mlm), "data_collator": collator, "train_dataset": train_dataset}


STREAM = {"max_steps": 14}
DATA: dict[str, Callable[[], Parts]] = {
    "list": lambda: {"train_dataset": data.vectors(26)},
    "columns": lambda: {"train_dataset": data.hf_dataset(data.vectors(26)).with_format("torch")},
    "stream": lambda: {"train_dataset": data.Stream(data.vectors(200)), **STREAM},
    "augmented-list": lambda: {"train_dataset": Augmented(data.vectors(26))},
    "augmented-columns": lambda: {"train_dataset": with_transform()},
    "augmented-stream": lambda: {"train_dataset": AugmentedStream(data.vectors(200)), **STREAM},
    "masked-list": lambda: masking(masked_texts()),
    "masked-columns": lambda: masking(data.hf_dataset(masked_texts())),
    "masked-stream": lambda: masking(data.Stream(masked_texts() * 8)) | STREAM,
}
# Seven micro-batches in an epoch: the first step, the middle, the end of an epoch, the first of the next, the last. A
# run that is stopped at several of these shows as much as one run for each: its log has every step.
STOPS = {1: ((1, 8, 14), (4, 13), (7,)), 3: ((1, 4), (2, 6), (3,))}
CASES = [
    pytest.param(kind, accumulation, stops, id=f"{kind}-accumulation-{accumulation}-stops-{'-'.join(map(str, stops))}")
    for kind in DATA
    for accumulation, rounds in STOPS.items()
    for stops in rounds
]
# One stop in a run, so that no second resume can hide what the first one lost: four times the training.
SINGLE_CASES = [
    pytest.param(kind, accumulation, (stop,), id=f"{kind}-{accumulation}-{stop}", marks=pytest.mark.slow)
    for kind in DATA
    for accumulation, rounds in STOPS.items()
    for stop in sorted(sum(rounds, ()))
    if (stop,) not in rounds
]


@dataclass(frozen=True)
class Course:
    weights: dict[str, torch.Tensor]
    log: list[dict[str, Any]] = field(compare=False)

    @classmethod
    def of(cls, trainer: Any) -> Course:
        """All that was logged but the summary at the end, which belongs to one call of train()."""
        log = without_clock(trainer.state.log_history)
        return cls(weights(trainer.model), [entry for entry in log if "train_loss" not in entry])


def run_through(output_dir: Path, parts: Callable[[], Parts], **settings: Any) -> Course:
    return Course.of(trained_trainer(output_dir, **parts(), **settings))


def run_with_stops(output_dir: Path, parts: Callable[[], Parts], *stops: int, **settings: Any) -> Course:
    """Each stop ends a training; a new trainer resumes it."""
    for stop in stops:
        resume = stop != stops[0]
        trainer = trained_trainer(output_dir, resume=resume, callbacks=[StopAt(stop)], **parts(), **settings)
        assert trainer.state.global_step == stop, "it did not stop where it was told to"
    return Course.of(trained_trainer(output_dir, resume=True, **parts(), **settings))


def assert_same_course(one: Course, other: Course) -> None:
    assert one.log == other.log
    assert differing(one.weights, other.weights) == {}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Course]:
    """Each uninterrupted run, made once."""
    done: dict[tuple[str, int], Course] = {}

    def of(kind: str, accumulation: int) -> Course:
        if (kind, accumulation) not in done:
            folder = tmp_path_factory.mktemp("through")
            done[kind, accumulation] = run_through(folder, DATA[kind], gradient_accumulation_steps=accumulation)
        return done[kind, accumulation]

    return of


@pytest.mark.parametrize(("kind", "accumulation", "stops"), CASES + SINGLE_CASES)
@pytest.mark.one_in(2)
def test_stopped_and_resumed(
    kind: str,
    accumulation: int,
    stops: tuple[int, ...],
    uninterrupted: Callable[[str, int], Course],
    tmp_path: Path,
) -> None:
    again = run_with_stops(tmp_path, DATA[kind], *stops, gradient_accumulation_steps=accumulation)
    assert_same_course(again, uninterrupted(kind, accumulation))


class Broken(Exception):
    pass


@pytest.mark.parametrize("kind", ["list", "augmented-list", "masked-list", "augmented-stream"])
@pytest.mark.parametrize("step", [5, 8, 11])
@pytest.mark.one_in(3)
def test_broken_off_between_two_saves(
    kind: str, step: int, uninterrupted: Callable[[str, int], Course], tmp_path: Path
) -> None:
    """An exception some steps after the last save: these steps are trained again, to the same end."""

    class Break(StopAt):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == self.step:
                raise Broken

    often = {"save_strategy": "steps", "save_steps": 3}
    with pytest.raises(Broken):
        make_trainer(tmp_path, callbacks=[Break(step)], **DATA[kind](), **often).train()
    second = trained_trainer(tmp_path, resume=True, **DATA[kind](), **often)
    assert_same_course(Course.of(second), uninterrupted(kind, 1))


@pytest.mark.parametrize("stops", [(2, 5), (9, 12)], ids=str)
def test_interrupted_twice_in_an_epoch(
    stops: tuple[int, int], uninterrupted: Callable[[str, int], Course], tmp_path: Path
) -> None:
    parts = DATA["augmented-list"]
    assert_same_course(run_with_stops(tmp_path, parts, *stops), uninterrupted("augmented-list", 1))


def test_the_same_trainer_can_resume(uninterrupted: Callable[[str, int], Course], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[StopAt(5)], **DATA["augmented-list"]())
    trainer.train()
    trainer.remove_callback(StopAt)
    trainer.train(resume_from_checkpoint=True)
    assert_same_course(Course.of(trainer), uninterrupted("augmented-list", 1))


SETTINGS: dict[str, tuple[Callable[[], Parts], Parts]] = {
    "group-by-length": (
        lambda: masking(data.ragged_texts(26)),
        {"train_sampling_strategy": "group_by_length"},
    ),
    "group-by-length-accumulated": (
        lambda: masking(data.ragged_texts(26)),
        {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 2, "num_train_epochs": 3},
    ),
    "sequential": (DATA["augmented-list"], {"train_sampling_strategy": "sequential"}),
    "data-seed": (DATA["augmented-list"], {"data_seed": 77}),
    "drop-last": (DATA["augmented-list"], {"dataloader_drop_last": True, "num_train_epochs": 3}),
    "epochs-1.5": (DATA["augmented-list"], {"num_train_epochs": 1.5}),
    "max-steps": (DATA["augmented-list"], {"max_steps": 12}),
    "cosine-warm-up": (DATA["list"], {"lr_scheduler_type": "cosine", "warmup_steps": 5}),
    "sgd": (DATA["list"], {"optim": "sgd"}),
    "bf16": (DATA["list"], {"bf16": True}),
    "label-smoothing": (
        lambda: {"model": module(kind=models.bert), "train_dataset": data.texts(26)},
        {"label_smoothing_factor": 0.1},
    ),
    "model-init": (lambda: {"model_init": lambda: models.ReturnsDict(0.2), "train_dataset": data.vectors(26)}, {}),
    "save-by-epoch": (DATA["augmented-list"], {"save_strategy": "epoch"}),
    "tokens-counted": (
        lambda: {"model": module(kind=models.llama), "train_dataset": data.sequences(26)},
        {"include_num_input_tokens_seen": "all"},
    ),
    "persistent-workers": (
        DATA["list"],
        {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.process if "workers" in name else ()) for name in SETTINGS],
)
def test_with_settings(name: str, tmp_path: Path) -> None:
    parts, settings = SETTINGS[name]
    through = run_through(tmp_path / "through", parts, **settings)
    assert_same_course(run_with_stops(tmp_path / "stopped", parts, 3, 9, **settings), through)


def test_resumed_from_the_end_of_an_epoch_that_saves_by_epoch(tmp_path: Path) -> None:
    parts = DATA["augmented-list"]
    by_epoch = {"save_strategy": "epoch", "num_train_epochs": 3}
    through = run_through(tmp_path / "through", parts, **by_epoch)
    checkpoint = str(tmp_path / "through" / "checkpoint-7")
    second = trained_trainer(tmp_path, resume=checkpoint, **parts(), **by_epoch)
    assert_same_course(Course.of(second), through)


def test_evaluations_on_the_way_do_not_matter(tmp_path: Path) -> None:
    def parts() -> Parts:
        return {**DATA["augmented-list"](), "eval_dataset": Augmented(data.vectors(10))}

    through = run_through(tmp_path / "through", parts, eval_strategy="steps", eval_steps=2)
    again = run_with_stops(tmp_path / "stopped", parts, 6, eval_strategy="steps", eval_steps=2)
    assert_same_course(again, through)
    quiet = run_through(tmp_path / "quiet", DATA["augmented-list"])
    assert differing(quiet.weights, through.weights) == {}


# -- workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "accumulation", "stops"),
    [
        ("augmented-list", 1, (3, 9)),
        ("masked-list", 1, (3, 9)),
        ("augmented-list", 3, (4,)),  # the first window of the second epoch
        ("augmented-stream", 3, (2,)),
    ],
)
@pytest.mark.process
def test_what_workers_draw_comes_back(kind: str, accumulation: int, stops: tuple[int, ...], tmp_path: Path) -> None:
    """Augmentation and masking draw in the workers, whose random states no checkpoint of this process holds."""
    settings = {"dataloader_num_workers": 2, "gradient_accumulation_steps": accumulation}
    through = run_through(tmp_path / "through", DATA[kind], **settings)
    assert_same_course(run_with_stops(tmp_path / "stopped", DATA[kind], *stops, **settings), through)


# -- streams ---------------------------------------------------------------------------------------------------------


class ShufflesItself(IterableDataset[dict[str, Any]]):
    """Draws its order from torch's generator when an epoch begins."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        items = data.vectors(26)
        return iter([items[i] for i in torch.randperm(26).tolist()])


STREAMS: dict[str, Callable[[], Parts]] = {
    "finite": lambda: {"train_dataset": data.Stream(data.vectors(26)), "max_steps": 20},
    "augmented": lambda: {"train_dataset": AugmentedStream(data.vectors(26)), "max_steps": 20},
    "shuffles-itself": lambda: {"train_dataset": ShufflesItself(), "max_steps": 20},
    "hf-stream": lambda: {
        "train_dataset": data.hf_dataset(data.vectors(26))
        .with_format("torch")
        .to_iterable_dataset(num_shards=2)
        .shuffle(seed=3, buffer_size=8),
        "max_steps": 20,
    },
}


@pytest.mark.parametrize("stops", [(3, 10), (7, 16)], ids=str)
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_goes_on_where_it_was(name: str, stops: tuple[int, int], tmp_path: Path) -> None:
    """Seven batches in a pass, twenty steps: also in its second and third pass."""
    through = run_through(tmp_path / "through", STREAMS[name])
    assert_same_course(run_with_stops(tmp_path / "stopped", STREAMS[name], *stops), through)


@pytest.mark.parametrize("step", [2, 3])
def test_a_stream_goes_on_where_it_was_accumulated(step: int, tmp_path: Path) -> None:
    """Windows of three from passes of seven: two whole ones and one of a single batch."""
    parts = STREAMS["augmented"]
    through = run_through(tmp_path / "through", parts, gradient_accumulation_steps=3)
    assert_same_course(run_with_stops(tmp_path / "stopped", parts, step, gradient_accumulation_steps=3), through)


# -- a user's own order ----------------------------------------------------------------------------------------------


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=4, shuffle=True, collate_fn=self.data_collator)


class OwnSampler(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return PythonShuffle()


class PythonShuffle(Sampler[int]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        import random

        return iter(random.sample(range(NUM_SAMPLES), NUM_SAMPLES))


@pytest.mark.parametrize("cls", [OwnLoader, OwnSampler])
def test_an_order_of_the_users_own(cls: type, tmp_path: Path) -> None:
    def parts() -> Parts:
        return {"cls": cls, **DATA["augmented-list"]()}

    through = run_through(tmp_path / "through", parts)
    assert_same_course(run_with_stops(tmp_path / "stopped", parts, 3, 9), through)


# -- stopping early in an epoch --------------------------------------------------------------------------------------


class EndEpochAt(StopAt):
    """Ends an epoch early: the next one begins at its first sample."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_epoch_stop = True


@pytest.mark.parametrize("step", [5, 9])
def test_after_an_epoch_that_a_callback_ended(step: int, tmp_path: Path) -> None:
    parts: Parts = {"num_train_epochs": 3}
    through = trained_trainer(tmp_path / "through", callbacks=[EndEpochAt(3)], **parts)
    assert through.state.global_step == 3 + 7 + 7
    make_trainer(tmp_path / "two", callbacks=[EndEpochAt(3), StopAt(step)], **parts).train()
    second = trained_trainer(tmp_path / "two", resume=True, callbacks=[EndEpochAt(3)], **parts)
    assert_same_course(Course.of(second), Course.of(through))


# -- what is read ----------------------------------------------------------------------------------------------------


def test_no_trained_sample_is_read_again(tmp_path: Path) -> None:
    whole = Diary(data.vectors(26))
    make_trainer(tmp_path / "through", train_dataset=whole).train()
    for step, trained in ((3, 3 * 4), (7, 26), (9, 26 + 2 * 4)):
        folder = tmp_path / str(step)
        make_trainer(folder, train_dataset=data.vectors(26), callbacks=[StopAt(step)]).train()
        rest = Diary(data.vectors(26))
        make_trainer(folder, train_dataset=rest).train(resume_from_checkpoint=True)
        assert rest.reads == whole.reads[trained:]


# -- the best model and those who wait for it ------------------------------------------------------------------------


JUDGED: Parts = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "learning_rate": 0.3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "num_train_epochs": 4,
}


def judged(output_dir: Path, *callbacks: Any, **settings: Any) -> Any:
    return make_trainer(
        output_dir,
        eval_dataset=data.vectors(50)[26:],
        compute_metrics=accuracy,
        callbacks=list(callbacks),
        **JUDGED | settings,
    )


@pytest.mark.parametrize("patience", [2, 3])
def test_patience_goes_on_counting(patience: int, tmp_path: Path) -> None:
    through = judged(tmp_path / "through", EarlyStoppingCallback(patience))
    through.train()
    last = through.state.global_step
    assert last < 28, "it was never impatient"
    stop = last - 2  # one evaluation before the last: the patience is nearly used up
    judged(tmp_path / "two", EarlyStoppingCallback(patience), StopAt(stop)).train()
    watch = EarlyStoppingCallback(patience)
    second = judged(tmp_path / "two", watch)
    second.train(resume_from_checkpoint=str(tmp_path / "two" / f"checkpoint-{stop}"))
    assert second.state.global_step == last
    assert watch.early_stopping_patience_counter == patience
    assert differing(weights(second.model), weights(through.model)) == {}


def test_the_best_model_of_before_the_interruption_is_loaded_at_the_end(tmp_path: Path) -> None:
    through = judged(tmp_path / "through")
    through.train()
    best = through.state.best_global_step
    assert best < 28
    judged(tmp_path / "two", StopAt(best + 2)).train()
    second = judged(tmp_path / "two")
    second.train(resume_from_checkpoint=str(tmp_path / "two" / f"checkpoint-{best + 2}"))
    assert (second.state.best_global_step, second.state.best_metric) == (best, through.state.best_metric)
    assert differing(weights(second.model), weights(through.model)) == {}


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_limit_keeps_the_best_and_the_newest(limit: int, tmp_path: Path) -> None:
    trainer = judged(tmp_path, save_total_limit=limit)
    trainer.train()
    best = trainer.state.best_global_step
    left = {int(path.name.rpartition("-")[2]) for path in tmp_path.glob("checkpoint-*")}
    assert best < 26, "the row says nothing: the best is among the last"
    assert left == {best, *range(28, 28 - 2 * (limit - 1), -2)}  # with limit 1 the best alone, as in transformers


# -- a new process ---------------------------------------------------------------------------------------------------

SCRIPT = """
    import sys
    from pathlib import Path
    import torch
    from tests._support.small import Augmented, data, make_trainer
    trainer = make_trainer(Path(sys.argv[1]), train_dataset=Augmented(data.vectors(26)))
    trainer.train(resume_from_checkpoint=True)
    torch.save(trainer.model.state_dict(), sys.argv[2])
"""


@pytest.mark.process
def test_in_a_new_process(uninterrupted: Callable[[str, int], Course], tmp_path: Path) -> None:
    make_trainer(tmp_path / "run", callbacks=[StopAt(4)], **DATA["augmented-list"]()).train()
    done = forked.run(["-c", textwrap.dedent(SCRIPT), str(tmp_path / "run"), str(tmp_path / "weights.pt")])
    assert done.returncode == 0, done.stderr
    assert differing(torch.load(tmp_path / "weights.pt"), uninterrupted("augmented-list", 1).weights) == {}
