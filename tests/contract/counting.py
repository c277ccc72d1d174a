"""A trainer whose every published hook writes down that it was called, and then does what it does."""

from collections.abc import Callable
from typing import Any

import trainwright

from .surface import EVENTS, PUBLIC_METHODS, UNDERSCORE_METHODS

# Static in the original too: not called on the instance, so an override is counted by a static method.
STATIC = ("get_optimizer_cls_and_kwargs", "metrics_format", "num_tokens")


class Record(list[str]):
    """Names of hooks and events in the order of their calls."""

    def count_of(self, name: str) -> int:
        return self.count(name)

    def first_step(self) -> list[str]:
        """From the fetching of the first window to the end of its log-save-evaluate."""
        start = self.index("get_batch_samples")
        return self[start : self.index("on_step_begin", self.index("on_step_end", start))]


def counting_trainer(record: Record) -> type[Any]:
    def count(name: str) -> Callable[..., Any]:
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            record.append(name)
            return getattr(super(Counting, self), name)(*args, **kwargs)

        return counted

    def count_static(name: str) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            record.append(name)
            return getattr(trainwright.Trainer, name)(*args, **kwargs)

        return staticmethod(counted)

    names = [*PUBLIC_METHODS, *UNDERSCORE_METHODS]
    overrides = {name: count_static(name) if name in STATIC else count(name) for name in names}
    Counting = type("Counting", (trainwright.Trainer,), overrides)
    return Counting


def counting_callback(record: Record) -> Any:
    def count(event: str) -> Callable[..., None]:
        def counted(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record.append(event)

        return counted

    return type("CountingCallback", (trainwright.TrainerCallback,), {event: count(event) for event in EVENTS})()
