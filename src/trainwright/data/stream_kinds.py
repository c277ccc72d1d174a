"""What kind of stream a dataset is, as far as the ways to share and resume it differ."""

from __future__ import annotations

import copy
from typing import Any

from trainwright.errors import DataError
from trainwright.types import is_instance_of


def is_hf_stream(dataset: Any) -> bool:
    return is_instance_of(dataset, "datasets", "IterableDataset")


def check_is_whole(dataset: Any, num_processes: int) -> None:
    """Every process reads the same items and takes its part of them; of a part each would take a part again.

    Raises:
        DataError: the stream was split between the processes before.
    """
    if num_processes > 1 and is_hf_stream(dataset) and getattr(dataset, "_distributed", None) is not None:
        raise DataError(
            f"The stream was split with split_dataset_by_node, and the trainer shares data between its {num_processes} "
            "processes itself: each would train on a part of its part. Pass the whole stream. "
            "accelerator_config={'dispatch_batches': True} has it read by one process only."
        )


def keeps_state(dataset: Any) -> bool:
    """Whether a dataset can tell where it stands and go on from there, with nothing lost.

    A `datasets` stream with a shuffle buffer loses what is in the buffer, so it is read again.
    """
    if not (callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))):
        return False
    return not (is_hf_stream(dataset) and _has_buffer(getattr(dataset, "_ex_iterable", None)))


def own_state(dataset: Any) -> Any:
    """Where a dataset that keeps state stands, as a value that does not move on with it."""
    return copy.deepcopy(dataset.state_dict())


def _has_buffer(source: Any) -> bool:
    if source is None:
        return False
    inner = [getattr(source, "ex_iterable", None), *(getattr(source, "ex_iterables", None) or ())]
    return hasattr(source, "buffer_size") or any(map(_has_buffer, inner))
