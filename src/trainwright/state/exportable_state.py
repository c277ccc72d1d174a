"""ExportableState: the contract of an object whose state travels in a checkpoint as plain JSON."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self


class ExportableState:
    """Something with state that a checkpoint keeps.

    `state()` returns `{"args": {...}, "attributes": {...}}` of JSON values: `args` is what the constructor takes,
    `attributes` is set afterwards. `from_state` makes an equal object.
    """

    def state(self) -> dict[str, Any]:
        raise NotImplementedError(
            f"{type(self).__name__} is an ExportableState and must define state() -> "
            "{'args': {...}, 'attributes': {...}} with JSON values."
        )

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


def collect_states(objects: list[Any]) -> dict[str, Any]:
    """Class name -> state, or a list of states where several objects share a class; the others are left out."""
    states: dict[str, Any] = {}
    for thing in objects:
        if not callable(getattr(thing, "state", None)):
            continue
        name = type(thing).__name__
        if name not in states:
            states[name] = thing.state()
        elif isinstance(states[name], list):
            states[name].append(thing.state())
        else:
            states[name] = [states[name], thing.state()]
    return states
