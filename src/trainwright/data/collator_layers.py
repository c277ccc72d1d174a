"""Our collators around the user's: what a dataloader calls has such layers, and what it hands out has none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

# Any: collators are the user's own types, and a layer may be given rows of any kind.
LayerT = TypeVar("LayerT", bound="CollatorLayer")


class CollatorLayer:
    """A collator of this package that calls another one, its `data_collator`."""

    data_collator: Callable[[Any], Any]

    def around(self: LayerT, collator: Callable[[Any], Any]) -> LayerT:
        """Returns a copy of this layer, and of the layers inside it, around another collator."""
        inner = self.data_collator
        layer = copy.copy(self)
        layer.data_collator = inner.around(collator) if isinstance(inner, CollatorLayer) else collator
        return layer


def innermost(collator: Any) -> Any:
    """Returns the collator inside all layers: the user's own."""
    while isinstance(collator, CollatorLayer):
        collator = collator.data_collator
    return collator
