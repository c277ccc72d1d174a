"""Two nodes: two network namespaces joined by a cable, each with a launcher of its own and an output directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .._support.two_processes import end_group
from .cases import outcome, trainer_of

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]
ADDRESSES = ["10.77.0.1", "10.77.0.2"]

SCRIPT = """
import os
import sys
from pathlib import Path
from tests._support.two_processes import tell
from tests.distributed.cases import outcome, trainer_of

folder = Path(sys.argv[1])
on_each = sys.argv[2] == "each"
trainer = trainer_of("means", folder, 2, save_strategy="epoch", save_on_each_node=on_each, log_on_each_node=on_each,
                     save_total_limit=1, disable_tqdm=False, log_level="info")
told = outcome(trainer)
args = trainer.args
tell(**told, flags=[args.process_index, args.local_process_index, args.should_save, args.should_log,
                    trainer.is_local_process_zero(), trainer.is_world_process_zero()],
     saved=sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.exists() else [])
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    names = [f"tw{os.getpid()}{end}" for end in "ab"]
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "tw0", "netns", names[0], "type", "veth", "peer", "name", "tw0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "tw0")
            ip("-n", name, "link", "set", "tw0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError, OSError):
                ip("netns", "del", name)


@pytest.mark.parametrize("where", ["each", "first"])
def test_two_nodes_are_one_run(where: str, nodes: list[str], tmp_path: Path) -> None:
    """The same numbers as one process; the first process of each node logs and saves, or that of the first one only."""
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "TOLD_FOLDER": str(tmp_path),
        "GLOO_SOCKET_IFNAME": "tw0",
    }
    launches = []
    for rank, name in enumerate(nodes):
        command = [
            *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"),
            *("--master-addr", ADDRESSES[0], "--master-port", "29577"),
            *(str(tmp_path / "script.py"), str(tmp_path / f"node{rank}"), where),
        ]
        launches.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                cwd=tmp_path,
                start_new_session=True,
            )
        )
    try:
        outs = [launched.communicate(timeout=200)[0] for launched in launches]
    finally:
        for launched in launches:
            end_group(launched)
    assert [launched.returncode for launched in launches] == [0, 0], "\n".join(outs)[-5000:]
    told = [json.loads((tmp_path / f"TOLD_{rank}.json").read_text()) for rank in range(2)]
    on_each = where == "each"
    assert told[0]["flags"] == [0, 0, True, True, True, True]
    assert told[1]["flags"] == [1, 0, on_each, on_each, True, False]
    assert [one["saved"] for one in told] == [["checkpoint-6"], ["checkpoint-6"] if on_each else []]
    plans = [sum(line.startswith("batch ") for line in out.splitlines()) for out in outs]  # said before step 1
    assert plans == [1, 1 if on_each else 0], "\n".join(outs)
    alone = outcome(trainer_of("means", tmp_path / "alone", 1))
    for one in told:
        for name, values in alone["weights"].items():
            assert one["weights"][name] == pytest.approx(values, rel=1e-5, abs=2e-7)
