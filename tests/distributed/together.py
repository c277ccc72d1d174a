"""Several processes in one launch: `together.py FOLDER`. It tells what the tests beside it compare with one process."""

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests._support.small import StopAt
from tests._support.two_processes import tell
from tests.distributed.cases import WINDOWS, judged, outcome, rows, trainer_of
from tests.parity.data import sequences, tokenizer
from tests.parity.models import llama, seeded
from tests.parity.sides import OURS
from torch.utils.data import Dataset, IterableDataset
from transformers import DataCollatorForTokenClassification
from transformers.loss.loss_utils import ForCausalLMLoss

from trainwright import LossOutput, Trainer, TrainerCallback, TrainingArguments
from trainwright._types import TailBatch
from trainwright.checkpoint.store import CheckpointStore
from trainwright.data import sampler_factory
from trainwright.data.streaming.lookahead_buffer import BatchFormer

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])


def main_goes_first() -> None:
    folder = str(FOLDER / "first")
    try:
        with TrainingArguments(folder, use_cpu=True, ddp_backend="mpi").main_process_first():
            pass
    except RuntimeError as error:
        tell(without_mpi=str(error))
    args = TrainingArguments(folder, use_cpu=True, ddp_backend="gloo")
    made = FOLDER / "made_by_main"
    with args.main_process_first():
        tell(found=made.exists(), backend=dist.get_backend())
        if RANK == 0:
            time.sleep(0.5)
            made.write_text("done")
    quiet = args.set_logging(level="info", replica_level="error")
    tell(levels=quiet.get_process_log_level(), should=[quiet.should_log, quiet.should_save])


def engines(trainer: Any) -> None:
    engine = trainer._trainwright.services.engine
    ragged = torch.full((2 + RANK, 1 + RANK), RANK)
    nested = {"a": ragged, "b": (torch.tensor(float(RANK)), ragged > 0)}
    joined = engine.gather(nested)
    tell(
        gathered=[joined["a"].tolist(), joined["b"][0].tolist(), joined["b"][1].tolist()],
        summed=engine.sum(torch.tensor(RANK + 1)).item(),
        agreed=engine.agree(lambda: f"decided by {RANK}"),
        objects=engine.gather_objects({"rank": RANK}),
    )
    for name, wrong in {"agreed_error": lambda: engine.agree(fails), "different": lambda: engine.gather(odd())}.items():
        try:
            wrong()
        except Exception as error:
            tell(**{name: f"{type(error).__name__}: {error}"})


def fails() -> None:
    raise LookupError("no checkpoint there")


def odd() -> Any:
    return torch.zeros(2) if RANK == 0 else torch.zeros(2, 2)


class Counts(TrainerCallback):
    """Collectives that python code asks for, by step; the ones of DDP itself are in its reducer."""

    NAMES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier")

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.by_step: list[list[str]] = []
        self.originals = {name: getattr(dist, name) for name in self.NAMES}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        def counted(name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.calls.append(name)
                return self.originals[name](*args, **kwargs)

            return call

        for name in self.NAMES:
            setattr(dist, name, counted(name))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.by_step.append(self.calls)
        self.calls = []

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)


def recorded() -> None:
    """Numbers of both processes, one of which gets a batch that only stands in, and names that only one records."""
    kept: list[tuple[float, float]] = []

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = Trainer.compute_loss(self, model, inputs, True, **kwargs)
        weight = (inputs["labels"] != -100).sum()
        value = outputs["logits"].mean()
        self.record("value", value, weight)
        self.record("num_rows", len(inputs["x"]), reduce="sum")
        self.record("highest", value, reduce="max")
        if RANK == 1:
            self.record("of one", 1.0, reduce="last")
        if torch.is_grad_enabled() or not model.training:  # no trial of whether the loss is divided
            kept.append((value.item(), weight.item()))
        return (loss, outputs) if return_outputs else loss

    counts = Counts()
    trainer = trainer_of("counted", FOLDER / "recorded", 2, logging_steps=2, save_strategy="steps", save_steps=3)
    trainer.compute_loss = partial(compute_loss, trainer)
    trainer.add_callback(counts)
    trainer.train()
    trained = list(kept)
    log = trainer.state.log_history[:-1]
    kept.clear()
    metrics = trainer.evaluate()
    resumed = trainer_of("counted", FOLDER / "recorded", 2, logging_steps=2)
    resumed.compute_loss = partial(compute_loss, resumed)
    resumed.train(str(FOLDER / "recorded" / "checkpoint-3"))
    tell(
        recorded=trained,
        recorded_log=log,
        recorded_collectives=counts.by_step,
        recorded_in_evaluation=kept,
        recorded_metrics=metrics,
        recorded_after_resume=resumed.state.log_history[:-1],
    )


