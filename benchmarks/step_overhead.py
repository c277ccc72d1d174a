"""What a trainer adds to a step that people really run: beside a loop written by hand that does the same work.

    python benchmarks/step_overhead.py                         every row timed, subjects in turn; then one table
    python benchmarks/step_overhead.py --count                 and counted in machine instructions (valgrind)
    python benchmarks/step_overhead.py --count --rows own mlp  these rows
    python benchmarks/step_overhead.py --quick                 ten turns each

A row is data: `ROWS`. One JSON line for each, then the table. README.md says how to read it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

import instructions  # noqa: E402
from harness import Subject, Turns, Watch, measure, print_json, print_table, silence, versions  # noqa: E402

BATCH = 8
FEATURES = 32
CLASSES = 4
VOCAB = 128
LENGTH = 32


@dataclass(frozen=True)
class Case:
    """A model, its data, and the steps of a turn by accumulation."""

    name: str
    build: Callable[[], nn.Module]
    items: Callable[[int], list[dict[str, Any]]]
    steps: dict[int, int]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Words(nn.Module):
    """Classifies texts by the mean of their words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 64, padding_idx=0)
        self.head = nn.Linear(64, CLASSES)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        summed = self.embedding(input_ids).sum(dim=1)
        logits = self.head(summed / attention_mask.sum(dim=1, keepdim=True))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def vectors(size: int) -> list[dict[str, Any]]:
    drawn = [{"x": torch.randn(FEATURES), "labels": i % CLASSES} for i in range(256)]
    return [drawn[i % 256] for i in range(size)]


def sequences(size: int) -> list[dict[str, Any]]:
    drawn = [{"input_ids": (ids := torch.randint(1, VOCAB, (LENGTH,))), "labels": ids} for _ in range(256)]
    return [drawn[i % 256] for i in range(size)]


def texts(size: int) -> list[dict[str, Any]]:
    def text(number: int) -> dict[str, Any]:
        ids = torch.randint(1, VOCAB, (4 + number % LENGTH,)).tolist()
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": number % CLASSES}

    drawn = [text(number) for number in range(256)]
    return [drawn[i % 256] for i in range(size)]


