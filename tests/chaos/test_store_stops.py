"""A real S3 server that stops answering before the last step: the run ends, says so once, and its process is gone."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from .._support import forked, stores

SCRIPT = """
import os, signal, sys, time
import fsspec
from trainwright import TrainerCallback
from tests.contract import doubles

class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 15:
            os.kill(int(sys.argv[2]), signal.SIGSTOP)
            self.begun = time.monotonic()

fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
stops = Stops()
settings = {"max_steps": 16, "save_strategy": "steps", "save_steps": 3, "checkpoint_mirror": "s3://bucket/run"}
doubles.trainer(sys.argv[1], settings=settings, callbacks=[stops]).train()
print("ended after", time.monotonic() - stops.begun)
"""
MOST_S = 150  # the promise is a minute, for a machine with nothing else to do


@pytest.mark.slow  # a minute of waiting
@pytest.mark.process
@pytest.mark.timeout(500)
@pytest.mark.skipif(bool(stores.missing_packages("s3")), reason="needs s3fs and moto")
def test_a_store_that_stops_holds_up_neither_the_end_nor_the_process(tmp_path: Path) -> None:
    port = stores.free_port()
    with stores.server(sys.executable, str(stores.HERE / "s3_emulator.py"), str(port), port=port) as server:
        env = {**os.environ, **stores.S3_VARIABLES, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        try:
            done = forked.run(["-c", SCRIPT, str(tmp_path / "run"), str(server.pid)], env=env, timeout=400)
        finally:
            server.send_signal(signal.SIGCONT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert float(done.stdout.rpartition("ended after")[2].split()[0]) < MOST_S
    assert done.stderr.count("checkpoint-16") <= 2, done.stderr
    assert (tmp_path / "run" / "checkpoint-16").is_dir()
