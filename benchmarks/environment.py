"""The environment in which Trainwright and its peers are measured: what they require themselves, and nothing else.

    python benchmarks/environment.py              makes it in build/benchmarks/environment, prints its interpreter
    python benchmarks/environment.py FOLDER       makes it there

Packages of a development environment change what a peer does: where `lomo-optim` is installed, each
`optimizer.step()` of accelerate reads that package's metadata twice. The versions are those of constraints.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "benchmarks" / "environment"
CONSTRAINTS = ROOT / "constraints.txt"
MORE = ("datasets",)  # the rows with Arrow columns
# Scripts that need other packages as well: a server of object storage, the data of examples, adapters.
NEEDS_MORE = ("gpu", "remote", "upload_stalls", "export_rounding", "real_work")


def list_requirements() -> list[str]:
    """Returns Trainwright's own requirements, which have those of the peers among them; torch in its exact version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    others = [one for one in project["dependencies"] if not one.startswith("torch>")]
    return [torch, *others, *MORE]


def make_environment(folder: Path = FOLDER) -> Path:
    """Returns the interpreter of the environment, which is made unless it has these requirements already."""
    requirements = list_requirements()
    wanted = hashlib.sha256("\n".join([*requirements, CONSTRAINTS.read_text()]).encode()).hexdigest()
    stamp = folder / "requirements.sha256"
    python = folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-c", str(CONSTRAINTS)]
    subprocess.run([*install, *requirements], check=True)
    stamp.write_text(wanted)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="default: build/benchmarks/environment")
    print(make_environment(parser.parse_args().folder.resolve()))


if __name__ == "__main__":
    main()
