"""A loop written by hand and both trainers over the same work; what their steps take."""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import Turns, ratios, silence, take_turns
from transformers import default_data_collator

from trainwright.distributed.device import DeviceMemory, peak_flops, pins_memory, synchronize

from .models import DEVICE, SHAPES, TINY, Shape, collate_padded, model_of, rows

LOGGED_EVERY = 10  # steps
AfterStep = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """What every subject trains; steps are those of the optimizer, batches those of one micro-batch."""

    name: str
    shape: str
    batch: int
    length: int  # tokens of a row, of the longest one where rows are ragged
    accumulation: int = 1
    is_lora: bool = False
    recomputes: bool = False
    autocasts: bool = False  # weights in fp32 (adapters, where there are), computation in bf16
    is_ragged: bool = False
    warm_up: int = 4  # steps before the clock starts
    timed: int = 20
    counted: int = 5  # steps after it in which waits are counted; none of them may be logged

    @property
    def num_steps(self) -> int:
        return self.warm_up + self.timed + (self.counted + 1 if self.counted else 0)

    @property
    def tokens_a_step(self) -> int:
        return self.batch * self.length * self.accumulation

    def tiny(self) -> Job:
        """The same with few tokens and steps, to try the script."""
        return dataclasses.replace(self, length=32, warm_up=2, timed=3, counted=2)


class Work:
    """A job's model and rows."""

    def __init__(self, job: Job, *, is_tiny: bool) -> None:
        self.job = job.tiny() if is_tiny else job
        self.shape: Shape = TINY if is_tiny else SHAPES[job.shape]
        self.is_tiny = is_tiny
        self.num_parameters = 0

    def model(self, attention: str = "sdpa") -> Any:
        job = self.job
        dtype = torch.float32 if job.autocasts and not job.is_lora else torch.bfloat16
        made = model_of(self.shape, job.length, attention=attention, is_lora=job.is_lora, dtype=dtype)
        self.num_parameters = sum(value.numel() for value in made.parameters())
        return made

    def rows(self) -> list[dict[str, Any]]:
        job = self.job
        if job.is_ragged:
            return rows(self.shape, job.length, 32 if self.is_tiny else 256, is_ragged=True)
        return rows(self.shape, job.length, job.batch * job.accumulation * job.num_steps)

    def flops(self) -> float:
        """Operations of a step: 6 a parameter and token, 4 where only adapters have gradients, and those of causal
        attention, which sees half of the tokens (Chowdhery et al. 2022, appendix B). Recomputation is not counted.
        """
        shape = self.shape
        attention = 6 * shape.layers * shape.heads * shape.head_dim * self.job.length
        return ((4 if self.job.is_lora else 6) * self.num_parameters + attention) * self.job.tokens_a_step


