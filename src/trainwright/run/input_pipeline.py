"""From arguments and a dataset to an order, a collator, a dataloader and the loader for the training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils.data import IterableDataset

from trainwright._types import DataLoaderLike, DatasetLike, Model, has_length
from trainwright.checkpoint import rng
from trainwright.checkpoint.rng import unchanged_random_states
from trainwright.config import resolve
from trainwright.config.behaviour import get_behaviour
from trainwright.config.fields import get_value
from trainwright.config.rules.advice import saving_on_exception
from trainwright.data import sampler_factory
from trainwright.data.batcher import Batcher
from trainwright.data.dataloader import build_dataloader, build_whole
from trainwright.data.length_sampler import find_batch_order
from trainwright.data.sources import plan_order
from trainwright.engine.base import Engine
from trainwright.errors import DataError
from trainwright.support import model_facts


def length_input(processing_class: Any) -> str | None:
    """Returns the entry of a sample that determines its length; None if the processing class names none."""
    names = getattr(processing_class, "model_input_names", None)
    return names[0] if names else None


def train_sampler(
    args: Any, dataset: DatasetLike, length_of: str | None, *, batch_size: int, num_processes: int
) -> Any:
    """Returns the order that the arguments ask for; None for a stream, which has its own."""
    plan = resolve.sampling(
        args, batch_size=batch_size, seed=_data_seed(args), num_processes=num_processes, length_of=length_of
    )
    return sampler_factory.training_order(dataset, plan_order(args, plan))


def evaluation_by_length(args: Any, dataset: DatasetLike, length_of: str | None, *, has_own_loop: bool) -> Any:
    """Returns the order by length of an evaluation; None if it is in the order of the data.

    With `eval_sampling_strategy="by_length"`, the longest samples come first, and the evaluation restores the order of
    the data in its results, which a user's own loop would not do. In the original, with `group_by_length`, the order is
    drawn.
    """
    plan = resolve.sampling(args, batch_size=args.eval_batch_size, seed=0, num_processes=1, length_of=length_of)
    is_sorted = get_value(args, "eval_sampling_strategy") == "by_length" and not has_own_loop
    if is_sorted and resolve.evaluation(args).joins_results:
        return sampler_factory.sorted_evaluation(dataset, plan)
    if args.train_sampling_strategy != "group_by_length" or get_behaviour(args).evaluates_in_dataset_order:
        return None
    seed = args.seed if args.data_seed is None else args.data_seed
    return sampler_factory.evaluation_by_length(dataset, plan, torch.Generator().manual_seed(seed))


def choose_sampler(
    dataset: DatasetLike,
    sampler_fn: Callable[[Any], Any] | None,
    args: Any,
    *,
    length_of: str | None,
    batch_size: int,
    is_training: bool,
) -> Any:
    """Returns the order of a dataset, or the batch former of a stream; None if neither is requested."""
    if not isinstance(dataset, IterableDataset):
        return sampler_fn and sampler_fn(dataset)
    if not is_training:
        return None
    plan = resolve.sampling(
        args, batch_size=batch_size, seed=_data_seed(args), num_processes=args.world_size, length_of=length_of
    )
    return sampler_factory.stream_former(dataset, plan_order(args, plan))


def sample_collator(sampler: Any, collator: Any, *, default: Any) -> Any:
    """Returns the collator for single samples: the user's, the default, or the one that the batches need."""
    batcher = _find_batcher(sampler)
    return collator if batcher is None else batcher.choose_sample_collator(collator, default=default)


def row_collator(args: Any, sampler: Any, collate: Callable[..., Any], model: Model, processing_class: Any) -> Any:
    """Returns the collator of whole batches; ModelError if the model cannot take them."""
    batcher = _find_batcher(sampler)
    if batcher is None:
        return collate
    with unchanged_random_states():
        return batcher.make_row_collator(args, collate, model, processing_class)


def _find_batcher(sampler: Any) -> Batcher | None:
    """Returns what forms the batches of an order of ours, or of a stream; a user's sampler has none."""
    batcher = getattr(sampler, "batcher", None)
    return batcher if isinstance(batcher, Batcher) else None


def keeps_all_columns(args: Any, model: Model, named: Sequence[str]) -> bool:
    """Returns whether every entry of a sample goes to the model; `named` are the columns named by the trainer."""
    return not args.remove_unused_columns or (not named and model_facts.takes_any_input(model))


def make_dataloader(
    dataset: DatasetLike, args: Any, engine: Engine, *, sampler: Any, collate: Any, batch_size: int, is_training: bool
) -> Any:
    """Makes the dataloader of this process; with `dispatch_batches`, the main process reads for all."""
    plan = resolve.loader(
        args,
        batch_size=batch_size,
        seed=_data_seed(args),
        is_training=is_training,
        rank=engine.replica,
        num_processes=engine.num_replicas,
    )
    if is_training and engine.dispatches:
        whole = build_whole(dataset, plan, sampler=sampler, collate=collate)
        dispatched = engine.dispatch(whole.inside())
        # accelerate's wrapper reads `base_dataloader`, and these attributes are only shown
        vars(dispatched).update(dataset=whole.dataset, collate_fn=whole.collate_fn)
        return dispatched
    dataloader = build_dataloader(dataset, plan, sampler=sampler, collate=collate, exchange=engine)
    dataloader.device = engine.device
    dataloader.non_blocking = engine.non_blocking
    dataloader.fetches_ahead = is_training
    dataloader.gradient_state = engine.accelerator.gradient_state
    return dataloader


def samples_per_step(dataloader: DataLoaderLike, args: Any) -> int | None:
    """Returns the mean number of samples per step over all processes, if batch sizes vary; otherwise None."""
    order = find_batch_order(dataloader)
    if order is None:
        return None
    share = order.num_samples / max(len(order), 1)  # samples per batch
    num_batches = resolve.micro_batches(args) * dataloader.batch_sampler.share.num_processes
    return int(max(round(share * num_batches), 1))


def random_states(args: Any) -> Any:
    """Returns the states that a run stopped by an error needs to save its last step; None if it does not save.

    Not with several processes: the processes without the error wait in the next step for the failed one. Nor if weights
    change during the backward pass: they would be between two steps.
    """
    return rng if resolve.checkpoint(args).saves_on_exception and saving_on_exception(args) is None else None


def check_unnamed_batch(batch: Any, model: Model, *, is_read_by_name: bool) -> None:
    """Raises DataError for a batch that is not a mapping, if its entries are read by name or it has none.

    `is_read_by_name`: no subclass computes the loss itself.
    """
    if is_read_by_name and not hasattr(batch, "keys"):
        raise DataError(
            f"A batch is a {type(batch).__name__}; {type(model).__name__}.forward gets its inputs by name, from a "
            "dict. Let the data_collator return a dict, or override compute_loss (and prediction_step, which "
            "evaluations call) to read batches of this type."
        )
    if has_length(batch) and len(batch) == 0:
        raise DataError(f"A batch is an empty {type(batch).__name__}; check the return value of the data_collator.")


def raise_empty_batch(model: Model, kept: list[str] | None) -> NoReturn:
    """Raises DataError for a batch without entries, which cannot be a model's input."""
    raise DataError(
        f"A batch is empty: no entry of the samples is an input of {type(model).__name__}.forward "
        f"({', '.join(name for name in kept or () if name != 'kwargs')}). Rename the columns, tokenize the text first, "
        "or set remove_unused_columns=False."
    )


def _data_seed(args: Any) -> int:
    return args.data_seed if args.data_seed is not None else torch.initial_seed()
