"""The first steps of a trainer with other versions of packages than the installed ones: `Trainer.check(against=...)`.

Both sides run in processes of their own, which differ in the packages alone: the other side finds the packages that
would change in a folder at the front of its path. Nothing is installed into the environment of the caller.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from packaging.requirements import InvalidRequirement, Requirement

from trainwright._types import JSONObject
from trainwright.capabilities.recorded_values.value_comparison import ValuesReport, compare_values, read_values
from trainwright.errors import ArgumentError, ProcessFailedError
from trainwright.preflight.trainer_copy import AnyTrainer
from trainwright.run.frozen import write_frozen
from trainwright.run.internals import Internals
from trainwright.run.pickling import make_state
from trainwright.support.deadline import end_group, run_command
from trainwright.support.door import parse_json

NUM_STEPS = 20
LIMIT_S = 3600.0
SIDES = ("installed", "other")
TRAINER_FILE = "trainer.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainstReport:
    """The same steps with two sets of packages.

    Attributes:
        packages: name -> the installed version (None: it is not installed) and the other one.
        values: where the values of both sides part; None if a side failed.
        failure: last line of the error with the other packages; empty if they trained.
    """

    packages: dict[str, tuple[str | None, str]]
    values: ValuesReport | None
    failure: str = ""

    @property
    def is_same(self) -> bool:
        """Returns True if both sides trained, and no value differs."""
        return self.values is not None and self.values.is_same

    def lines(self) -> Iterator[str]:
        """Yields the lines of the report for the console."""
        for name, (one, other) in self.packages.items():
            yield f"{'against':<10}{name} {one or '(not installed)'} | {other}"
        if self.values is None:
            yield f"{'fails':<10}with the other packages: {self.failure}"
        else:
            yield from self.values.lines()

    def to_dict(self) -> JSONObject:
        """Returns plain values, for JSON."""
        return {"is_same": self.is_same, **asdict(self)}

    def __str__(self) -> str:
        return "\n".join(self.lines())


def check_against(
    trainer: AnyTrainer, packages: str | Sequence[str], *, num_steps: int = NUM_STEPS, limit_s: float = LIMIT_S
) -> AgainstReport:
    """Trains the first steps with the installed packages and with others, and finds the first value that differs.

    Args:
        trainer: it is not changed.
        packages: requirements such as "transformers==5.24.0", in a list or separated by blanks.
        num_steps: optimizer steps to compare, followed by predictions for the first evaluation samples.
        limit_s: seconds for each side.

    Raises:
        ArgumentError: a requirement cannot be read, found or installed, or nothing would change; or a part of the
            trainer cannot be handed to another process.
        ProcessFailedError: the steps fail with the installed packages too.
    """
    wanted = packages.split() if isinstance(packages, str) else packages
    if not isinstance(wanted, (list, tuple)) or not wanted or not all(isinstance(one, str) for one in wanted):
        raise ArgumentError(f"against={packages!r} names no package. Write it as 'transformers==5.24.0'.")
    with tempfile.TemporaryDirectory(prefix="trainwright-against-") as name:
        folder = Path(name)
        changes = changed_packages(wanted)
        overlay = folder / "packages"
        install(changes, overlay)
        _freeze(trainer, folder / TRAINER_FILE)
        _train(folder, SIDES[0], [], num_steps=num_steps, limit_s=limit_s)
        versions = {one: (installed_version(one), version) for one, version in changes.items()}
        try:
            _train(folder, SIDES[1], [str(overlay)], num_steps=num_steps, limit_s=limit_s)
        except ProcessFailedError as error:
            return AgainstReport(packages=versions, values=None, failure=str(error))
        values = compare_values(*(read_values(folder / side) for side in SIDES))
        return AgainstReport(packages=versions, values=values)


# -- the packages ------------------------------------------------------------------------------------------------------


def changed_packages(wanted: Sequence[str]) -> dict[str, str]:
    """Returns the packages, with their versions, that an installation would add or replace here."""
    for one in wanted:
        try:
            Requirement(one)
        except InvalidRequirement as error:
            raise ArgumentError(
                f"against={one!r} cannot be read as a requirement: {error}. Write it as 'transformers==5.24.0'."
            ) from None
    found = _planned_by_uv(wanted) if shutil.which("uv") else _planned_by_pip(wanted)
    if not found:
        raise ArgumentError(
            f"against={' '.join(wanted)!r} changes nothing: "
            f"{', '.join(f'{Requirement(one).name} {installed_version(Requirement(one).name)}' for one in wanted)} "
            "is installed. Name another version."
        )
    return found


def installed_version(name: str) -> str | None:
    """Returns the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _planned_by_uv(wanted: Sequence[str]) -> dict[str, str]:
    said = _installer("uv", "pip", "install", "--dry-run", "--python", sys.executable, *wanted).stderr
    return dict(re.findall(r"^ \+ ([\w.-]+)==(\S+)", said, re.MULTILINE))


def _planned_by_pip(wanted: Sequence[str]) -> dict[str, str]:
    pip = (sys.executable, "-P", "-m", "pip")
    said = _installer(*pip, "install", "--quiet", "--dry-run", "--report", "-", *wanted).stdout
    metadata = (one["metadata"] for one in parse_json(said)["install"])
    return {one["name"]: one["version"] for one in metadata}


def install(packages: dict[str, str], folder: Path) -> None:
    """Installs these packages alone into a folder."""
    exact = [f"{name}=={version}" for name, version in packages.items()]
    target = ["--quiet", "--no-deps", "--target", str(folder), *exact]
    if shutil.which("uv"):
        _installer("uv", "pip", "install", "--python", sys.executable, *target)
    else:
        _installer(sys.executable, "-P", "-m", "pip", "install", *target)


def _installer(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs uv or pip; ArgumentError with its last line if it fails."""
    try:
        done = run_command(command, seconds=LIMIT_S)
        done.check_returncode()
        return done
    except subprocess.TimeoutExpired:
        raise ArgumentError(
            f"The packages of against= are not there after {LIMIT_S:g} s. Check the connection to the package index."
        ) from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        raise ArgumentError(
            f"The packages of against= cannot be installed: {lines[-1].strip() if lines else error}. Check their names "
            "and versions, and the connection to the package index."
        ) from None


# -- one side ----------------------------------------------------------------------------------------------------------


def _freeze(trainer: AnyTrainer, path: Path) -> None:
    """Writes the trainer without trackers, callbacks and extensions of the user."""
    copied = Internals(trainer).copied_for_evaluation(checkpoint_items={}, model_wrapped=trainer.model)
    state = make_state(copied) | {"callbacks": [], "control": None}
    values = {"class": type(trainer), "trainer": state, "threads": torch.get_num_threads()}
    write_frozen(values, path, asked_by="check(against=...)", instead="compare the runs by record_values")


def _train(folder: Path, side: str, before: list[str], *, num_steps: int, limit_s: float) -> None:
    """Trains and predicts in a process of its own; ProcessFailedError with the last line of what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*before, *(one or os.getcwd() for one in sys.path)])}
    command = [sys.executable, "-P", "-m", "trainwright.preflight.against_process", str(folder), side, str(num_steps)]
    log = folder / f"{side}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise ProcessFailedError(f"no end after {limit_s:g} s") from None
    finally:
        end_group(process)
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise ProcessFailedError(lines[-1] if lines else f"the process ended with {process.returncode}")
