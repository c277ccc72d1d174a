"""Two processes whose checkpoints are copied, and found in an empty directory: `mirrored_together.py FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from tests._support.small import StopAt, make_trainer, weights
from tests._support.two_processes import tell

from trainwright.checkpoint.remote import RemoteStore

TOP = Path(sys.argv[1])
FSDP = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": "Linear"}}
SHARDED = {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], "state_dict_type": "SHARDED_STATE_DICT"}}


def trained(name: str, *, url: str | None, stop_at: int = 6, **settings: Any) -> Any:
    common = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "checkpoint_mirror": url}
    trainer = make_trainer(TOP / name, callbacks=[StopAt(stop_at)], **common, **settings)
    trainer.train(resume_from_checkpoint="auto")
    return trainer


def outcome(engine: str, **settings: Any) -> dict[str, Any]:
    url = (TOP / engine / "store").as_uri()
    whole = weights(trained(f"{engine}/whole", url=None, **settings).model)
    trained(f"{engine}/first", url=url, stop_at=4, **settings)
    torch.distributed.barrier()
    again = trained(f"{engine}/second", url=url, **settings)  # an empty directory
    found = weights(again.model)
    store = RemoteStore(url)
    return {
        "step": again.state.global_step,
        "same": all(torch.equal(value, found[name]) for name, value in whole.items()),
        "copies": [one.step for one in store.manifests()],
        "problems": [list(store.problems(one)) for one in store.manifests()],
    }


if __name__ == "__main__":
    tell(ddp=outcome("ddp"), sharded=outcome("sharded", **SHARDED))
