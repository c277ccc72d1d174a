"""Type checkers see the public names with their types, from the same modules as a running program."""

from __future__ import annotations

from .stub import FIELDS_STUB, STUB, fields_stub, stub


def test_the_stub_has_every_public_name() -> None:
    assert STUB.read_text(encoding="utf-8") == stub(), "write it with `python -m tests.contract.stub`"


def test_the_stub_has_every_argument() -> None:
    assert FIELDS_STUB.read_text(encoding="utf-8") == fields_stub(), "write it with `python -m tests.contract.stub`"
