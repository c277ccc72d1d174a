"""Arguments that ask for models in parts: only where a launcher started the process and DeepSpeed is there."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright import TrainingArguments
from trainwright.config import zero3_init

from .._support.subprocesses import run_python

STAGE_3 = {"zero_optimization": {"stage": 3}}
SCRIPT = """
import sys
from trainwright import TrainingArguments
TrainingArguments("out", **{settings})
print(sorted({{"torch", "transformers", "deepspeed", "accelerate"}} & sys.modules.keys()))
"""


@pytest.mark.process
@pytest.mark.parametrize("settings", [{}, {"deepspeed": {"zero_optimization": {"stage": 2}}}, {"deepspeed": STAGE_3}])
def test_nothing_is_marked_or_loaded_in_a_process_of_its_own(settings: dict[str, Any]) -> None:
    assert TrainingArguments("out", **settings).hf_deepspeed_config is None
    assert run_python("-c", SCRIPT.format(settings=settings)).stdout.strip() == "[]"


def test_models_made_for_the_time_of_a_block_are_whole() -> None:
    """The mark comes back as it was, and nothing is done where there is none."""
    from transformers.integrations import deepspeed as marks

    class Record:
        def is_zero3(self) -> bool:
            return True

    record = Record()
    try:
        with zero3_init.whole_models():
            assert not marks.is_deepspeed_zero3_enabled()
        marks.set_hf_deepspeed_config(record)
        with zero3_init.whole_models():
            assert not marks.is_deepspeed_zero3_enabled()
        assert marks.is_deepspeed_zero3_enabled()
        with zero3_init.keeping_the_mark():
            marks.unset_hf_deepspeed_config()
        assert marks.is_deepspeed_zero3_enabled()
        del record
        assert not marks.is_deepspeed_zero3_enabled()
    finally:
        marks.unset_hf_deepspeed_config()
