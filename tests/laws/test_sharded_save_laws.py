"""Laws of the files of a sharded save, at world sizes that no test machine has: 64, 512 and 4,096 processes.

This process is each rank in turn, in a group that sends nothing. What the save sends from rank to rank (plans, names of
files, what was written) is handed on in a table, so each rank writes the very files that it writes among the others.
"""

from __future__ import annotations

import pickle
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trainwright._types import DATA_POSITION_NAME, RNG_STATE_NAME
from trainwright.capabilities.mirror.shares import find_owner, select_node_files
from trainwright.checkpoint import rng
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.deferred_io import IMMEDIATE
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore
from trainwright.distributed.process_group import simulated_process_group
from trainwright.engine import sharded_state
from trainwright.errors import CheckpointError
from trainwright.run.checkpointing import Checkpointer

pytestmark = pytest.mark.costly

PER_NODE = 8
ROWS_OF_EACH = 2
LOOKED_AT = (0, 1, 7, -2, -1)  # ranks of another run that read their part
Files = dict[str, Path]  # name in the checkpoint -> place on a node's disk


class Waits(BaseException):
    """A rank waits for an answer of the coordinator, which is not there yet. No Exception: torch keeps those."""


@dataclass
class Exchange:
    """What ranks send each other within one call of torch's `save`, rank by rank instead of at the same time."""

    num: int
    rank: int = 0
    round: int = 0  # of gathers within one call
    sent: list[dict[int, bytes]] = field(default_factory=lambda: [{}, {}])  # by round and rank: plans, results
    plans: list[bytes] = field(default_factory=list)  # by rank: which files it writes

    def begin(self, rank: int) -> None:
        self.rank = rank
        self.round = 0

    def gather(self, obj: Any, object_gather_list: list[Any] | None, dst: int, group: Any) -> None:
        table = self.sent[self.round]
        self.round += 1
        table[self.rank] = pickle.dumps(obj)
        if object_gather_list is not None:
            if len(table) < self.num:
                raise Waits
            object_gather_list[:] = [pickle.loads(table[rank]) for rank in range(self.num)]

    def scatter(self, scatter_object_output_list: list[Any], *, scatter_object_input_list: Any, **kwargs: Any) -> None:
        if scatter_object_input_list is not None:
            self.plans = [pickle.dumps(one) for one in scatter_object_input_list]
        if not self.plans:
            raise Waits
        scatter_object_output_list[0] = pickle.loads(self.plans[self.rank])

    def broadcast(self, object_list: list[Any], **kwargs: Any) -> None:
        """Leaves the result of the coordinator where it is: nobody else uses it."""


