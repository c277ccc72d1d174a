"""Where each service keeps what it was told, read back: (name, step) -> value. Real stores where the client runs here;
for the others a stand-in of the client's own functions, which says so.
"""

from __future__ import annotations

import csv
import json
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from trainwright import rewrite_logs

Values = dict[tuple[str, int], float]


@dataclass(frozen=True)
class Service:
    """A tracker and how to look into it.

    Attributes:
        enter: prepares the environment in an empty directory.
        read: what was told, by name and step.
        names: from the journal's names to those of the service.
        is_stand_in: whether the client is replaced at its boundary.
    """

    name: str
    enter: Callable[[Any, Path], Any]
    read: Callable[[Any, Path], Values]
    names: Callable[[dict[str, Any]], dict[str, Any]]
    is_stand_in: bool = False


def same(values: dict[str, Any]) -> dict[str, Any]:
    return values


def tensorboard_values(seen: Any, folder: Path) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Values = {}
    for place in {path.parent for path in folder.rglob("events.out.tfevents.*")}:
        board = EventAccumulator(str(place), size_guidance={"scalars": 0}).Reload()
        for tag in board.Tags()["scalars"]:
            found |= {(tag, event.step): event.value for event in board.Scalars(tag)}
    return found


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run: a log in LevelDB's format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    raw = path.read_bytes()
    position = 7
    parts = b""
    while position + 7 <= len(raw):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", raw[position : position + 7])
        if kind == 0:
            position += left
            continue
        parts += raw[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def is_complete(path: Path) -> bool:
    """The client's own process writes the file; it may still be about it when `finish` returns."""
    return any(one.WhichOneof("record_type") == "exit" for one in wandb_records(path))


def wandb_values(seen: Any, folder: Path) -> Values:
    import wandb

    wandb.finish()  # a run is left open, for whoever logs more to it; the end of a process closes it
    limit = time.monotonic() + 60
    files = sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime)
    while files and not is_complete(files[-1]) and time.monotonic() < limit:  # those of a killed process never are
        time.sleep(0.05)
    found: Values = {}
    for path in files:
        for one in wandb_records(path):
            if one.WhichOneof("record_type") != "history":
                continue
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in one.history.item}
            step = row.get("train/global_step", -1)
            found |= {(name, step): value for name, value in row.items() if not name.startswith("_")}
    return {key: value for key, value in found.items() if key[0] != "train/global_step"}


def mlflow_values(seen: Any, folder: Path) -> Values:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    found: Values = {}
    for run in client.search_runs(["0"]):
        for name in run.data.metrics:
            history = sorted(client.get_metric_history(run.info.run_id, name), key=lambda metric: metric.timestamp)
            found |= {(name, metric.step): metric.value for metric in history}
    return found


def dvclive_values(seen: Any, folder: Path) -> Values:
    found: Values = {}
    for path in (folder / "dvclive" / "plots" / "metrics").rglob("*.tsv"):
        with open(path, newline="") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                name = path.relative_to(folder / "dvclive" / "plots" / "metrics").with_suffix("").as_posix()
                found[name, int(row["step"])] = float(next(v for k, v in row.items() if k != "step"))
    return found


def into(monkeypatch: Any, **modules: Any) -> None:
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)


def enter_tensorboard(monkeypatch: Any, folder: Path) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "board"))


def enter_wandb(monkeypatch: Any, folder: Path) -> None:
    import wandb

    wandb.teardown()  # it reads its environment once in a process
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(folder))
    monkeypatch.setenv("WANDB_SILENT", "true")


def enter_mlflow(monkeypatch: Any, folder: Path) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (folder / "mlruns").as_uri())


def enter_dvclive(monkeypatch: Any, folder: Path) -> None:
    monkeypatch.setenv("DVCLIVE_LOGLEVEL", "CRITICAL")
    monkeypatch.setenv("DVC_NO_ANALYTICS", "true")
    monkeypatch.chdir(folder)


def enter_comet(monkeypatch: Any, folder: Path) -> Any:
    client = MagicMock()
    into(monkeypatch, comet_ml=client)
    return client


