"""Frameworks that only the slow tests install."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(framework: str) -> pytest.MarkDecorator:
    """Returns a mark that skips where a package is missing; it is not imported, which takes seconds in each worker."""
    return pytest.mark.skipif(
        find_spec(framework) is None, reason=f"{framework}: requirements-engines.txt, `make slow`"
    )
