"""From arguments and a dataset to an order, a collator and a loader."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import IterableDataset, SequentialSampler

from trainwright import model_facts
from trainwright._types import has_length
from trainwright.checkpoint import rng
from trainwright.config import resolve
from trainwright.config.owned import owned
from trainwright.config.rules_idle import saving_on_exception
from trainwright.data import sampler_factory
from trainwright.data.batch_sampler import batch_order_of
from trainwright.data.device_prefetch import make_prefetcher
from trainwright.data.loader import Loader
from trainwright.data.packing.collator import PackedCollator
from trainwright.data.packing.isolation_check import find_layout
from trainwright.data.packing.sampler import PackedOrder
from trainwright.data.streaming.lookahead_buffer import Former


def random_states(args: Any) -> Any:
    """What a run that an error ends needs to save its last step; None where it does not.

    Not among several processes: those that have no error wait in the next step for the one that has. Nor where the
    weights change during the backward pass: they are between two steps then.
    """
    asked = resolve.checkpoint(args).saves_on_exception
    return rng if asked and saving_on_exception(args) is None else None


def train_sampler(args: Any, dataset: Any, model_input_name: str | None, *, batch_size: int, num_processes: int) -> Any:
    """The order that the arguments ask for; None for a stream, which has its own."""
    seed = args.data_seed if args.data_seed is not None else torch.initial_seed()
    plan = resolve.sampling(
        args, batch_size=batch_size, seed=seed, num_processes=num_processes, length_of=model_input_name
    )
    return sampler_factory.training_order(dataset, plan)


def eval_sampler(args: Any, dataset: Any, model_input_name: str | None) -> Any:
    if dataset is None or not has_length(dataset) or isinstance(dataset, IterableDataset):
        return None
    return SequentialSampler(dataset)


def stream_former(args: Any, dataset: Any, model_input_name: str | None, *, batch_size: int) -> Former | None:
    """What forms batches of a stream by length; None where nobody asked."""
    plan = resolve.sampling(args, batch_size=batch_size, seed=0, num_processes=1, length_of=model_input_name)
    return sampler_factory.stream_former(dataset, plan)


def packed_input(sampler: Any) -> str | None:
    """The entry whose tokens an order packs into rows; None where it packs nothing."""
    if isinstance(sampler, Former):
        return sampler.packed_input
    return sampler.length_of if isinstance(sampler, PackedOrder) else None


def row_collator(args: Any, length_of: str, collate: Callable[..., Any], model: Any, processing_class: Any) -> Any:
    """The collator that makes packed rows of what `collate` makes of samples.

    Raises:
        ModelError: samples of a row would see each other in this model.
    """
    takes_positions = "position_ids" in model_facts.forward_parameters(model)
    with untouched_randomness():
        layout = find_layout(
            model,
            row_length=args.packing_length,
            num_rows=args.train_batch_size,
            takes_positions=takes_positions,
            length_of=length_of,
        )
    return PackedCollator(
        collate,
        layout,
        length_of=length_of,
        pad_token_id=getattr(processing_class, "pad_token_id", None) or 0,
        masks_first=model_facts.shifts_labels(model) or model_facts.is_causal_lm(model),
        multiple_of=owned(args, "pad_to_multiple_of"),
    )


def samples_per_step(dataloader: Any, args: Any) -> int | None:
    """Samples of a step over all processes, on average, where batches differ in size; None where they do not."""
    order = batch_order_of(dataloader)
    if order is None:
        return None
    share = order.num_samples / max(len(order), 1)  # of a batch
    num_batches = resolve.micro_batches(args) * dataloader.batch_sampler.share.num_processes
    return int(max(round(share * num_batches), 1))


def make_loader(dataloader: Any, device: torch.device) -> Loader:
    copies = make_prefetcher(dataloader, device)
    return Loader(dataloader, random_state=rng.capture, set_random_state=rng.restore, copies=copies)


@contextmanager
def untouched_randomness() -> Any:
    """Whatever happens inside leaves the random states as they were, so evaluating never changes training."""
    states = rng.capture()
    try:
        yield
    finally:
        rng.restore(states)
