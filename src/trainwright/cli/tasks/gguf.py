"""An exported model as a GGUF file, by llama.cpp's own converter where it is installed; else the command to run."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainwright.cli.tasks.export import CONFIG_NAME
from trainwright.errors import CheckpointError
from trainwright.support.deadline import reap
from trainwright.support.door import read_json

CONVERTER = "convert_hf_to_gguf.py"
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
MAGIC = b"GGUF"
LIMIT_S = 6 * 3600.0  # for a conversion
STOP_LIMIT_S = 10.0
MOST_SHOWN = 2000  # characters of the converter's last output


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion, done or to be done.

    Attributes:
        file: the file, or the one that the command writes.
        is_done: whether the converter ran and wrote the file.
        command: what converts the directory.
    """

    file: Path
    is_done: bool
    command: str


def convert_to_gguf(folder: Path) -> Conversion:
    """Converts an exported model, if llama.cpp's converter is on the path of programs.

    Args:
        folder: directory with the whole model, whose name the file gets.

    Raises:
        CheckpointError: the converter failed; the directory stays as it is.
    """
    file = folder / f"{folder.absolute().name}.gguf"
    words = [str(folder), "--outfile", str(file), "--outtype", _outtype(folder)]
    program = shutil.which(CONVERTER)
    if program is None:
        return Conversion(file=file, is_done=False, command=shlex.join(["python", f"llama.cpp/{CONVERTER}", *words]))
    command = [program, *words]
    code, said = _run(command)
    is_written = file.is_file() and _has_magic(file)
    if code != 0 or not is_written:
        file.unlink(missing_ok=True)
        raise CheckpointError(
            f"{CONVERTER} wrote no GGUF file (exit code {code}); the model in {folder} is whole. Its last output:\n"
            f"{said}"
        )
    return Conversion(file=file, is_done=True, command=shlex.join(command))


def _outtype(folder: Path) -> str:
    """Returns the converter's name for the type of the weights; its own choice if the configuration has none."""
    config = folder / CONFIG_NAME
    found = read_json(config, max_bytes=1 << 24) if config.is_file() else {}
    return TYPES.get(str(found.get("dtype") or found.get("torch_dtype")), "auto")


def _has_magic(file: Path) -> bool:
    with file.open("rb") as content:
        return content.read(len(MAGIC)) == MAGIC


def _run(command: list[str]) -> tuple[int | None, str]:
    """Runs a program with a time limit; returns its exit code, None if it had to be ended, and its last output."""
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = child.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            reap(child, limit_s=STOP_LIMIT_S)
        output.seek(0)
        return code, output.read().decode(errors="replace")[-MOST_SHOWN:]
