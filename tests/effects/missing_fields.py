"""Checks of the fields whose feature this version does not have: they are refused, not ignored."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig

from trainwright.errors import NotYetError

from .bench import Bench
from .table import shows

ASKED: dict[str, Any] = {
    "parallelism_config": ParallelismConfig(),
}


def a_feature_that_is_not_there_is_refused(bench: Bench, *, name: str) -> None:
    """The message names the field, and says what to do meanwhile."""
    with pytest.raises(NotYetError, match=rf"(?s){name}=.* is not there yet\. [A-Z].+\."):
        bench.trainer(**{name: ASKED[name]})


for _name in ASKED:
    shows(_name)(partial(a_feature_that_is_not_there_is_refused, name=_name))