def late_counts() -> None:
    """A model of transformers gets the number of items when its loss needs it; one with an own `compute_loss` before.

    Both train on the same sequences, of which the processes have different numbers of labels.
    """
    events: list[str] = []
    all_reduce = dist.all_reduce
    finish = dist.Work.wait

    def counted(*args: Any, **kwargs: Any) -> Any:
        events.append("sent" if kwargs.get("async_op") else "summed")
        return all_reduce(*args, **kwargs)

    def waited(work: Any, *args: Any) -> Any:
        events.append("waited")
        return finish(work, *args)

    items = [{name: value[: 3 + number % 5] for name, value in one.items()} for number, one in enumerate(sequences(32))]
    settings = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 4,
        "ddp_broadcast_buffers": False,
    }
    weights = []
    for is_late in (True, False):
        trainer = OURS.make(
            seeded(llama),
            FOLDER / f"late_{is_late}",
            settings,
            train_dataset=items,
        )
        if not is_late:
            trainer.compute_loss = partial(Trainer.compute_loss, trainer)
        trainer.model.lm_head.register_forward_hook(lambda *_: events.append("forward"))
        events.clear()
        dist.all_reduce = counted
        dist.Work.wait = waited  # type: ignore[method-assign]
        try:
            trainer.train()
        finally:
            dist.all_reduce = all_reduce
            dist.Work.wait = finish  # type: ignore[method-assign]
        first = "sent" if is_late else "summed"
        tell(**{f"events_{first}": events[events.index(first) :][:16]})
        weights.append(trainer.model.state_dict())
    late, early = weights
    tell(late_is_equal=all(torch.equal(late[name], early[name]) for name in early))

    def own_loss(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any, **kwargs: Any) -> Any:
        copied = torch.full((), num_items_in_batch)  # reads the memory of a tensor
        return ForCausalLMLoss(logits, labels, vocab_size, copied, **kwargs)

    model: Any = seeded(llama)
    model.loss_function = own_loss
    trainer = OURS.make(model, FOLDER / "own_loss", {**settings, "max_steps": 1}, train_dataset=items)
    trainer.train()
    tell(own_loss_is_finite=all(torch.isfinite(value).all().item() for value in trainer.model.state_dict().values()))


def by_items() -> None:
    """A loss that says over how many items it is a mean, where `num_items_in_batch` is not asked for."""

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        said = LossOutput(outputs["loss"], num_items=(inputs["labels"] != -100).sum())
        return (said, outputs) if return_outputs else said

    trainer = trainer_of("counted, accumulated", FOLDER / "by_items", 2, eval_strategy="epoch")
    trainer.compute_loss = partial(compute_loss, trainer)
    tell(by_items=outcome(trainer), judged_by_items=judged(trainer))


def checkpoints() -> None:
    name = "means, accumulated"
    trainer = trainer_of(name, FOLDER / "by_two", 2, save_strategy="steps", save_steps=2)
    trainer.add_callback(StopAt(2))
    trainer.train()
    tell(saved=sorted(os.listdir(FOLDER / "by_two/checkpoint-2")))
    tell(behind=committed_by(FOLDER / "behind"), at_once=committed_by(FOLDER / "at_once", save_async=False))
    again = trainer_of(name, FOLDER / "by_two_again", 2)
    tell(resumed=outcome(again, resume_from_checkpoint=str(FOLDER / "by_two/checkpoint-2")))
    logging.getLogger("trainwright").setLevel("WARNING")
    of_one = trainer_of(name, FOLDER / "of_one", 2, log_level="warning")
    tell(resumed_of_one=outcome(of_one, resume_from_checkpoint=str(FOLDER / "by_one/checkpoint-2")))
    damaged = trainer_of(name, FOLDER / "nothing_here", 2)
    try:
        damaged.train(resume_from_checkpoint=True)
    except Exception as error:
        tell(nothing=f"{type(error).__name__}: {error}")