def sharded(num_rows: int, num: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose row i has the value i, and an optimizer whose momentum has -i, in parts of `num` processes."""
    # Torch keeps layouts by mesh, and the meshes of all ranks are equal. A name for each tells them apart here.
    mesh = init_device_mesh("cpu", (num,), mesh_dim_names=(f"seen_by_{dist.get_rank()}",))
    of_each = num_rows // num
    first = dist.get_rank() * of_each
    own = torch.arange(float(first), float(first + of_each)).view(-1, 1)
    whole = {"shape": torch.Size((num_rows, 1)), "stride": (1, 1)}
    model = nn.Linear(1, num_rows, bias=False, device="meta")
    model.weight = nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)], **whole))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = DTensor.from_local(-own, mesh, [Shard(0)], **whole)
    return model, optimizer


def at_once(tree: Any, write: Any, *, shared: bool) -> None:
    write(tree)


def files_of_all_ranks(num: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> list[Files]:
    """Saves as each of `num` ranks, on the disk of its node; returns the files of each node."""
    exchanges = {name: Exchange(num) for name in (sharded_state.MODEL, sharded_state.OPTIMIZER)}
    current: list[Exchange] = []
    monkeypatch.setattr(dist, "gather_object", lambda *args, **kwargs: current[0].gather(*args, **kwargs))
    monkeypatch.setattr(dist, "scatter_object_list", lambda *args, **kwargs: current[0].scatter(*args, **kwargs))
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *args, **kwargs: current[0].broadcast(*args, **kwargs))
    real = sharded_state.save_shards

    def save_shards(state: Any, *, storage_writer: Any, process_group: Any) -> None:
        """Goes as far with one state as the others have come, then on to the next."""
        exchange = exchanges[Path(storage_writer.path).name]
        exchange.begin(dist.get_rank())
        current[:] = [exchange]
        with suppress(Waits):
            real(state, storage_writer=storage_writer, process_group=process_group)

    monkeypatch.setattr(sharded_state, "save_shards", save_shards)

    def turn(rank: int) -> None:
        with simulated_process_group(rank=rank, num_processes=num, per_node=PER_NODE):
            model, optimizer = sharded(num * ROWS_OF_EACH, num)
            folder = root / f"node{rank // PER_NODE}"
            sharded_state.save(folder, model, optimizer, put=at_once, group=dist.group.WORLD)

    others = range(1, num)
    for rank in (*others, 0):  # the plans of all; the coordinator answers the last of them
        turn(rank)
    for rank in (*others, 0):  # the files; the coordinator describes them at the end
        turn(rank)
    nodes = [root / f"node{node}" for node in range(num // PER_NODE)]
    return [{path.relative_to(node).as_posix(): path for path in node.rglob("*") if path.is_file()} for node in nodes]


def write_states(folder: Path, num: int) -> None:
    """Writes, as the main process does for all, the random states and the positions of the ranks."""
    every = [(rng.capture() | {"of": rank}, {"dataloader": {"at": rank}}) for rank in range(num)]
    checkpointer = Checkpointer(
        args=SimpleNamespace(should_save=True),
        engine=SimpleNamespace(gather_replica_objects=lambda mine: every),  # type: ignore[arg-type]
        writer=SimpleNamespace(sink=IMMEDIATE),  # type: ignore[arg-type]
    )
    run: Any = SimpleNamespace(loader_states=lambda: ({}, None))
    checkpointer.write_random_states(run, folder)


def shards_of(rank: int) -> set[str]:
    return {f"{name}/__{rank}_0.distcp" for name in (sharded_state.MODEL, sharded_state.OPTIMIZER)}


def states_of(rank: int, num: int) -> set[str]:
    return {rng.file_name(rank, num, name) for name in (RNG_STATE_NAME, DATA_POSITION_NAME)}


LARGE = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a turn of a rank takes milliseconds, and each has two
WORLDS = [64, pytest.param(512, marks=LARGE), pytest.param(4096, marks=LARGE)]


@pytest.mark.parametrize("num", WORLDS)
def test_each_rank_has_files_of_its_own_that_every_reader_finds(
    num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = files_of_all_ranks(num, tmp_path, monkeypatch)

    # Nothing of one node has the name of something of another.
    assert max(Counter(name for node in nodes for name in node).values()) == 1
    described = {f"{name}/.metadata" for name in (sharded_state.MODEL, sharded_state.OPTIMIZER)}
    for number, node in enumerate(nodes):
        ranks = range(number * PER_NODE, (number + 1) * PER_NODE)
        expected = set[str]().union(*map(shards_of, ranks))
        assert node.keys() - (described if number == 0 else set()) == expected
        assert {*select_node_files(node, ranks)} == expected
        assert {rank: {name for name in node if find_owner(name) == rank} for rank in ranks} == {
            rank: shards_of(rank) for rank in ranks
        }

    # On one disk they are the checkpoint, with the states that the main process writes.
    store = CheckpointStore(tmp_path / "run")
    staging = store.stage(5)
    for name, path in ((name, path) for node in nodes for name, path in node.items()):
        (staging / name).parent.mkdir(exist_ok=True)
        path.rename(staging / name)
    write_states(staging, num)
    folder = store.commit(staging, Manifest(step=5, run_id="run", world_size=num))
    checkpoint = Checkpoint(folder)
    assert checkpoint.manifest is not None
    assert checkpoint.manifest.files.keys() == described.union(
        *map(shards_of, range(num)), *(states_of(rank, num) for rank in range(num))
    )
    assert checkpoint.find_problem() is None

    # Each rank finds its own states there, and what the description names is there, for a run of any size.
    for rank in range(num):
        assert (checkpoint.random_states(rank, num) or {})["of"] == rank
        assert checkpoint.data_position(rank, num)["dataloader"] == {"at": rank}
    for name in (sharded_state.MODEL, sharded_state.OPTIMIZER):
        metadata = sharded_state.SafeReader(folder / name).read_metadata()
        named = {f"{name}/{info.relative_path}" for info in metadata.storage_data.values()}
        assert named == {file for rank in range(num) for file in shards_of(rank) if file.startswith(name)}
    rows = torch.arange(float(num * ROWS_OF_EACH)).view(-1, 1)
    assert torch.equal(sharded_state.read_weights(folder)["weight"], rows)
    for now in (num, num // 2, num * 2):
        for rank in LOOKED_AT:
            with simulated_process_group(rank=rank % now, num_processes=now, per_node=PER_NODE):
                model, optimizer = sharded(len(rows), now)
                momentum = optimizer.state[model.weight]["momentum_buffer"]
                mine = momentum.to_local().clone()
                momentum.to_local().zero_()
                sharded_state.load_optimizer(folder, model, optimizer)
                assert torch.equal(optimizer.state[model.weight]["momentum_buffer"].to_local(), mine)

    # A file that one rank wrote is missed by a check, by the choice of the newest, and by a reader of the values.
    missing = f"{sharded_state.MODEL}/__{num - 3}_0.distcp"
    (folder / missing).unlink()
    assert f"{missing} is missing" in (Checkpoint(folder).find_problem() or "")
    assert store.latest() is None
    with pytest.raises(CheckpointError, match=rf"__{num - 3}_0\.distcp"):
        sharded_state.read_weights(folder)