class OwnData(torch.utils.data.Dataset[dict[str, Any]]):
    """What most users write: a class of their own."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def own_collator(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    labels = [torch.as_tensor(item["labels"]) for item in items]
    return {name: torch.stack([item[name] for item in items]) for name in items[0] if name != "labels"} | {
        "labels": torch.stack(labels)
    }


def padding_collator() -> Callable[[list[Any]], Any]:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"[PAD]": 0} | {f"w{i}": i for i in range(1, VOCAB)}, unk_token="[PAD]"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", model_input_names=["input_ids", "attention_mask"]
    )
    return DataCollatorWithPadding(tokenizer)


CASES = {
    case.name: case
    for case in (
        Case("mlp", Mlp, vectors, {1: 40, 8: 10}),
        Case("words", Words, texts, {1: 20}),
        Case("gpt2", gpt2, sequences, {1: 10, 8: 2}),
        Case("llama", llama, sequences, {1: 10, 8: 2}),
    )
}
WARM_UP = 20
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
EVAL_BATCHES = 4


@dataclass(frozen=True)
class Row:
    """What is trained and how, and what ours may take in machine instructions beside the loop by hand."""

    name: str
    model: str = "mlp"
    accumulation: int = 1
    data: str = "list"  # or of a class and a collator of one's "own", "padded", "transformed", "arrow"
    num_workers: int = 0
    logging_steps: int = 10
    bar: bool = False
    eval_steps: int = 0  # 0: no evaluation
    checkpointing: bool = False  # of activations
    evaluates: bool = False  # an evaluation of the loss alone, whose batches are the steps
    processes: int = 1
    limit: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # of ours


ROWS = {
    row.name: row
    for row in (
        Row("mlp", limit=1.10),
        Row("mlp x 8", accumulation=8, limit=1.12),
        Row("own", data="own", limit=1.50),
        Row("own x 8", data="own", accumulation=8, limit=1.18),
        Row("own, log at each step", data="own", logging_steps=1),
        Row("own, log at each 100th", data="own", logging_steps=100),
        Row("own, bar", data="own", bar=True),
        Row("own, bar, log at each step", data="own", bar=True, logging_steps=1),
        Row("own, bar, log at each 100th", data="own", bar=True, logging_steps=100),
        Row("own, 2 workers", data="own", num_workers=2),
        Row("own, evaluation", data="own", eval_steps=10),
        Row("arrow", data="arrow"),
        Row("transformed", data="transformed"),
        Row("padded", model="words", data="padded"),
        Row("gpt2", model="gpt2", data="own", limit=1.02),
        Row("gpt2 x 8", model="gpt2", data="own", accumulation=8, limit=1.0),
        Row("gpt2, checkpointing", model="gpt2", data="own", checkpointing=True),
        Row("llama", model="llama", data="own", limit=1.02),
        Row("llama x 8", model="llama", data="own", accumulation=8, limit=1.0),
        Row("loss of mlp", data="own", evaluates=True, limit=1.19),
        Row("loss of gpt2", model="gpt2", data="own", evaluates=True, limit=1.0),
        Row("own, 2 processes", data="own", processes=2),
        Row("no guard", settings={"on_nonfinite": "ignore"}),
        Row("on_spike", settings={"on_spike": "skip"}),
        Row("ledger", settings={"ledger": True, "on_nonfinite": "ignore"}),
        Row("ledger of gpt2", model="gpt2", data="own", settings={"ledger": True}),
    )
}
NOT_TIMED = ("own, 2 processes", "no guard", "on_spike", "ledger", "ledger of gpt2")  # ddp_step.py times the first


@dataclass(frozen=True)
class Work:
    """What each subject has to do."""

    row: Row
    num_steps: int

    @functools.cached_property
    def case(self) -> Case:
        return CASES[self.row.model]

    @property
    def batches(self) -> int:
        return self.row.accumulation * self.row.processes * (self.num_steps + 1)

    def model_and_items(self) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        # One epoch is never left, so no subject has an end of one within a turn.
        return self.case.build(), self._as_data(self.case.items(BATCH * self.batches))

    def eval_items(self) -> Any:
        return self._as_data(self.case.items(BATCH * EVAL_BATCHES))

    def _as_data(self, items: list[dict[str, Any]]) -> Any:
        kind = self.row.data
        if kind in ("own", "padded"):
            return OwnData(items)
        if kind == "list":
            return items
        import datasets

        columns = {name: [torch.as_tensor(item[name]).tolist() for item in items] for name in items[0]}
        made = datasets.Dataset.from_dict(columns)
        if kind == "transformed":
            made.set_transform(lambda rows: {name: [torch.tensor(one) for one in rows[name]] for name in rows})
        return made

    def collator(self) -> Callable[[list[Any]], Any]:
        from transformers import default_data_collator

        return {"own": own_collator, "padded": padding_collator()}.get(self.row.data, default_data_collator)

    def loader(self, items: Any, *, shuffle: bool) -> DataLoader[Any]:
        sampler = torch.utils.data.DistributedSampler(items) if self.row.processes > 1 else None
        return DataLoader(
            items,
            batch_size=BATCH,
            shuffle=shuffle and sampler is None,
            sampler=sampler,
            collate_fn=self.collator(),
            num_workers=self.row.num_workers,
        )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Returns fused AdamW whose decay spares biases and weights of norms, as both trainers make it."""
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [one for one in parameters if one.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)


