"""Writes an export: into a partial directory, which gets its name once the model in it is proved, if it is to be."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.checkpoint.weights import GENERATION_NAME, export_model
from trainwright.cli.tasks.export import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    DTYPES,
    cast_weights,
    check_base,
    export_average,
    has_adapter,
    merge,
    staged_folder,
)
from trainwright.cli.tasks.export_card import write_merged_card
from trainwright.cli.tasks.trained_tokens import find_recorded
from trainwright.engine import sharded_state
from trainwright.errors import CheckpointError
from trainwright.hub.model_card import add_section
from trainwright.support.door import read_json

if TYPE_CHECKING:
    from trainwright.cli.tasks.export_proof import ExportProof


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What is to be exported, and how.

    Attributes:
        source: directory of the checkpoint, or with the model.
        run: directory with the recipe, or of one of its checkpoints.
        folder: directory to write, new or empty.
        is_merged: merge an adapter into the weights.
        dtype: fp32, bf16 or fp16; None keeps the types of the weights.
        weights: "trained" or "average".
        is_proved: compare the export with the trained model.
        rows: file to compare them on; None for rows of the run.
        accepts: write it also where it differs.
    """

    source: Path
    run: Path
    folder: Path
    is_merged: bool = False
    dtype: str | None = None
    weights: str = "trained"
    is_proved: bool = False
    rows: Path | None = None
    accepts: bool = False


class _NotProvedError(Exception):
    """Leaves the partial directory, which is deleted."""


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP end the process as Ctrl-C does, so that what is half written is deleted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    # One that is ignored, as under nohup, stays so.
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    heard = {one: before for one, before in handlers.items() if before == signal.SIG_DFL}
    for one in heard:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one, before in heard.items():
            signal.signal(one, before)


def write_export(asked: Export) -> ExportProof | None:
    """Writes an export; one that differs from the trained model only if that is accepted.

    Returns:
        The comparison, None if none was asked for. The directory was written if it holds or was accepted.

    What is cheap to refuse is refused before anything is merged: the directory, the base of an adapter, the rows.

    Raises:
        CheckpointError: the checkpoint cannot be exported, or the export not be loaded.
        DataError: the rows of the run are not there any more.
        RecipeError: the rows to compare on cannot be read.
    """
    proof: ExportProof | None = None
    existed = asked.source.is_dir()
    try:
        with _ended_in_order(), staged_folder(asked.folder) as partial, ExitStack() as stack:
            if has_adapter(asked.source) and (asked.is_merged or asked.is_proved):
                check_base(asked.source)
            prove = _prepare_proof(asked, stack) if asked.is_proved else None
            _write_model(asked, partial)
            if prove is None:
                return None
            proof = prove(partial)
            proof = dataclasses.replace(proof, is_accepted=asked.accepts and not proof.holds)
            if not proof.holds and not proof.is_accepted:
                raise _NotProvedError
            add_section(partial, "Export", proof.section())
    except _NotProvedError:
        return proof
    except (CheckpointError, OSError) as error:
        if not existed or asked.source.is_dir():
            raise
        raise CheckpointError(
            f"{asked.source} was deleted while it was exported, by a run that keeps fewer checkpoints "
            "(save_total_limit). Export again, of a newer one or when the run has ended."
        ) from error
    return proof


def _prepare_proof(asked: Export, stack: ExitStack) -> Callable[[Path], ExportProof]:
    # Loads torch's data loading, the trainer and the tasks.
    from trainwright.cli.tasks.export_proof import prepared_proof

    return stack.enter_context(
        prepared_proof(asked.source, run=asked.run, data=asked.rows, weights=asked.weights, dtype=asked.dtype)
    )


def _write_model(asked: Export, partial: Path) -> None:
    dtype = None if asked.dtype is None else DTYPES[asked.dtype]
    if asked.is_merged:
        base = str(read_json(asked.source / ADAPTER_CONFIG_NAME, max_bytes=1 << 20)["base_model_name_or_path"])
        merge(asked.source, partial, dtype=dtype)
        write_merged_card(asked.source, partial, model_name=asked.folder.resolve().name, base=base)
        return
    if asked.weights == "average":
        export_average(asked.source, partial)
    else:
        export_model(asked.source, partial, parts=sharded_state)
    # A checkpoint with an adapter has no settings of the model: they are in its run.
    for name in (CONFIG_NAME, GENERATION_NAME) if has_adapter(partial) else ():
        recorded = find_recorded(asked.source, name)
        if recorded is not None:
            shutil.copyfile(recorded, partial / name)
    if dtype is not None:
        if not list(partial.rglob("*.safetensors")):
            raise CheckpointError(f"{asked.source} has no weights in safetensors, so --dtype cannot round them.")
        cast_weights(partial, dtype)