def comet_values(client: Any, folder: Path) -> Values:
    calls = client.start.return_value.log_metrics.call_args_list
    return {(name, call.kwargs["step"]): value for call in calls for name, value in call.args[0].items()}


def enter_trackio(monkeypatch: Any, folder: Path) -> Any:
    client = MagicMock()
    client.context_vars.current_space_id.get.return_value = None
    client.context_vars.current_run.get.return_value = SimpleNamespace(name="run")
    into(monkeypatch, trackio=client)
    return client


def rows_by_step(client: Any, folder: Path) -> Values:
    found: Values = {}
    for call in client.log.call_args_list:
        row = dict(call.args[0])
        step = row.pop("train/global_step", -1)
        found |= {(name, step): value for name, value in row.items()}
    return found


def enter_clearml(monkeypatch: Any, folder: Path) -> Any:
    client = MagicMock()
    client.Task.current_task.return_value = None
    client.Task.init.return_value.id = "task"
    into(monkeypatch, clearml=client)
    return client


def clearml_values(client: Any, folder: Path) -> Values:
    calls = client.Task.init.return_value.get_logger.return_value.report_scalar.call_args_list
    given = (call.kwargs for call in calls)
    return {(f"{one['title']}/{one['series']}", one["iteration"]): one["value"] for one in given}


def enter_neptune(monkeypatch: Any, folder: Path) -> Any:
    fields: dict[str, Any] = {}
    client = MagicMock()
    base = MagicMock()
    base.__getitem__.side_effect = lambda name: fields.setdefault(name, MagicMock())
    run = client.init_run.return_value
    run.__getitem__.side_effect = lambda name: base if name == "finetuning" else MagicMock()
    into(monkeypatch, neptune=client)
    client.fields = fields
    return client


def neptune_values(client: Any, folder: Path) -> Values:
    return {
        (name, call.kwargs["step"]): call.args[0]
        for name, field in client.fields.items()
        for call in field.append.call_args_list
    }


def enter_swanlab(monkeypatch: Any, folder: Path) -> Any:
    client = MagicMock()
    client.get_run.return_value = None
    client.init.return_value.id = "run"
    into(monkeypatch, swanlab=client)
    return client


def swanlab_values(client: Any, folder: Path) -> Values:
    return {key: value for key, value in rows_by_step(client, folder).items() if not key[0].startswith("single_value")}


def enter_azure(monkeypatch: Any, folder: Path) -> Any:
    module = MagicMock()
    into(monkeypatch, azureml=MagicMock(), azureml__core=MagicMock(), azureml__core__run=module)
    return module


def azure_values(module: Any, folder: Path) -> Values:
    """It takes no step: values are numbered by their order."""
    seen: dict[str, int] = {}
    found: Values = {}
    for call in module.Run.get_context.return_value.log.call_args_list:
        name, value = call.args
        seen[name] = seen.get(name, 0) + 1
        found[name, seen[name]] = value
    return found


def standard_names(values: dict[str, Any]) -> dict[str, Any]:
    from dvclive.utils import standardize_metric_name

    return {standardize_metric_name(name, "dvclive.huggingface"): value for name, value in values.items()}


SERVICES = (
    Service("tensorboard", enter_tensorboard, tensorboard_values, rewrite_logs),
    Service("wandb", enter_wandb, wandb_values, rewrite_logs),
    Service("mlflow", enter_mlflow, mlflow_values, same),
    Service("dvclive", enter_dvclive, dvclive_values, standard_names),
    Service("comet_ml", enter_comet, comet_values, rewrite_logs, is_stand_in=True),
    Service("trackio", enter_trackio, rows_by_step, rewrite_logs, is_stand_in=True),
    Service("clearml", enter_clearml, clearml_values, rewrite_logs, is_stand_in=True),
    Service("neptune", enter_neptune, neptune_values, rewrite_logs, is_stand_in=True),
    Service("swanlab", enter_swanlab, swanlab_values, rewrite_logs, is_stand_in=True),
)
