"""The outbox, where the loop and the thread that sends meet."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainwright.hub.outbox import Outbox, Ticket


def test_putting_in_while_another_thread_empties_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outbox = Outbox(tmp_path / "run")
    source = tmp_path / "model.safetensors"
    source.write_bytes(b"weights")
    rounds = 400
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as lane:
            sent = []
            for step in range(rounds):
                upload = outbox.put(Ticket(repo="me/model", step=step), linked={source.name: source})
                sent.append(lane.submit(outbox.remove, [upload]))
                outbox.waiting()
                outbox.size()
            for one in sent:
                one.result()
    finally:
        sys.setswitchinterval(interval)
    assert not caplog.records, caplog.text
    assert not outbox.folder.exists()