class Reads(Dataset[Any]):
    """Counts how often a sample is asked for in this process."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.num_reads += 1
        return self.items[index]


class Stream(IterableDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.num_reads = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.num_reads += 1
            yield item


def dispatching() -> None:
    """The main process reads for both: map data with a tail of one, resumed, and a stream whose end nobody knows."""
    dispatch = {"accelerator_config": {"dispatch_batches": True}, "save_strategy": "steps", "save_steps": 2}
    for kind in (Reads, Stream):
        more = {"lr_scheduler_type": "constant"} if kind is Stream else {}
        dataset = kind(rows(17)[:16] if kind is Reads else rows(17))
        folder = FOLDER / f"dispatched_{kind.__name__}"
        trainer = trainer_of("counted", folder, 2, train_dataset=dataset, num_train_epochs=1, **dispatch, **more)
        whole = outcome(trainer)
        again = trainer_of(
            "counted", folder / "again", 2, train_dataset=kind(dataset.items), num_train_epochs=1, **dispatch, **more
        )
        resumed = outcome(again, resume_from_checkpoint=str(folder / "checkpoint-2"))
        name = kind.__name__
        tell(**{f"{name} dispatched": whole, f"{name} resumed": resumed, f"{name} read": dataset.num_reads})


def formed() -> None:
    """Batches of as many samples as fit: sample i is a row of tokens i + 5, so what was trained on can be counted."""
    lengths = [2 + 5 * i % 11 for i in range(21)]
    items = [{"input_ids": [i + 5] * length, "labels": [i + 5] * length} for i, length in enumerate(lengths)]

    def trained(name: str, dataset: Any, *, resume: bool = False, **settings: Any) -> tuple[Any, Counter[int]]:
        counts: Counter[int] = Counter()

        class Seen(Trainer):
            def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
                batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
                for batch in batches:
                    if not (isinstance(batch, TailBatch) and batch.num_samples == 0):  # it only keeps them in step
                        counts.update(batch["input_ids"].flatten().tolist())
                return batches, num_items

        callbacks = settings.pop("callbacks", None)
        args = TrainingArguments(str(FOLDER / name), num_train_epochs=1, use_cpu=True, report_to="none", **settings)
        trainer = Seen(
            model=seeded(llama),
            args=args,
            train_dataset=dataset,
            callbacks=callbacks,
            data_collator=DataCollatorForTokenClassification(tokenizer()),
        )
        trainer.train(resume_from_checkpoint=resume)
        everywhere = trainer._trainwright.services.engine.gather_objects(dict(counts))
        return trainer, sum((Counter(one) for one in everywhere), Counter())

    def outcome_of(trainer: Any, total: Counter[int]) -> dict[str, Any]:
        weights = float(sum(p.double().sum() for p in trainer.model.parameters()))
        seen = [total[i + 5] for i in range(21)]
        return {"counts": seen, "lengths": lengths, "step": trainer.state.global_step, "weights": weights}

    sampler_factory.BatchFormer = partial(BatchFormer, size=7, min_batches=2, block=3)  # type: ignore[misc, assignment]
    packing = {"packing": "best_fit", "packing_length": 16, "per_device_train_batch_size": 1}
    for name, settings in {"budget": {"max_tokens_per_batch": 24}, "packing": packing}.items():
        tell(**{name: outcome_of(*trained(name, items, **settings))})
        settings = {**settings, "lr_scheduler_type": "constant"}
        tell(**{f"{name} of a stream": outcome_of(*trained(f"{name}-stream", Stream(items), **settings))})
        _, before = trained(f"{name}-twice", Stream(items), callbacks=[StopAt(2)], **settings)
        trainer, after = trained(f"{name}-twice", Stream(items), resume=True, **settings)
        tell(**{f"{name} of a stream, resumed": outcome_of(trainer, before + after)})


def committed_by(folder: Path, **settings: Any) -> list[Any]:
    """Threads that committed, and what lies there when train() returns."""
    names: set[str] = set()
    commit = CheckpointStore.commit

    def observed(*args: Any) -> Any:
        names.add(threading.current_thread().name)
        time.sleep(0.3)  # a process that does not wait for the disk would be gone by then
        return commit(*args)

    CheckpointStore.commit = observed  # type: ignore[method-assign]
    try:
        trainer_of("means", folder, 2, save_strategy="steps", save_steps=2, **settings).train()
    finally:
        CheckpointStore.commit = commit  # type: ignore[method-assign]
    return [sorted(names), CheckpointStore(folder).steps()]


main_goes_first()
engines(trainer_of("means", FOLDER / "engine", 2))
for name in WINDOWS:
    trainer = trainer_of(name, FOLDER / "windows", 2, eval_strategy="epoch")
    tell(**{name: outcome(trainer), f"{name}: judged": judged(trainer)})
for name in ("means", "counted"):
    counts = Counts()
    trainer = trainer_of(name, FOLDER / "counts", 2, logging_steps=4)
    trainer.add_callback(counts)
    trainer.train()
    tell(**{f"{name}: collectives": counts.by_step})
recorded()
late_counts()
by_items()
dispatching()
formed()
checkpoints()