def by_hand(work: Work, watch: Watch) -> None:
    """The ordinary loop: what a careful person writes without a trainer."""
    row = work.row
    model, items = work.model_and_items()
    model.train()
    if row.evaluates:
        tell_batches(model, watch)
        sum_of_losses(model, work.loader(items, shuffle=False))
        return
    if row.checkpointing:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    wrapped = nn.parallel.DistributedDataParallel(model) if row.processes > 1 else model
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / work.num_steps))
    batches = iter(work.loader(items, shuffle=True))
    eval_loader = work.loader(work.eval_items(), shuffle=False) if row.eval_steps else None
    device = torch.device("cpu")
    running = torch.zeros(())
    history = []
    bar = progress_bar(work)
    for step in range(1, work.num_steps + 1):
        for _ in range(row.accumulation):
            batch = {name: value.to(device) for name, value in next(batches).items()}
            loss = wrapped(**batch)["loss"] / row.accumulation
            loss.backward()
            running += loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        learning_rate = schedule.get_last_lr()[0]
        schedule.step()
        optimizer.zero_grad()
        if bar is not None:
            bar.update(1)
        if step % row.logging_steps == 0:
            logs = {
                "loss": running.item() / row.logging_steps,
                "grad_norm": grad_norm.item(),
                "learning_rate": learning_rate,
                "step": step,
            }
            running.zero_()
            history.append(logs)
            print(logs) if bar is None else bar.write(str(logs))
        if eval_loader is not None and step % row.eval_steps == 0:
            print({"eval_loss": sum_of_losses(model, eval_loader) / EVAL_BATCHES})
            model.train()
        watch.step_done(step)


def progress_bar(work: Work) -> Any:
    """tqdm's, where the row has one; None otherwise."""
    from tqdm import tqdm

    return tqdm(total=work.num_steps) if work.row.bar else None


def tell_batches(model: nn.Module, watch: Watch) -> None:
    """Tells the watch of each forward pass, as callbacks of an evaluation are not alike."""
    forward = model.forward
    numbers = itertools.count(1)

    @functools.wraps(forward)  # trainers read its signature
    def told(**batch: Any) -> Any:
        watch.step_done(next(numbers))
        return forward(**batch)

    model.forward = told


def sum_of_losses(model: nn.Module, loader: DataLoader[Any]) -> float:
    model.eval()
    total = torch.zeros(())
    device = torch.device("cpu")
    with torch.no_grad():
        for batch in loader:
            total += model(**{name: value.to(device) for name, value in batch.items()})["loss"]
    return total.item()


def by_floor(work: Work, watch: Watch) -> None:
    """What has to be done: lists made once, no loader, no schedule object, one collator call for a batch."""
    row = work.row
    model, items = work.model_and_items()
    model.train()
    parameters = list(model.parameters())
    optimizer = make_optimizer(model)
    collate = work.collator()
    order = torch.randperm(len(items)).tolist()
    running = torch.zeros(())
    place = 0
    for step in range(1, work.num_steps + 1):
        for _ in range(row.accumulation):
            batch = collate([items[i] for i in order[place : place + BATCH]])
            place += BATCH
            loss = model(**batch)["loss"] / row.accumulation
            loss.backward()
            running += loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1.0 - step / work.num_steps)
        for parameter in parameters:
            parameter.grad = None
        if step % row.logging_steps == 0:
            print({"loss": running.item() / row.logging_steps, "grad_norm": grad_norm.item(), "step": step})
            running.zero_()
        watch.step_done(step)


def has_floor(row: Row) -> bool:
    return row.processes == 1 and not (
        row.evaluates or row.eval_steps or row.bar or row.num_workers or row.checkpointing or row.settings
    )


