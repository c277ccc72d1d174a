"""Frozen plans: the decisions made before training, once. They do not record the origin of a decision."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainwright.config.behaviour import OURS, Behaviour

# Argument for parameters that only some processes reach, for messages about them.
FIND_UNUSED_FIELD = "ddp_find_unused_parameters"
# Steps and batches of data without a known end: more than any run has, so comparisons work.
OPEN_END = sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Length of a run, in epochs, steps and batches."""

    num_epochs: int  # epochs begun (the last one may be cut short); very large if the data has no length
    steps_per_epoch: int  # optimizer steps in a full epoch
    batches_per_epoch: int  # micro-batches in a full epoch, per process
    max_steps: int  # optimizer steps of the whole run; OPEN_END if the run ends with the data
    micro_batches: int  # micro-batches in an optimizer step (gradient accumulation)
    num_examples: int  # samples in the training data
    num_train_samples: float  # samples that the whole run trains on, repeats counted
    total_batch_size: int  # samples per optimizer step over all processes
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm; 0 leaves them alone
    # optimizer steps beyond the position in the data divided by the step size; not 0 after a resume with another
    # step size
    shift: int = 0
    num_left_out: int = 0  # samples in quarantine, which are in none of these numbers

    @property
    def has_open_end(self) -> bool:
        """Returns True if the run ends with the last pass over data of unknown length."""
        return self.max_steps == OPEN_END

    @classmethod
    def from_values(cls, values: tuple[Any, ...], *, micro_batches: int, max_grad_norm: float) -> StepPlan:
        """From the seven values of the published hook `set_initial_training_values`, in its order."""
        epochs, steps_per_epoch, num_examples, num_samples, total_batch, batches_per_epoch, max_steps = values
        return cls(
            num_epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            batches_per_epoch=batches_per_epoch,
            max_steps=max_steps,
            micro_batches=micro_batches,
            num_examples=num_examples,
            num_train_samples=num_samples or 0,
            total_batch_size=total_batch,
            max_grad_norm=max(max_grad_norm or 0.0, 0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan:
    """Settings of a loader. Fields without a comment belong to torch's DataLoader (`workers`: `num_workers`)."""

    batch_size: int  # samples per batch on this process
    seed: int  # base of the order of samples; epoch e is shuffled with `seed + e`
    drop_last: bool = False
    behaviour: Behaviour = OURS
    workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    multiprocessing_context: str | None = None
    in_order: bool = True
    timeout_s: float = 0.0
    seeded: bool = True  # False: the order is drawn from torch's global generator
    # "permutation" draws an array of indices, "feistel" computes each, "auto" that for many samples
    shuffle_method: str = "auto"
    seed_samples: bool = False  # random numbers in a sample depend only on seed, epoch and sample
    rank: int = 0
    num_processes: int = 1  # that share the data
    even_tail: bool = True  # a tail that does not fill a batch of all processes is split evenly among them
    is_training: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How batches are formed, where not a number of samples decides. A capability adds the settings of its own way."""

    text: str  # a batch in words
    joins_samples: bool = False  # a row of a batch has several samples


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """Order of samples, and which samples form a batch."""

    strategy: str  # "random", "sequential", "group_by_length" or "batch_rebalance"
    batch_size: int  # samples per batch on a process, or rows that `batching` joins them into
    micro_batches: int  # per optimizer step and process
    num_processes: int
    seed: int  # base of the orders that are a function of seed and epoch
    length_of: str = "input_ids"  # entry of a sample that gives its length
    length_column: str | None = None  # column that has the lengths, if the dataset has it
    pad_to: int | None = None  # batches are padded to a multiple of this many tokens
    drop_last: bool = False  # drop an incomplete last batch or window
    show_progress: bool = False  # reading lengths shows its progress when it takes long
    batching: Batching | None = None  # None: batches have a fixed number of samples
    order: object | None = None  # the order of samples that a capability has planned; None: that of `strategy`


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPlan:
    """Numbers' formats."""

    mixed: str = "no"  # "no", "bf16" or "fp16": the forward pass runs under autocast to this type
    tf32: bool | None = None  # matrix products on the GPU in TF32; None leaves torch's setting alone


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilePlan:
    """Settings of torch.compile; the model is not compiled where `backend` is None."""

    backend: str | None = None
    mode: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DDPPlan:
    """Settings of data parallelism with whole models; None leaves a setting to torch."""

    backend: str | None = None
    timeout_s: float = 1800  # a collective operation that takes longer fails
    find_unused_parameters: bool | None = None  # None: looked for, unless activations are recomputed
    bucket_cap_mb: int | None = None
    broadcast_buffers: bool | None = None
    static_graph: bool | None = None
    recomputes_activations: bool = False  # activation checkpointing is on
    sync_each_batch: bool = False  # gradients are averaged after every micro-batch, not once in a window
    # variables that a launcher did not set under the names that torch reads
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadersOfOthers:
    """Settings of accelerate for loaders that other code passes to `accelerator.prepare`."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    data_seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPPlan:
    """Settings of FSDP: sharding of parameters, gradients and states over processes."""

    # the entries of `fsdp_config` without prefixes; None: the configuration of `accelerate launch`
    settings: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedPlan:
    """DeepSpeed's configuration."""

    config: Mapping[str, Any]  # with its "auto" values filled in, as far as the arguments tell them


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """Numbers of processes for each kind of parallelism."""

    dp_replicate: int = 1  # copies of the model, each with batches of its own
    dp_shard: int = 1  # processes with batches of their own that hold a copy's parameters in parts
    tp: int = 1  # processes that compute each layer of one batch together
    cp: int = 1  # processes that have parts of one batch's sequences, and gather keys and values
    sp: int = 1  # the same, which exchange heads for tokens; at most one of the two is above 1
    in_model: bool = False  # the model was brought in parts
    has_others: bool = False  # an adapter's weights, which nothing averages over the replicas, are added to the parts
    writes_parts: bool = False  # each process writes its part of a checkpoint
    given: Any = None  # the user's accelerate.ParallelismConfig, not imported here

    @property
    def num_together(self) -> int:
        """Processes that work on one batch."""
        return self.tp * self.num_per_sequence

    @property
    def num_in_all(self) -> int:
        return self.dp_replicate * self.dp_shard * self.num_together

    @property
    def num_per_sequence(self) -> int:
        """Processes among which each sequence is cut."""
        return self.cp * self.sp

    @property
    def layers_in_parts(self) -> bool:
        """Whether the model came in parts, or has to."""
        return self.in_model or self.tp > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Settings that select and set up an engine. At most one of `fsdp` and `deepspeed` is set."""

    device: Any
    world_size: int = 1
    num_devices: int = 1  # that this process computes on
    keeps_state: bool = False  # keep the state of accelerate that already exists
    use_cpu: bool = False
    precision: PrecisionPlan = PrecisionPlan()
    compile: CompilePlan = CompilePlan()
    non_blocking: bool = False
    ddp: DDPPlan = DDPPlan()
    hang_timeout_s: float = 0.0  # 0: a standstill is not looked for
    loaders: LoadersOfOthers = LoadersOfOthers()
    fsdp: FSDPPlan | None = None
    deepspeed: DeepSpeedPlan | None = None
    parallel: ParallelPlan | None = None  # None: nothing but batches is shared out
    stands_in: bool = False  # tensors have no memory, and the other processes are not there: for a plan of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """Retention of checkpoints, and reasons for a save besides the interval of steps."""

    keep_last: int | None = None  # checkpoints of this run kept, the best one counted in; None keeps all
    keep_every_steps: int | None = None  # keep also the checkpoints at multiples of this many steps
    keep_every_s: float | None = None  # keep also one checkpoint per this many seconds
    save_every_s: float | None = None  # longest time between two saves
    max_train_s: float | None = None  # time in which a `train()` saves and ends
    saves_on_interrupt: bool = False  # save the last finished step when a signal ends the run
    saves_on_exception: bool = False  # save it when an error ends the run
    requeues: bool = False  # the job goes back into the cluster's queue after a signal

    @property
    def may_save(self) -> bool:
        """Returns True if a run with these settings may write a checkpoint."""
        return self.saves_on_interrupt or self.saves_on_exception


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """Settings of generation in an evaluation."""

    predicts: bool = False  # predictions are generated tokens, not logits
    config: Any = None  # a GenerationConfig, or where to find one; None: the model's own
    max_length: int | None = None  # length of generated text, unless a call sets it
    num_beams: int | None = None  # number of beams, unless a call sets it

    def settings(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords of `generate` for a call that asked for these."""
        settings = {name: value for name, value in asked.items() if value is not None}
        if self.max_length is not None and "max_new_tokens" not in settings:
            settings.setdefault("max_length", self.max_length)
        if self.num_beams is not None:
            settings.setdefault("num_beams", self.num_beams)
        return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """Settings of an evaluation."""

    batch_size: int  # samples per batch on this process
    move_every: int | None = None  # batches after which results leave the device; None: at the end
    concat_batches: bool = True  # False hands metrics a list of batches instead of one array
    include: tuple[str, ...] = ()  # extras for metrics, "inputs" and "loss"
    streams_metrics: bool = False  # metrics take one batch at a time (`batch_eval_metrics`)
    skip_non_finite: bool = True  # exclude batches with a loss that is not finite from the mean
    averages_batches: bool = False  # the loss is the mean of the batches' losses, by rows, not that of all items
    memory_share: float = 0.6  # share of free memory for results; beyond it they go to a file
    spill_folder: str | None = None  # folder of that file; None: the system's temporary folder

    @property
    def joins_results(self) -> bool:
        """Returns True if results become one array, with rows that do not depend on the batches."""
        return not (self.streams_metrics or self.averages_batches or "loss" in self.include) and self.concat_batches
