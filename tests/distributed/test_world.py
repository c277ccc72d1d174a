"""The world that the variables of launchers describe."""

import pytest
import torch
import transformers

from trainwright.config.arguments import TrainingArguments
from trainwright.config.resolve import read_world
from trainwright.distributed.world import ParallelMode, World, configured_precision
from trainwright.errors import ArgumentError

from .._support.two_processes import run

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 0, 1, 1, 1)),
        (TORCHRUN, (5, 1, 8, 4, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (0, 0, 1, 1, 1)),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            (1, 1, 2, 1, 2),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 1, 2, 2, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, (1, 1, 2, 2, 1)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, (0, 0, 1, 1, 1)),
        ({"LOCAL_RANK": "-1", "RANK": "-1"}, (0, 0, 1, 1, 1)),
        ({"WORLD_SIZE": ""}, (0, 0, 1, 1, 1)),
    ],
    ids=str,
)
def test_ranks_and_sizes_come_from_the_launcher(environ, expected):
    world = World.detect(environ=environ)
    found = (world.process_index, world.local_process_index, world.world_size, world.local_world_size, world.num_nodes)
    assert found == expected
    assert world.is_distributed == (world.world_size > 1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "8"}, "process 8 (RANK, counted from 0) of 8 (WORLD_SIZE)"),
        ({"LOCAL_RANK": "4"}, "process 4 (LOCAL_RANK) of 4 on its node (LOCAL_WORLD_SIZE)"),
        ({"LOCAL_WORLD_SIZE": "9"}, "9 processes (LOCAL_WORLD_SIZE) of 8 in all (WORLD_SIZE)"),
    ],
)
def test_a_world_that_contradicts_itself_is_refused(changed, words, monkeypatch):
    for name, value in {**TORCHRUN, **changed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match="launcher's variables contradict") as caught:
        TrainingArguments(use_cpu=True).train_batch_size  # noqa: B018 - a property
    assert words in str(caught.value)


def test_the_cpu_is_used_on_request():
    for world in (World.detect(use_cpu=True, environ={}), World.detect(environ={"ACCELERATE_USE_CPU": "true"})):
        assert (world.device, world.n_gpu) == (torch.device("cpu"), 0)
        assert world.parallel_mode is ParallelMode.NOT_PARALLEL


@pytest.mark.skipif(torch.accelerator.is_available(), reason="describes a machine without an accelerator")
def test_without_an_accelerator_the_device_is_the_cpu():
    assert World.detect(environ={}).device == torch.device("cpu")
    assert World.detect(environ=TORCHRUN).parallel_mode is ParallelMode.DISTRIBUTED
    assert World.detect(environ={"ACCELERATE_TORCH_DEVICE": "meta"}).device == torch.device("meta")


