"""ExportableState: base of objects whose state checkpoints store as plain JSON."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self


class ExportableState:
    """Object with state that a checkpoint stores.

    `state()` returns `{"args": {...}, "attributes": {...}}` of JSON values: `args` is what the constructor takes,
    `attributes` is set afterwards. `from_state` makes an equal object.
    """

    def state(self) -> dict[str, Any]:
        """Returns the state.

        Returns:
            `{"args": {...}, "attributes": {...}}` with JSON values.
        """
        raise NotImplementedError(
            f"{type(self).__name__} is an ExportableState and must define state() -> "
            "{'args': {...}, 'attributes': {...}} with JSON values."
        )

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Makes an object with a state.

        Args:
            state: what `state()` returned.
        """
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


def collect_states(objects: list[Any]) -> dict[str, Any]:
    """Collects the states of objects.

    Args:
        objects: any; those without a method `state` are left out.

    Returns:
        State by class name; a list of states where several objects share a class.
    """
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
