"""Two processes whose checkpoints are copied, and found in an empty directory: `mirrored_together.py FOLDER URL`."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tests._support.small import StopAt, make_trainer, weights
from tests._support.two_processes import tell
from trainwright.capabilities.mirror.remote import RemoteStore

TOP = Path(sys.argv[1])
URL = sys.argv[2]
FSDP = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": "Linear"}}
SHARDED = {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "state_dict_type": "SHARDED_STATE_DICT"}}
READ: dict[str, int] = {}  # bytes that this process requested, by the names of objects


def counted(store: RemoteStore, path: str, start: int, stop: int, read: Any = RemoteStore._read) -> bytes:
    content: bytes = read(store, path, start, stop)
    name = path.removeprefix(f"{store._root}/")
    READ[name] = READ.get(name, 0) + len(content)
    return content


def trained(name: str, *, url: str | None, stop_at: int = 6, **settings: Any) -> Any:
    common = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "checkpoint_mirror": url}
    trainer = make_trainer(TOP / name, callbacks=[StopAt(stop_at)], **common, **settings)
    trainer.train(resume_from_checkpoint="auto")
    return trainer


def outcome(engine: str, **settings: Any) -> dict[str, Any]:
    url = f"{URL}/{engine}"
    whole = weights(trained(f"{engine}/whole", url=None, **settings).model)
    trained(f"{engine}/first", url=url, stop_at=4, **settings)
    torch.distributed.barrier()
    store = RemoteStore(url)
    copy, newest = store.found()[0]
    READ.clear()
    RemoteStore._read = counted  # type: ignore[method-assign, assignment]
    again = trained(f"{engine}/second", url=url, **settings)  # an empty directory
    torch.distributed.barrier()  # the main process has sent the last copy
    found = weights(again.model)
    read = {name: size for name, size in READ.items() if name.startswith("checkpoint-")}
    return {
        "step": again.state.global_step,
        "same": all(torch.equal(value, found[name]) for name, value in whole.items()),
        "copies": [one.step for one in store.manifests()],
        "problems": [list(store.problems(one)) for one in store.manifests()],
        "read": read,
        "sizes": {f"{copy.name}/{name}": entry["size"] for name, entry in newest.files.items()},
    }


if __name__ == "__main__":
    tell(ddp=outcome("ddp"), sharded=outcome("sharded", **SHARDED))
