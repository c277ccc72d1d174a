"""EvalLoopContainer: collects results as the original does, for code that uses it by name."""

from __future__ import annotations

from trainwright._types import IGNORE_INDEX, Nested
from trainwright.tensor_tree import nested_concat, nested_numpify


class EvalLoopContainer:
    """Collects nested tensors batch by batch.

    Args:
        do_nested_concat: join the batches; False keeps a list of them.
        padding_index: what fills a second dimension that is shorter than another batch's.
    """

    def __init__(self, do_nested_concat: bool = True, padding_index: int = IGNORE_INDEX) -> None:
        self.do_nested_concat = do_nested_concat
        self.padding_index = padding_index
        self.tensors: Nested = None
        self.arrays: Nested = None

    def add(self, tensors: Nested) -> None:
        """Adds a batch: nested tensors with one row for each sample."""
        self.tensors = self._joined(self.tensors, tensors if self.do_nested_concat else [tensors])

    def to_cpu_and_numpy(self) -> None:
        """Moves what was added since the last call off the device."""
        if self.tensors is not None:
            self.arrays = self._joined(self.arrays, nested_numpify(self.tensors))
            self.tensors = None

    def get_arrays(self) -> Nested:
        """Returns all batches as arrays; None if there was none."""
        self.to_cpu_and_numpy()
        return self.arrays

    def _joined(self, before: Nested, more: Nested) -> Nested:
        if before is None:
            return more
        return nested_concat(before, more, self.padding_index) if self.do_nested_concat else before + more
