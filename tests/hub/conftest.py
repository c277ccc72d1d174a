"""A Hub on this machine for each test, in place of the real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .server import Hub, instead_of_the_real_one


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with instead_of_the_real_one(monkeypatch) as one:
        yield one
