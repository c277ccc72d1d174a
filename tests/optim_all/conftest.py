"""What packages of optimizers warn about is theirs to mend; what Trainwright warns about still fails a test."""

from __future__ import annotations

from typing import Any

import pytest
import torch

THEIRS = (
    r"ignore:This implementation of AdamW is deprecated:FutureWarning",  # GaLore
    r"ignore:.*torch.cuda.amp.autocast.*:FutureWarning",  # GrokAdamW
    r"ignore:Paged optimizers are not supported on CPU:UserWarning",  # bitsandbytes
    r"ignore:.*CUDA is not available.*:UserWarning",  # GrokAdamW
    r"ignore:.*[Dd]etected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`:UserWarning",
    r"ignore::DeprecationWarning:torchao.*",
    r"ignore::DeprecationWarning:torch.*",
    r"ignore::DeprecationWarning:bitsandbytes.*",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "optim_all" in item.path.parts:
            for text in THEIRS:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(autouse=True)
def _without_compilation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the kernels of torchao's low-bit optimizers as they are written; compiling them takes most of a minute."""
    if "low_bit_compiled" not in request.node.name:
        monkeypatch.setattr(torch, "compile", _as_it_is)


def _as_it_is(function: Any = None, **options: Any) -> Any:
    return function
