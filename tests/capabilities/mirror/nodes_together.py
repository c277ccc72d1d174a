"""Two nodes of one process each, with copies of their checkpoints: `nodes_together.py FOLDER URL CASE`."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # what a launcher of each node sets

import torch
import torch.distributed

from tests._support.small import StopAt, make_trainer, weights
from tests._support.two_processes import tell
from trainwright.capabilities.mirror import parts
from trainwright.capabilities.mirror.remote import RemoteStore
from trainwright.checkpoint.store import CheckpointStore

TOP = Path(sys.argv[1])
URL = sys.argv[2]
RANK = int(os.environ["RANK"])
LAYERS = {"transformer_layer_cls_to_wrap": "Linear", "state_dict_type": "SHARDED_STATE_DICT"}
SENT: list[str] = []


def trained(folder: Path, *, url: str | None = URL, stop_at: int = 6, **settings: Any) -> Any:
    common = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "checkpoint_mirror": url}
    trainer = make_trainer(folder, callbacks=[StopAt(stop_at)], **common, **settings)
    trainer.train(resume_from_checkpoint="auto")
    torch.distributed.barrier()
    return trainer


def is_same(one: Any, other: Any) -> bool:
    found = weights(other.model)
    return all(torch.equal(value, found[name]) for name, value in weights(one.model).items())


def disks() -> None:
    """Each node has a disk of its own."""
    each = {"save_on_each_node": True}
    own = TOP / f"node{RANK}"
    whole = trained(own / "whole", url=None, **each)
    trained(own / "local", url=None, stop_at=4, **each)
    told: dict[str, Any] = {"local": is_same(whole, trained(own / "local", url=None, **each))}
    trained(own / "run", stop_at=4, **each)
    shutil.rmtree(own / "run")  # both machines are new
    told["both"] = is_same(whole, trained(own / "run", **each))
    if RANK == 1:
        shutil.rmtree(own / "run")  # the second machine is new, and the first one has the run to its end
    told["one"] = is_same(whole, trained(own / "run", **each))
    told["there"] = CheckpointStore(own / "run").steps()
    if RANK == 1:
        shutil.rmtree(own / "run")
    else:
        store = RemoteStore(URL)
        store.remove(next(copy for copy in store.copies() if copy.step == 6))  # the newest is on one machine alone
    torch.distributed.barrier()
    again = trained(own / "run", **each)
    told["older"] = is_same(whole, again)
    if RANK == 0:
        shutil.rmtree(own / "run")
    torch.distributed.barrier()
    tell(**told, steps=sorted(one.step for one in RemoteStore(URL).manifests()))


def parts_of_each() -> None:
    """The nodes share a disk, and each process writes its part of a sharded checkpoint."""
    put_part = RemoteStore.put_part

    def noted(store: RemoteStore, source: Path, manifest: Any, name: str, **how: Any) -> None:
        if CASE == "dead" and RANK == 1:
            raise ConnectionError("this node reaches no store")
        SENT.append(name)
        put_part(store, source, manifest, name, **how)

    RemoteStore.put_part = noted  # type: ignore[method-assign]
    parts.TAKE_S = 20.0 if CASE == "parts" else 0.5
    settings = {"fsdp": True, "fsdp_config": LAYERS}
    whole = trained(TOP / "whole", url=None, **settings)
    trained(TOP / "run", stop_at=4, save_async=True, **settings)
    if RANK == 0:
        shutil.rmtree(TOP / "run")
    torch.distributed.barrier()
    again = trained(TOP / "run", **settings)
    store = RemoteStore(URL)
    problems = [problem for one in store.manifests() for problem in store.problems(one)]
    left = sorted(path.name for path in (TOP / "run").glob("_mirror*"))
    tell(
        same=is_same(whole, again),
        sent=SENT,
        problems=problems,
        steps=[one.step for one in store.manifests()],
        left=left,
    )


if __name__ == "__main__":
    CASE = sys.argv[3]
    disks() if CASE == "disks" else parts_of_each()
