"""Settings that this version does not carry out yet. They are refused, since nothing is accepted and then ignored."""

from __future__ import annotations

from typing import Any

from trainwright.errors import NotYetError

# Field -> (values that ask for nothing, what to do meanwhile).
NOT_YET: dict[str, tuple[tuple[Any, ...], str]] = {
    "debug": (([], "", None, ["underflow_overflow"]), "Only debug='underflow_overflow' is."),
}


def refuse_what_is_missing(args: Any) -> None:
    """Settings that would be accepted and then ignored are refused instead.

    Raises:
        NotYetError: names every such setting and what to do meanwhile.
    """
    asked = [
        f"{name}={getattr(args, name)!r} is not there yet. {instead}"
        for name, (nothing, instead) in NOT_YET.items()
        if getattr(args, name, nothing[0]) not in nothing
    ]
    if asked:
        raise NotYetError("This version of Trainwright cannot do all that was asked:\n  " + "\n  ".join(asked))
