"""RunPlan: the memory, messages and checkpoints of a run of many processes. Only values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright._types import counted
from trainwright.preflight.memory.memory_plan import KINDS, Collective, PeakMemory, SettingsChange
from trainwright.support.html_table import html_section, html_table
from trainwright.support.units import count_text, duration_text, size_text

DISK_BYTES_PER_S = 100e6  # that a save is expected to write, as `max_train_time` does before a save was seen

CHANGE = ("change", "peak", "price")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The memory of one process, as an example for all of its kind."""

    name: str  # such as "rank 0"
    peak: PeakMemory  # on its device
    loader_bytes: int  # batches that its loader holds in main memory
    offloaded_bytes: int = 0  # masters, optimizer states and gradients that ZeRO keeps in main memory


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSize:
    """A checkpoint of the run."""

    weights_bytes: int
    optimizer_bytes: int  # 0 with save_only_model
    num_writers: int  # processes that write it at the same time

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return self.weights_bytes + self.optimizer_bytes

    @property
    def seconds(self) -> float:
        """Estimated duration of writing it, with `DISK_BYTES_PER_S` for each writer."""
        return self.total_bytes / self.num_writers / DISK_BYTES_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run of many processes, planned in one process without starting it."""

    num_processes: int
    num_replicas: int  # groups of processes that work on the same samples
    per_node: int
    # "ddp", "fsdp2", "shard_grad_op", "hsdp" or "zero1" to "zero3", and "+cp8" or "+sp8" if eight share each sequence
    engine: str
    engine_title: str
    ranks: tuple[RankPlan, ...]  # the kinds of processes, the fullest first
    batch_size: int  # samples of a micro-batch, on one process
    micro_batches: int  # per step
    samples_per_step: int  # over all processes
    num_steps: int | None  # optimizer steps of the run; None: it ends with the data, which have no length
    num_epochs: float | None  # likewise
    tokens_per_step: int | None  # over all processes, padding included; None: batches have no `input_ids`
    collectives: tuple[Collective, ...]  # in a step, as called by the first process
    checkpoint: CheckpointSize
    changes: tuple[SettingsChange, ...] = ()  # the cheapest first
    budget_bytes: int | None = None  # memory of a device; None if unknown

    @property
    def peak_bytes(self) -> int:
        """The peak of the fullest process."""
        return max(rank.peak.total_bytes for rank in self.ranks)

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the whole run, padding included, as the first batches have them; None if unknown."""
        known = self.tokens_per_step is not None and self.num_steps is not None
        return (self.tokens_per_step or 0) * (self.num_steps or 0) if known else None

    @property
    def fits(self) -> bool | None:
        """Returns True if a step fits into each process as it is; None without a budget."""
        return None if self.budget_bytes is None else self.peak_bytes <= self.budget_bytes

    @property
    def cheapest(self) -> SettingsChange | None:
        """Returns the first change with which the step fits; None if it fits already, or with no change."""
        budget = self.budget_bytes
        if budget is None or self.fits:
            return None
        return next((one for one in self.changes if one.peak_bytes is not None and one.peak_bytes <= budget), None)

    def lines(self) -> Iterator[str]:
        """Yields the lines of the plan for the console."""
        yield self._title()
        yield from (f"  {name:14}{text}" for name, text in self._facts())
        yield "memory of a process at the moment of its peak, predicted:"
        yield from ("  " + f"{row[0]:16}" + "".join(f"{cell:>22}" for cell in row[1:]) for row in self._memory())
        if self.collectives:
            yield "communication of a step, in each process:"
            yield from (f"  {name:16}{calls:>10}{size:>12}" for name, calls, size in self._messages())
        if self.budget_bytes is not None:
            yield self._verdict()
        yield from (f"  {change}: {size} ({price})" for change, size, price in self._changes())

    def _repr_html_(self) -> str:
        changes = (
            ""
            if self.budget_bytes is None
            else html_section(self._verdict(), html_table(self._changes(), header=CHANGE))
        )
        return html_section(
            self._title(),
            html_table(self._facts()),
            html_section("memory of a process at the moment of its peak", html_table(self._memory())),
            html_section("communication of a step", html_table(self._messages(), header=("", "calls", "bytes"))),
            changes,
        )

    def _title(self) -> str:
        nodes = -(-self.num_processes // self.per_node)
        on = f"{counted(self.num_processes, 'process')} on {counted(nodes, 'node')}"
        return f"plan of {on}: {self.engine_title} (engine={self.engine!r})"

    def _facts(self) -> list[tuple[str, str]]:
        groups = "processes" if self.num_replicas == self.num_processes else "replicas"
        sizes = f"{self.batch_size} x {self.micro_batches} x {self.num_replicas} {groups}"
        facts = [("batch", f"{sizes} = {counted(self.samples_per_step, 'sample')} a step")]
        if self.num_steps is not None:
            epochs = (
                "" if self.num_epochs is None else f" in {self.num_epochs:g} epoch{'' if self.num_epochs == 1 else 's'}"
            )
            facts.append(("run", f"{counted(self.num_steps, 'step')}{epochs}"))
        if self.num_tokens is not None:
            facts.append(
                ("tokens", f"about {count_text(self.num_tokens)}, {count_text(self.tokens_per_step or 0)} a step")
            )
        return [*facts, ("checkpoint", self._saving())]

    def _saving(self) -> str:
        saved = self.checkpoint
        parts = f"weights {size_text(saved.weights_bytes)}, optimizer {size_text(saved.optimizer_bytes)}"
        speed = f"{size_text(DISK_BYTES_PER_S)} a second"
        time = f"about {duration_text(saved.seconds)} at {speed}"
        if saved.num_writers > 1:
            return f"{size_text(saved.total_bytes)} ({parts}); each process writes its part, {time}"
        return f"{size_text(saved.total_bytes)} ({parts}); rank 0 writes it, {time}"

    def _memory(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("", *(rank.name for rank in self.ranks))]
        kinds = [kind for kind in KINDS if any(rank.peak.by_kind.get(kind) for rank in self.ranks)]
        rows += [(kind, *(size_text(rank.peak.by_kind.get(kind, 0)) for rank in self.ranks)) for kind in kinds]
        rows.append(("together", *(size_text(rank.peak.total_bytes) for rank in self.ranks)))
        rows.append(("", *(f"in {rank.peak.moment}" for rank in self.ranks)))
        if any(rank.offloaded_bytes for rank in self.ranks):
            rows.append(("offloaded (host)", *(size_text(rank.offloaded_bytes) for rank in self.ranks)))
        rows.append(("loader (host)", *(size_text(rank.loader_bytes) for rank in self.ranks)))
        return rows

    def _messages(self) -> list[tuple[str, str, str]]:
        return [(one.name, counted(one.calls, "call"), size_text(one.bytes)) for one in self.collectives]

    def _changes(self) -> Iterator[tuple[str, str, str]]:
        """Yields the changes that take less memory, if it was asked how much there may be."""
        for change in self.changes if self.budget_bytes is not None else ():
            if change.peak_bytes is not None and change.peak_bytes < self.peak_bytes:
                yield str(change), size_text(change.peak_bytes), change.price

    def _verdict(self) -> str:
        budget = f"budget: {size_text(self.budget_bytes or 0)} for each process; "
        if self.fits:
            return budget + "it fits"
        if self.cheapest is not None:
            return budget + f"it does not fit; the cheapest change that fits is {self.cheapest}"
        return budget + "it does not fit, nor with any of these changes"
