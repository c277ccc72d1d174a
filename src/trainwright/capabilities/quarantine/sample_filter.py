"""QuarantinedSamples: the samples in quarantine, as the data asks which to leave out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import chain

from trainwright._types import Item
from trainwright.capabilities.quarantine.file import QUARANTINE_NAME
from trainwright.data.sample_filter import Sample, SampleFilter
from trainwright.errors import DataError


class QuarantinedSamples(SampleFilter):
    """Leaves out the samples in quarantine."""

    file_name = QUARANTINE_NAME
    example_by_column = "trainer.quarantine(['doc-3'], column='id')"

    def __init__(self, samples: frozenset[Sample]) -> None:
        self.samples = samples

    def excludes(self, item: Item, number: int) -> bool:
        if number in self.samples:
            return True
        columns = {one[0] for one in self.samples if isinstance(one, tuple)}
        try:
            values = [(column, item[column]) for column in columns]
            return any((name, one.item() if hasattr(one, "item") else one) in self.samples for name, one in values)
        except (KeyError, TypeError, IndexError):
            raise DataError(
                f"{QUARANTINE_NAME} names samples by {' and '.join(sorted(columns))}, but rows of the stream do "
                "not have this column (remove_unused_columns=True removes columns that the model does not take)."
            ) from None

    def find_substitutes(self, num_samples: int, starts: Sequence[int]) -> dict[int, int]:
        return find_substitutes([one for one in self.samples if isinstance(one, int)], num_samples, starts)


def find_substitutes(excluded: Collection[int], num_samples: int, starts: Sequence[int] = (0,)) -> dict[int, int]:
    """Returns the replacement for each excluded sample; DataError if no sample would remain.

    It is the next sample of the same source, continuing at the first after the last; of another source only if nothing
    remains of that one. `starts` are the first samples of the sources. Indices beyond the end of the dataset have no
    effect.
    """
    excluded = {sample for sample in excluded if sample < num_samples}
    if excluded and len(excluded) >= num_samples:
        raise DataError(f"All {num_samples} samples are in quarantine. Delete {QUARANTINE_NAME}, or some of its lines.")
    found: dict[int, int] = {}
    for sample in excluded:
        source = bisect_right(starts, sample)
        first = starts[source - 1]
        stop = starts[source] if source < len(starts) else num_samples
        others = chain(range(sample + 1, stop), range(first, sample), range(stop, num_samples), range(first))
        found[sample] = next(other for other in others if other not in excluded)
    return found
