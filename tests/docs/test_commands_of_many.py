"""The commands for several processes that the pages about engines show run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .._support.two_processes import end_group, free_port

ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("fsdp.md", "parallelism.md")]
COMMANDS = {
    found[1]: block
    for page in PAGES
    for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    if (found := re.match(r"cat > (\w+)\.py <<'EOF'\n", block))
}


def test_the_pages_have_them() -> None:
    assert set(COMMANDS) == {"experts", "long", "adapter", "muon"}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs(name: str, tmp_path: Path) -> None:
    command = COMMANDS[name].replace("torchrun ", f"torchrun --master-port {free_port()} ")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["bash", "-e", "-c", command],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out = process.communicate(timeout=250)[0]
    finally:
        end_group(process)
    assert process.returncode == 0, out[-4000:]
    assert "loss=" in out
    if name == "experts":
        assert "experts/max_load" in out
    if name == "muon":
        assert "adamw     model.embed_tokens.weight" in out
