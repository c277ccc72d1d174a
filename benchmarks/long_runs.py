"""What the logs of a long run cost its checkpoints: bytes and CPU time of `trainer_state.json` over all saves.

    python benchmarks/long_runs.py            100,000 logs, 2,000 saves
    python benchmarks/long_runs.py --quick    a tenth of both

Nothing is trained: a record gets the logs of a run, and is written at each of its saves. `limited` is the record with
`log_history_limit=1000`. The original writes the same bytes as `all`; it serializes every log at every save, so it is
measured at ten saves of equal distances, and the sum over all of them is computed.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import print_json, print_table, versions

from trainwright import TrainerState

LIMIT = 1000
SAMPLES = 10


def run_saves(make: Callable[[], Any], *, logs: int, saves: int, limit: int | None, samples: int) -> dict[str, float]:
    """Writes `samples` of the saves; returns the figures of the last, and the sums over all saves."""
    state = make()
    sizes: list[int] = []
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trainer_state.json")
        for save in range(1, samples + 1):
            for step in range(logs * (save - 1) // samples + 1, logs * save // samples + 1):
                state.log_history.append(
                    {"loss": 1 / step, "grad_norm": 1.5 + 1 / step, "learning_rate": 1e-3, "epoch": 0.01, "step": step}
                )
                if limit is not None:
                    del state.log_history[:-limit]
            state.global_step = logs * save // samples
            start = time.process_time()
            state.save_to_json(str(path))
            seconds.append(time.process_time() - start)
            sizes.append(path.stat().st_size)
    scale = saves / samples
    return {
        "last_mb": round(sizes[-1] / 1e6, 3),
        "all_gb": round(sum(sizes) * scale / 1e9, 3),
        "last_cpu_ms": round(seconds[-1] * 1e3, 1),
        "all_cpu_s": round(sum(seconds) * scale, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the logs and saves")
    is_quick = parser.parse_args().quick
    import transformers

    logs = 10_000 if is_quick else 100_000
    saves = 200 if is_quick else 2_000
    run = functools.partial(run_saves, logs=logs, saves=saves)
    found = {
        "transformers": run(transformers.TrainerState, limit=None, samples=SAMPLES),
        "trainwright, all": run(TrainerState, limit=None, samples=saves),
        "trainwright, limited": run(TrainerState, limit=LIMIT, samples=saves),
    }
    print_json({"benchmark": "long_runs", "logs": logs, "saves": saves, "found": found, **versions("transformers")})
    rows = [["record", "last file, MB", "all saves, GB", "last save, CPU ms", "all saves, CPU s"]]
    rows += [[name, *(str(value) for value in figures.values())] for name, figures in found.items()]
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