@pytest.mark.parametrize(
    ("accelerator", "environ", "device", "n_gpu", "mode"),
    [
        (("cuda", 4), {}, "cuda:0", 4, ParallelMode.NOT_DISTRIBUTED),
        (("cuda", 1), {}, "cuda:0", 1, ParallelMode.NOT_PARALLEL),
        (("cuda", 4), TORCHRUN, "cuda:1", 1, ParallelMode.DISTRIBUTED),
        (("cuda", 1), TORCHRUN, "cuda:0", 1, ParallelMode.DISTRIBUTED),
        (("cuda", 1), {"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "cuda:0", 1, ParallelMode.DISTRIBUTED),
        (("mps", 1), {}, "mps", 1, ParallelMode.NOT_PARALLEL),
        (("xpu", 2), {}, "xpu:0", 1, ParallelMode.NOT_PARALLEL),
        ((None, 0), {}, "cpu", 0, ParallelMode.NOT_PARALLEL),
    ],
)
def test_devices_of_other_machines(accelerator, environ, device, n_gpu, mode, monkeypatch):
    monkeypatch.setattr("trainwright.distributed.world._accelerator", lambda: accelerator)
    world = World.detect(environ=environ)
    assert (world.device, world.n_gpu, world.parallel_mode) == (torch.device(device), n_gpu, mode)


def test_both_kinds_of_arguments_have_a_world():
    settings = {"use_cpu": True}
    assert read_world(TrainingArguments(**settings)) == read_world(transformers.TrainingArguments(**settings))
    assert TrainingArguments(**settings).world == World(use_cpu=True)


@pytest.mark.parametrize(
    ("settings", "logs", "saves"),
    [
        ({}, True, False),
        ({"log_on_each_node": False, "save_on_each_node": True}, False, True),
    ],
)
def test_who_logs_and_saves_on_the_second_node(settings, logs, saves, monkeypatch):
    for name, value in {**TORCHRUN, "RANK": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    args = TrainingArguments(use_cpu=True, **settings)
    assert (args.should_log, args.should_save) == (logs, saves)
    assert (args.world_size, args.process_index, args.local_process_index) == (8, 4, 0)


def test_the_precision_of_the_launcher_is_the_fallback(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert configured_precision() == "bf16"
    assert TrainingArguments().mixed_precision == "bf16"
    assert TrainingArguments(fp16=True).mixed_precision == "fp16"


@pytest.fixture
def started(monkeypatch):
    """Process groups that arguments have started, in a process that torchrun has launched."""
    found = []
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    record = lambda world, **how: found.append((world.world_size, how["backend"], how["timeout"].seconds))  # noqa: E731
    monkeypatch.setattr("trainwright.config.arguments.start_group", record)
    return found


def test_arguments_start_no_process_group_by_themselves(started):
    args = TrainingArguments(use_cpu=True, deepspeed={"zero_optimization": {"stage": 2}})
    asked = [args.device, args.world, args.n_gpu, args.parallel_mode, args.world_size, args.should_save, args.to_dict()]
    assert len(asked) == 7
    assert started == []


def test_process_group_that_arguments_start_is_the_one_that_they_ask_for(started, monkeypatch):
    monkeypatch.setattr("accelerate.PartialState", lambda *, cpu: "accelerate's")
    args = TrainingArguments(use_cpu=True, ddp_backend="gloo", ddp_timeout=77)
    with args.main_process_first():
        pass
    assert args.distributed_state == "accelerate's"
    assert started == [(8, "gloo", 77)] * 2


def _first_then_others(rank, path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}/meeting", rank=rank, world_size=2)
    with TrainingArguments(use_cpu=True).main_process_first(), open(f"{path}/order", "a") as order:
        order.write(f"{rank}")
    dist.destroy_process_group()


@pytest.mark.process
def test_the_main_process_goes_first(tmp_path):
    script = """
        import os, sys
        from tests.distributed.test_world import _first_then_others

        _first_then_others(int(os.environ["RANK"]), sys.argv[1])
    """
    run(script, str(tmp_path), folder=tmp_path)
    assert (tmp_path / "order").read_text() == "01"


def test_tasks_of_slurm_with_a_meeting_place_are_one_run():
    tasks = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}
    meeting = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    assert World.detect(use_cpu=True, environ=tasks).world_size == 1
    world = World.detect(use_cpu=True, environ=tasks | meeting)
    assert (world.process_index, world.world_size, world.local_process_index, world.local_world_size) == (5, 8, 1, 4)
    assert world.variables() == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    by_torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert World.detect(use_cpu=True, environ=tasks | meeting | by_torchrun).world_size == 2


def test_what_is_written_for_torch_does_not_contradict_launcher_that_says_less():
    """Not how many processes a node has: the guess, one, would be wrong for the second."""
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    world = World.detect(environ=environ)
    assert World.detect(environ={**world.variables(), **environ}) == world
    assert World.detect(environ={"LOCAL_RANK": "0"}).variables()["LOCAL_WORLD_SIZE"] == "1"


def test_run_that_was_meant_for_tpu_does_not_train_on_the_cpu(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert World.detect(use_cpu=True).device.type == "cpu"
    if torch.accelerator.is_available():
        pytest.skip("there is another accelerator, which is taken")
    with pytest.raises(ArgumentError, match="PJRT_DEVICE=TPU asks for a TPU"):
        _ = TrainingArguments().device
