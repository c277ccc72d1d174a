"""Engines of processes that share sequences (`cp_size`, `sp_size`), with whole and with sharded models.

Processes that share a sequence get the same batches and count once for the data. How sequences are cut is in
`sequence_parts.py`; here is when: in the micro-batches of a step and in evaluations. Elsewhere (`generate`, a call of
the model in a callback) each process runs the whole batch that it is given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainwright._types import Optimizer, output_logits, output_loss
from trainwright.config.plans import EnginePlan, ParallelPlan
from trainwright.engine.base import NO_CONTEXT, MakeOptimizer
from trainwright.engine.distributed_base import DDPEngine, DistributedEngine
from trainwright.engine.fsdp import FSDP2Engine, make_plugin
from trainwright.engine.sequence_parts import (
    ContextShare,
    HeadShare,
    SequenceParts,
    Share,
    attach,
    read_attention,
    uneven_heads,
)
from trainwright.engine.sharded_base import EngineOfParts, reshard
from trainwright.engine.stand_ins import StandInEngine
from trainwright.errors import ArgumentError, ModelError
from trainwright.support import model_facts
from trainwright.support.model_modes import evaluation_mode

logger = logging.getLogger(__name__)

# Difference of logits, as a share of the largest, that rounding may make.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
ROUNDING_ON_A_GPU = 5e-3  # for float32: a GPU may multiply in TF32
INSTEAD = "Train it with fsdp or tp_size instead."


def make_long_context_engine(plan: EnginePlan) -> DistributedEngine:
    """Makes the engine of a plan with `cp` or `sp` above 1."""
    assert plan.parallel is not None
    if plan.parallel.layers_in_parts:
        return SequencesOfParts(plan)
    if plan.fsdp is None:
        return SequencesOfStandIns(plan) if plan.stands_in else SequencesWithDDP(plan)
    plugin = make_plugin(plan.fsdp.settings, on_cpu=torch.device(plan.device).type == "cpu")
    if plugin.fsdp_version != 2:
        raise ArgumentError(
            "fsdp_config: version 1 with cp_size or sp_size is not supported. Leave version out: version 2 shards and "
            "shares sequences."
        )
    return SequencesWithFSDP(plan, plugin)


class SharesSequences(DistributedEngine):
    """Base of these engines, named before the engine that shares out the model: `class E(SharesSequences, ...)`."""

    _parts: SequenceParts
    _keeps_outputs = True  # the trainer reads outputs in training
    _are_outputs_read = False  # extensions do
    _checked: nn.Module | None = None

    def __init__(self, plan: EnginePlan, *others: Any) -> None:
        """Makes the groups of processes that have parts of the same sequences, in all processes at once."""
        super().__init__(plan, *others)
        assert plan.parallel is not None
        self._parts = SequenceParts(make_share(plan.parallel))
        self._parts.share.stands_in = plan.stands_in
        if plan.loaders.dispatch_batches:
            logger.warning(
                "accelerator_config.dispatch_batches=True has no effect with %s, where several processes need the same "
                "batch: each process reads for itself.",
                self._parts.share.setting,
            )

    def modules_that_wait(self, model: nn.Module) -> list[nn.Module] | None:
        return None  # each layer exchanges keys or heads

    @property
    def dispatches(self) -> bool:
        return False  # processes that share sequences need the same batch

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        placed = super().setup_for_evaluation(model)
        self._prepare(self.unwrap(placed))
        return placed

    def _wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        wrapped, optimizer = super()._wrap(model, make_optimizer)
        self._prepare(self.unwrap(wrapped))
        return wrapped, optimizer

    def _prepare(self, model: nn.Module) -> None:
        """Has a model work on parts of sequences, and tries it, once for each model."""
        share = self._parts.share
        assert self._plan.parallel is not None
        check_model(model, share, tp=self._plan.parallel.tp)
        take_masks(model_facts.core_model(model), share)
        attach(model, model_facts.core_model(model))
        if self._checked is not model and not self._plan.stands_in:
            with self._trying(model):
                try_parts(model, self._parts, self.device, precision=self._plan.precision.mixed)
            self._checked = model

    def _trying(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context of the trial of a model."""
        return NO_CONTEXT

    # -- when sequences are cut ----------------------------------------------------------------------------------------

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        self._keeps_outputs = keeps_outputs
        return super().mixed_precision(model, keeps_outputs=keeps_outputs)

    def noting_copies(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return self._parts.looks.noting(copy)

    def note_outputs(self, are_read: bool) -> None:
        self._are_outputs_read = are_read

    @contextmanager
    def accumulate(self, model: nn.Module, *, sync: bool) -> Iterator[None]:
        joins_outputs = self._keeps_outputs or self._are_outputs_read
        with super().accumulate(model, sync=sync), self._parts.used(joins_outputs=joins_outputs):
            yield

    @contextmanager
    def evaluating(self, *, keeps_outputs: bool) -> Iterator[None]:
        with super().evaluating(keeps_outputs=keeps_outputs), self._parts.used(joins_outputs=keeps_outputs):
            yield


class SequencesWithDDP(SharesSequences, DDPEngine):
    """A whole model in each process."""


class SequencesOfStandIns(SharesSequences, StandInEngine):
    """Whole models without memory, for a plan of it."""


class SequencesWithFSDP(SharesSequences, FSDP2Engine):
    """Sharded models: a copy's parameters are shared out over all its processes, with its batches and sequences."""

    def _shard(self, model: nn.Module) -> nn.Module:
        with self._sharded_over_a_copy():
            return super()._shard(model)

    @contextmanager
    def _sharded_over_a_copy(self) -> Iterator[None]:
        """Tells accelerate, while it lasts, to shard over all processes of a copy, and nothing of shared sequences.

        Accelerate's own context parallelism is torch's, which exchanges the attention of whole programs; and its
        meshes have no place for `sp`.
        """
        from accelerate import ParallelismConfig

        parallel = self._plan.parallel
        assert parallel is not None
        state = self.accelerator.state
        before = state.parallelism_config, state.device_mesh
        sharded = ParallelismConfig(
            dp_replicate_size=parallel.dp_replicate,
            dp_shard_size=parallel.dp_shard * parallel.num_together,
            tp_size=1,
            cp_size=1,
            sp_size=1,
        )
        state.parallelism_config = sharded
        state.device_mesh = sharded.get_device_mesh(self.device.type) if parallel.dp_replicate > 1 else None
        try:
            yield
        finally:
            state.parallelism_config, state.device_mesh = before


class SequencesOfParts(SharesSequences, EngineOfParts):
    """A model that came in parts: its layers shared out, or sharded, or both.

    Processes that share layers have the same tokens, and each of them a group with the holders of the same parts of
    layers and other parts of the sequences. Where the model was sharded as well, that was over the latter too: torch
    averages their gradients as those of replicas.
    """

    def _prepare(self, model: nn.Module) -> None:
        super()._prepare(model)
        reshard(model)  # an optimizer would take the parameters that the trial has left gathered


def make_share(parallel: ParallelPlan) -> Share:
    """Makes the process groups of a plan, in all processes at once, and the share of this one.

    Ranks in a row share layers (`tp`); those of one sequence with the same parts of layers are `tp` apart.
    """
    size = parallel.num_per_sequence
    together = parallel.num_together
    rank = dist.get_rank()
    own = None
    for first in range(0, dist.get_world_size(), together):
        for start in range(first, first + parallel.tp):
            ranks = list(range(start, first + together, parallel.tp))
            group = dist.new_group(ranks)
            own = group if rank in ranks else own
    kind = ContextShare if parallel.cp > 1 else HeadShare
    return kind(own, size=size, place=rank % together // parallel.tp)


# -- before the first step ---------------------------------------------------------------------------------------------


def check_model(model: nn.Module, share: Share, *, tp: int = 1) -> None:
    """Raises ModelError for a model that can be seen to need more than parts of its sequences.

    Args:
        model: whole, or in parts.
        share: of its sequences.
        tp: processes that share its layers, and so the heads of its attention.
    """
    core = model_facts.core_model(model)
    config = getattr(core, "config", None)
    reason = None
    if not callable(getattr(core, "set_attn_implementation", None)):
        reason = "its attention cannot be exchanged: it is not a model of transformers"
    elif getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder, which has two sequences for each sample"
    elif not model_facts.shifts_labels(core) or not model_facts.takes_argument(core.loss_function, "shift_labels"):
        reason = "its loss is not that of the next token with shift_labels, as transformers' causal models have it"
    elif getattr(config, "output_attentions", False):
        reason = "output_attentions=True wants the attention of each token to each token, which no process has"
    if reason is not None:
        raise ModelError(f"{share.setting}={share.size} with {type(core).__name__}: {reason}. {INSTEAD}")
    num_heads = getattr(config, "num_attention_heads", None)
    if isinstance(share, HeadShare) and isinstance(num_heads, int) and num_heads // tp % share.size:
        raise ModelError(uneven_heads(num_heads // tp, share.size))


def take_masks(core: Any, share: Share) -> None:
    """Replaces the attention of a flash-attention package, which takes lengths and no masks, by torch's."""
    chosen = read_attention(core)
    if "flash" not in chosen:
        return
    try:
        core.set_attn_implementation("sdpa")
    except ValueError:  # a model that has none
        core.set_attn_implementation("eager")
    logger.warning(
        "%s=%d: the attention is %r instead of %r, because its kernels take no masks. Torch's has flash kernels too.",
        share.setting,
        share.size,
        read_attention(core),
        chosen,
    )


def try_parts(model: nn.Module, parts: SequenceParts, device: torch.device, *, precision: str) -> None:
    """Runs a model on a few random tokens, whole and in parts; raises ModelError if the results differ.

    The outputs decide, not a list of models: state-space layers, convolutions, positions of their own and
    attention outside of transformers' interface mix tokens that are in different processes.

    Args:
        model: with the hooks of `attach`; all processes have the same weights, or parts of them.
        parts: cuts its batches.
        device: of the batch.
        precision: of the forward pass, which may round: "no", "bf16" or "fp16".
    """
    share = parts.share
    batch = _some_tokens(model, share.multiple * 2 + 1, device)
    core = model_facts.core_model(model)
    with evaluation_mode(model):
        whole = model(**batch)
        try:
            with parts.used(joins_outputs=True):
                joined = model(**batch)
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
            raise ModelError(
                f"{share.setting}={share.size} with {type(core).__name__}: a forward pass on parts of sequences failed "
                f"({type(error).__name__}: {error}). {INSTEAD}"
            ) from error
    shown = batch["attention_mask"].bool()
    logits, others = (output_logits(outputs)[shown].float() for outputs in (whole, joined))
    loss, other = (output_loss(outputs).float() for outputs in (whole, joined))
    share_of_largest = (logits - others).abs().max() / logits.abs().max().clamp(min=1e-12)
    difference = max(float(share_of_largest), float((loss - other).abs() / loss.abs().clamp(min=1e-12)))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    tolerance = max(ROUNDING.get(dtype, 6e-2), 0.0 if precision == "no" else 6e-2)
    if device.type != "cpu":
        tolerance = max(tolerance, ROUNDING_ON_A_GPU)
    if not difference <= tolerance:
        raise ModelError(
            f"{share.setting}={share.size} with {type(core).__name__}: its results for parts of sequences and "
            f"for whole sequences differ by {difference:.1e} of the largest. A layer mixes tokens outside of "
            f"the attention that transformers' interface names, such as a state-space layer or a convolution. {INSTEAD}"
        )


def _some_tokens(model: Any, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns two rows of random tokens with labels, of which the second one has padding on the left."""
    generator = torch.Generator().manual_seed(0)
    size = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(0, size, (2, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    rows = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    return {name: value.to(device) for name, value in rows.items()}
