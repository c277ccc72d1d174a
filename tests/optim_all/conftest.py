"""What packages of optimizers warn about is theirs to mend; what Trainwright warns about still fails a test."""

from __future__ import annotations

import pytest

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