def by_trainer(library: Any, work: Work, watch: Watch) -> None:
    """A trainer of `library`, which has Trainer, TrainingArguments and TrainerCallback."""
    row = work.row

    class TellsSteps(library.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.step_done(state.global_step)

    model, items = work.model_and_items()
    own = {"data_collator": work.collator()} if row.data in ("own", "padded") else {}
    evaluates = {"eval_strategy": "steps", "eval_steps": row.eval_steps} if row.eval_steps else {}
    is_ours = library.__name__ == "trainwright"
    more = dict(row.settings) if is_ours else {}
    if row.checkpointing:
        more["activation_checkpointing" if is_ours else "gradient_checkpointing"] = True
    with tempfile.TemporaryDirectory() as output_dir:
        args = library.TrainingArguments(
            output_dir=output_dir,
            use_cpu=True,
            report_to="none",
            disable_tqdm=not row.bar,
            save_strategy="no",
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            gradient_accumulation_steps=row.accumulation,
            max_steps=work.num_steps,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            logging_steps=min(row.logging_steps, work.num_steps),  # a run that never logs is refused
            dataloader_num_workers=row.num_workers,
            remove_unused_columns=row.data != "transformed",
            log_level="warning",  # below it a log is not printed, and the loop by hand prints too
            **evaluates,
            **more,
        )
        own |= {"eval_dataset": work.eval_items()} if row.eval_steps else {}
        trainer = library.Trainer(model=model, args=args, train_dataset=items, callbacks=[TellsSteps()], **own)
        if row.evaluates:
            tell_batches(model, watch)
            trainer.evaluate(items)
        else:
            trainer.train()


def by_lightning(work: Work, watch: Watch) -> None:
    """Lightning's trainer, where it is installed: the same model, data, clipping, schedule and logs."""
    import warnings

    import lightning

    row = work.row
    model, items = work.model_and_items()

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / work.num_steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if (index + 1) % row.accumulation == 0:
                watch.step_done(self.global_step)

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=work.num_steps,
            accumulate_grad_batches=row.accumulation,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=row.bar,
            enable_model_summary=False,
            log_every_n_steps=row.logging_steps,
            default_root_dir=folder,
            num_sanity_val_steps=0,
        ).fit(Module(), work.loader(items, shuffle=True))


def by_accelerate(work: Work, watch: Watch) -> None:
    """The ordinary loop with accelerate's objects."""
    from accelerate import Accelerator

    row = work.row
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=row.accumulation)
    model, items = work.model_and_items()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / work.num_steps))
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, work.loader(items, shuffle=True), schedule
    )
    model.train()
    running = torch.zeros(())
    step = 0
    bar = progress_bar(work)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            running += loss.detach() / row.accumulation
            if accelerator.sync_gradients:
                grad_norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        if bar is not None:
            bar.update(1)
        if step % row.logging_steps == 0:
            logs = {"loss": running.item() / row.logging_steps, "grad_norm": grad_norm.item(), "step": step}
            running.zero_()
            print(logs) if bar is None else bar.write(str(logs))
        watch.step_done(step)


def subjects(row: Row, num_steps: int) -> dict[str, Subject]:
    import transformers

    import trainwright

    work = Work(row, num_steps)
    found: dict[str, Subject] = {"hand": partial(by_hand, work)}
    if has_floor(row):
        found["floor"] = partial(by_floor, work)
    found["trainwright"] = partial(by_trainer, trainwright, work)
    if not row.settings:
        found["transformers"] = partial(by_trainer, transformers, work)
    plain = not (row.evaluates or row.eval_steps or row.checkpointing or row.settings or row.processes > 1)
    if plain:
        found["accelerate"] = partial(by_accelerate, work)
    if plain and find_spec("lightning") is not None:
        found["lightning"] = partial(by_lightning, work)
    return found


# -- counted -----------------------------------------------------------------------------------------------------------


def steps_to_count(row: Row) -> tuple[int, int]:
    """The steps between whose ends is counted: whole intervals of logs and evaluations; a spike has a full window.

    Of the larger models fewer, where a log is a hundredth of a step, and valgrind takes seconds for one.
    """
    if row.settings and row.model == "mlp":
        return 150, 350
    if row.settings:  # of a ledger: as many as it takes logits of together
        return 2, 34
    if row.model in ("gpt2", "llama") and not row.evaluates:
        return (2, 4) if row.accumulation > 1 else (2, 12)
    return 10, 10 + max(row.logging_steps, 10 if row.accumulation > 1 else 20)


