"""Saving in a real control group that has no room for a copy of the weights."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwright import get_last_checkpoint

from .._support.subprocesses import run_python

SCRIPT = Path(__file__).with_name("in_a_group.py")
MEMORY = Path("/sys/fs/cgroup/memory")  # version 1: what sets a limit there is root, without a service in between


@pytest.fixture
def group() -> Iterator[Path]:
    folder = MEMORY / f"trainwright-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    for _ in range(50):  # the kernel takes a moment after the last process
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)


@pytest.mark.more
@pytest.mark.process
def test_a_save_without_room_for_a_copy_is_written_at_once(group: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:  # on a disk: files in memory count as memory of the group
        done = run_python(str(SCRIPT), str(group), folder)  # what a fork shares would count when it is written to
        assert done.stderr.count("bytes of memory are too much for a copy") == 1  # of two saves: once in a run
        assert get_last_checkpoint(folder) == os.path.join(folder, "checkpoint-4")
