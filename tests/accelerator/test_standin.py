"""The stand-in accelerator finds the mistakes that other tests rely on it to find."""

from __future__ import annotations

from typing import Any

import pytest

from .children import on_the_standin

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return on_the_standin("standin_faults.found", folder=tmp_path_factory.mktemp("faults"), devices=2)


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        ("mixed", "on the same device"),
        ("mixed in place", "on the same device"),
        ("two devices", "on the same device"),
        ("memory", "OutOfMemoryError: accel out of memory"),
        ("no wait", "MissingWaitError"),
        ("wait", "nothing"),
    ],
)
def test_a_mistake_is_an_error(mistake: str, error: str, found: Any) -> None:
    assert error in found[mistake]


def test_memory_that_another_stream_reads_is_not_taken_again(found: Any) -> None:
    assert found["freed early"] == [1, 0]


def test_a_copy_to_the_host_arrives_when_it_is_waited_for(found: Any) -> None:
    assert found["read too early"] == [0.0, 1.0]


@pytest.mark.parametrize("wait", ["item", "branch", "to the host", "nonzero", "synchronize"])
def test_a_wait_is_counted(wait: str, found: Any) -> None:
    assert sum(found[wait].values()) == 1


def test_what_does_not_wait_is_not_counted(found: Any) -> None:
    assert found["nothing"] == {}
    assert found["launches"] == {"mul": 1, "add": 1, "sum": 1}


def test_tensors_are_torchs_own(found: Any) -> None:
    assert found["type"] == "Tensor"
    assert found["storages"]


def test_memory_that_nobody_wrote_is_nan(found: Any) -> None:
    assert found["unwritten"]


def test_random_numbers_come_from_the_devices_generator(found: Any) -> None:
    assert found["own generator"]
    assert found["seeded"]


def test_autocast_computes_products_in_half_precision(found: Any) -> None:
    assert found["autocast"] == ["torch.bfloat16", "torch.float32"]