def count(names: list[str], only: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Machine instructions of a step, in millions, by row and subject."""
    return instructions.counted([__file__, "--under-valgrind", json.dumps([names, only])])


def jobs(names: list[str], only: list[str] | None) -> Iterator[tuple[str, str, Callable[[], None], int]]:
    """Yields what a process under valgrind counts: row, subject, job, steps. Imports come first, for all forks."""
    import transformers

    import trainwright

    _ = [(one.Trainer, one.TrainingArguments) for one in (trainwright, transformers)]
    for model in {ROWS[name].model for name in names}:
        CASES[model].build()
    for name in names:
        row = ROWS[name]
        first, last = steps_to_count(row)
        for subject, loop in subjects(row, last + 1).items():
            if not only or subject in only:
                job = partial(in_processes, row.processes, partial(loop, instructions.Counts(first, last)))
                yield name, subject, job, last - first


def in_processes(number: int, job: Callable[[], None]) -> None:
    """Runs a job here, and in another process of the same group if there are two."""
    if number == 1:
        with silence():
            job()
        return
    with tempfile.TemporaryDirectory() as folder:
        other = os.fork()
        os.environ |= {"RANK": str(int(not other)), "LOCAL_RANK": str(int(not other)), "WORLD_SIZE": "2"}
        os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        store = torch.distributed.FileStore(f"{folder}/store", 2)
        torch.distributed.init_process_group("gloo", store=store, rank=int(not other), world_size=2)
        with silence():
            job()


# -- the table ---------------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW", help="default: all")
    parser.add_argument("--subjects", nargs="+", help="count only these; default: all")
    parser.add_argument("--count", action="store_true", help="count machine instructions too; needs valgrind")
    parser.add_argument("--no-time", action="store_true", help="take no times")
    parser.add_argument("--quick", action="store_true", help="ten turns")
    parser.add_argument("--turns", type=int, default=40, help="how often each subject has its turn; default 40")
    parser.add_argument("--check", action="store_true", help="end with 1 if trainwright exceeds a limit")
    parser.add_argument("--under-valgrind", help=argparse.SUPPRESS)
    return parser.parse_args()


def timed(row: Row, turns: int) -> dict[str, dict[str, float]]:
    cut = Turns(warm_up=WARM_UP, num=turns, steps=CASES[row.model].steps[row.accumulation])
    return measure(partial(subjects, row), base="hand", turns=cut)


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    if args.under_valgrind:
        instructions.run_jobs(jobs(*json.loads(args.under_valgrind)))
        return 0
    counts = count(args.rows, args.subjects) if args.count and instructions.can_count() else {}
    table = [
        ["row", "subject", "instructions", "millions", "limit", "time", "min", "max", "cpu", "us/step", "calls/step"]
    ]
    exceeded = False
    for name in args.rows:
        row = ROWS[name]
        of_row = counts.get(name, {})
        times = {} if args.no_time or name in NOT_TIMED else timed(row, 10 if args.quick else args.turns)
        ratios = {subject: number / of_row["hand"] for subject, number in of_row.items() if "hand" in of_row}
        print_json(
            {
                "benchmark": "step_overhead",
                "row": name,
                "limit": row.limit,
                "millions_of_instructions": of_row,
                "ratios": ratios,
                "times": times,
                **versions("torch", "transformers", "accelerate", "trainwright"),
            }
        )
        exceeded |= row.limit is not None and ratios.get("trainwright", 0.0) > row.limit
        for subject in dict.fromkeys([*of_row, *times]):
            ours = subject == "trainwright" and row.limit is not None
            cells = [f"{ratios[subject]:.3f}" if subject in ratios else ""]
            cells += [f"{of_row[subject]:.3f}" if subject in of_row else "", f"{row.limit:.2f}" if ours else ""]
            time = times.get(subject)
            cells += (
                [""] * 6
                if time is None
                else [
                    *(f"{time[key]:.2f}" for key in ("ratio", "min", "max", "ratio_cpu")),
                    *(f"{time[key]:.0f}" for key in ("us_per_step", "python_calls_per_step")),
                ]
            )
            table.append([name, subject, *cells])
    print()
    print_table(table)
    return int(args.check and exceeded)


if __name__ == "__main__":
    sys.exit(main())