def by_hand(work: Work, after_step: AfterStep) -> None:
    """What a careful person writes."""
    from torch.utils.data import DataLoader

    job = work.job
    model = work.model().to(DEVICE)
    if job.recomputes:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / job.num_steps))
    loader = DataLoader(
        work.rows(),  # type: ignore[arg-type]
        batch_size=job.batch,
        shuffle=True,
        collate_fn=default_data_collator,  # type: ignore[arg-type]
        pin_memory=pins_memory(DEVICE),
    )
    model.train()
    for number, batch in enumerate(loader, start=1):
        on_device = {name: value.to(DEVICE, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=job.autocasts):
            loss = model(**on_device).loss / job.accumulation
        loss.backward()
        step, rest = divmod(number, job.accumulation)
        if rest:
            continue
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % LOGGED_EVERY == 0:
            loss.item()
        after_step(step)


def by_trainer(
    work: Work,
    after_step: AfterStep,
    *,
    library: str,
    attention: str = "sdpa",
    on_step_begin: AfterStep | None = None,
    control_step: Callable[[int, Any], None] | None = None,
    eval_rows: Any = None,
    **settings: Any,
) -> None:
    """`control_step` may ask for saves, logs and evaluations; `settings` are further arguments."""
    package = importlib.import_module(library)
    job = work.job

    class Tells(package.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if on_step_begin is not None:
                on_step_begin(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            after_step(state.global_step)
            if control_step is not None:
                control_step(state.global_step, control)

    with tempfile.TemporaryDirectory() as folder, silence():
        package.Trainer(
            model=work.model(attention),
            args=arguments_of(package, job, folder, **settings),
            train_dataset=work.rows(),
            eval_dataset=eval_rows,
            data_collator=collate_padded if job.is_ragged else default_data_collator,
            callbacks=[Tells()],
        ).train()


def arguments_of(package: Any, job: Job, folder: str, **settings: Any) -> Any:
    """The arguments of a library's trainer for a job."""
    length = {"num_train_epochs": 1} if job.is_ragged else {"max_steps": job.num_steps}
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": job.batch,
        "per_device_eval_batch_size": job.batch,
        "gradient_accumulation_steps": job.accumulation,
        "activation_checkpointing": job.recomputes,
        "bf16": job.autocasts,
        "optim": "adamw_torch_fused",
        "accelerator_config": {"non_blocking": True},
        "logging_steps": LOGGED_EVERY,
        **length,
        **settings,
    }
    known = {field.name for field in dataclasses.fields(package.TrainingArguments)}
    if "activation_checkpointing" not in known:  # transformers before 5.20
        chosen["gradient_checkpointing"] = chosen.pop("activation_checkpointing")
    return package.TrainingArguments(
        output_dir=folder,
        learning_rate=1e-4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        use_cpu=DEVICE.type == "cpu",
        **chosen,
    )


@contextmanager
def counted_waits() -> Iterator[list[warnings.WarningMessage]]:
    """Within it, each operation that makes the host wait for the device appends a warning to the list."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Waits:
    """Counts waits between two steps, where the device tells of them."""

    def __init__(self, first: int, last: int) -> None:
        self._first = first
        self._last = last
        self._open = ExitStack()
        self._found: list[warnings.WarningMessage] = []
        self.a_step: float | None = None
        self.places: dict[str, int] = {}

    def after_step(self, step: int) -> None:
        if DEVICE.type != "cuda" or self._first == self._last:
            return
        if step == self._first:
            self._found = self._open.enter_context(counted_waits())
        elif step == self._last:
            self._open.close()
            real = [one for one in self._found if "synchronizing" in str(one.message)]
            self.a_step = round(len(real) / (self._last - self._first), 2)
            self.places = dict(Counter(f"{'/'.join(one.filename.split('/')[-2:])}:{one.lineno}" for one in real))


def measured(work: Work, run: Callable[..., None]) -> dict[str, Any]:
    """Trains once and returns tokens a second, model FLOPs utilization, the peak of memory and waits a step."""
    job = work.job
    memory = DeviceMemory()
    memory.reset_peak()
    marks: dict[int, float] = {}
    end = job.warm_up + job.timed
    waits = Waits(end + 1, end + 1 + job.counted)  # not from the last timed step on, which may be logged

    def after_step(step: int) -> None:
        if step in (job.warm_up, end):
            synchronize(DEVICE)
            marks[step] = time.perf_counter()
        waits.after_step(step)

    run(work, after_step)
    seconds = (marks[end] - marks[job.warm_up]) / job.timed
    peak = peak_flops(DEVICE)
    return {
        "tokens_per_second": round(job.tokens_a_step / seconds, 1),
        "ms_per_step": round(1000 * seconds, 2),
        "mfu": round(work.flops() / seconds / peak, 3) if peak else None,
        "peak_gib": round(memory.peak_bytes() / 2**30, 2) if memory.is_known else None,
        "waits_per_step": waits.a_step,
        "waits_at": waits.places,
    }


def measured_ragged(work: Work, run: Callable[..., None]) -> dict[str, Any]:
    """Trains an epoch and returns its real tokens a second from the end of the fourth step on."""
    memory = DeviceMemory()
    memory.reset_peak()
    marks: dict[int, float] = {}

    def after_step(step: int) -> None:
        synchronize(DEVICE)
        marks[step] = time.perf_counter()

    run(work, after_step)
    num_steps = max(marks)
    first = min(work.job.warm_up, num_steps - 1)
    tokens = sum(len(item["input_ids"]) for item in work.rows()) * (num_steps - first) / num_steps
    return {
        "tokens_per_second": round(tokens / (marks[num_steps] - marks[first]), 1),
        "steps": num_steps,
        "peak_gib": round(memory.peak_bytes() / 2**30, 2) if memory.is_known else None,
    }


def measured_in_turns(job: Job, *, is_tiny: bool) -> dict[str, Any]:
    """Steps of the three subjects in turns in one process: what else the machine does hits neighbours alike, which
    counts where the host is the limit.
    """
    turns = Turns(warm_up=4, num=2, steps=2) if is_tiny else Turns(warm_up=20, num=10, steps=15)

    def subject(run: Callable[..., None]) -> Callable[[Any], None]:
        def loop(watch: Any) -> None:
            def after_step(step: int) -> None:
                if turns.starts(step) or turns.ends(step):
                    synchronize(DEVICE)
                watch.step_done(step)

            work = Work(job, is_tiny=is_tiny)
            work.job = dataclasses.replace(work.job, warm_up=turns.total_steps, timed=0, counted=0)
            run(work, after_step)

        return loop

    runs = {"hand": by_hand, **{name: partial(by_trainer, library=name) for name in ("transformers", "trainwright")}}
    laps = take_turns({name: subject(run) for name, run in runs.items()}, turns)
    times = {name: lap.wall_s for name, lap in laps.items()}
    return {
        name: ratios(all_s, times["hand"]) | {"ms_per_step": round(1000 * statistics.median(all_s) / turns.steps, 2)}
        for name, all_s in times.items()
    }
