"""torch, numpy, transformers, accelerate and huggingface_hub are used through their public names, but for one table.

A name is private if it, or a module on the way to it, begins with an underscore. Memory is handled by no address:
neither by ctypes, nor by `data_ptr`, nor by an `id`, which is a key of a dict or a set and nothing else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest

from .parsed import files, text
from .private_names import uses_in

MAX_NAMES = 10


@dataclass(frozen=True)
class Entry:
    """A name that has no public twin, or two that belong together; an attribute of objects begins with a dot."""

    name: str | tuple[str, ...]
    files: tuple[str, ...]
    reason: str
    checked_with: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if isinstance(self.name, str) else self.name


TABLE = (
    Entry(
        "torch.utils._python_dispatch.TorchDispatchMode",
        ("preflight/memory/allocation_tracker.py",),
        "The base class that torch documents for seeing each operation; public modules only import it.",
        "torch 2.13.0",
    ),
    Entry(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        ("preflight/memory/planner.py",),
        "Tensors without memory that run a training step, for the plan of memory; the meta device cannot compute sizes "
        "that depend on a device.",
        "torch 2.13.0",
    ),
    Entry(
        "torch._dynamo.config",
        ("support/patches.py",),
        "Holds optimize_ddp, which splits compiled blocks at the buckets of DDP; torch.compiler.config lacks it.",
        "torch 2.13.0",
    ),
    Entry(
        "torch.distributed.distributed_c10d._get_default_store",
        ("distributed/watchdog.py",),
        "The store of a group that a launcher or another library started; torch has no other way to ask for it.",
        "torch 2.13.0",
    ),
    Entry(
        ("._saved_self", "._saved_target"),
        ("capabilities/ledger/formulas.py",),
        "What a cross-entropy keeps for its backward pass: the losses of single labels without a second computation. "
        "torch's notes on autograd name the prefix _saved for it.",
        "torch 2.13.0",
    ),
    Entry(
        ("torch.utils.data._utils.worker", "torch.utils.data._utils.worker._worker_info"),
        ("data/worker_internals.py",),
        "What a worker of a DataLoader knows of itself, and how it passes on an error: neither can be set in public.",
        "torch 2.13.0",
    ),
    Entry(
        "._iterator",
        ("data/positions.py",),
        "Workers that persist: a DataLoader has no way to end them before it is collected.",
        "torch 2.13.0",
    ),
    Entry(
        "._attn_implementation",
        (
            "capabilities/packing/packed_rows.py",
            "engine/sequence_parts.py",
            "capabilities/incidents/contents.py",
            "support/patches.py",
        ),
        "Name of a model's attention; transformers can set it in public, and has nothing to ask for it.",
        "transformers 5.23.0",
    ),
    Entry(
        "._no_split_modules",
        ("engine/fsdp.py",),
        "The classes of layers that a model must not be split within; accelerate's documentation reads it like this.",
        "transformers 5.23.0",
    ),
    Entry(
        "._hf_deepspeed_config_weak_ref",
        ("config/zero3_init.py",),
        "The marker of ZeRO-3, which accelerate replaces and which is put back; only its contents are public.",
        "transformers 5.23.0",
    ),
)

# Attributes of other packages, of the standard library, or of classes of users.
OF_OTHERS = {
    "._format_args": "argparse",
    "._action_groups": "argparse",
    "._option_string_actions": "argparse",
    "._argument_group_name": "users' dataclasses, which choose their heading in --help with it",
    "._indices": "datasets",
    "._distributed": "datasets",
    "._ex_iterable": "datasets",
    "._fingerprint": "datasets",
    "._z3_optimizer": "deepspeed",
    "._hp_mapping": "deepspeed",
    "._lazy_init_hp_params_optimizer_state": "deepspeed",
    "._hp_optimizer_states_linked": "deepspeed",
    "._trainwright_module": "ours, on an engine of deepspeed",
}


@cache
def all_uses() -> dict[tuple[str, str], int]:
    """Returns file and name of each use, with its first line."""
    return uses_in({name: text(path) for name, path in files().items()})


def uses() -> dict[tuple[str, str], int]:
    """Returns those that are not attributes of another package."""
    return {use: line for use, line in all_uses().items() if use[1] not in OF_OTHERS}


def test_only_names_of_the_table_are_used() -> None:
    known = {(file, name) for entry in TABLE for file in entry.files for name in entry.names}
    more = [f"{file}:{line} uses {name}" for (file, name), line in uses().items() if (file, name) not in known]
    assert not more, "Use a public name. Where there is none, see the table above.\n" + "\n".join(more)


def test_the_table_is_short_and_nothing_in_it_is_unused() -> None:
    listed = [(file, name) for entry in TABLE for file in entry.files for name in entry.names]
    unused = [use for use in listed if use not in uses()]
    assert unused == []
    assert len(TABLE) <= MAX_NAMES
    assert [name for name, count in Counter(n for entry in TABLE for n in entry.names).items() if count > 1] == []
    assert [entry.name for entry in TABLE if not entry.reason or " " not in entry.checked_with] == []


def test_the_list_of_other_packages_has_nothing_unused() -> None:
    assert OF_OTHERS.keys() - {name for _, name in all_uses()} == set()


FOUND = {  # source: the name that is found
    "import torch\ntorch._foreach_mul_(a, b)": "torch._foreach_mul_",
    "import torch\ntorch._C._autograd._profiler_enabled()": "torch._C._autograd._profiler_enabled",
    "import numpy as np\nnp._core.multiarray": "numpy._core.multiarray",
    "from torch import nn\nnn.modules.batchnorm._BatchNorm": "torch.nn.modules.batchnorm._BatchNorm",
    "import torch.optim.optimizer as o\no._global_hooks": "torch.optim.optimizer._global_hooks",
    "import torch._dynamo": "torch._dynamo",
    "import torch._dynamo.config as settings\nsettings.patch()": "torch._dynamo.config",
    "from torch._utils import ExceptionWrapper": "torch._utils.ExceptionWrapper",
    "from torch.utils import _pytree": "torch.utils._pytree",
    "def f():\n    from accelerate.utils import _find_norm": "accelerate.utils._find_norm",
    "if TYPE_CHECKING:\n    from torch._C._distributed_c10d import Store": "torch._C._distributed_c10d.Store",
    "from accelerate.state import PartialState as P\nP._shared_state": "accelerate.state.PartialState._shared_state",
    "importlib.import_module('torch._dynamo')": "torch._dynamo",
    "mock.patch('transformers.trainer._is_peft_model')": "transformers.trainer._is_peft_model",
    "logging.getLogger('huggingface_hub.utils._http')": "huggingface_hub.utils._http",
    "load('torch.serialization:_get_layout')": "torch.serialization._get_layout",
    "import numpy as np\nhasattr(np, '_core')": "numpy._core",
    "getattr(model, '_orig_mod', model)": "._orig_mod",
    "NAME = '_orig_mod'\ngetattr(model, NAME)": "._orig_mod",
    "NAMES = ('plain', '_hf_peft_config_loaded')\nany(getattr(m, name) for name in NAMES)": "._hf_peft_config_loaded",
    "for name in ('_step_count',):\n    delattr(schedule, name)": "._step_count",
    "mock.patch.object(loader, '_next_data')": "._next_data",
    "optimizer._opt_called = True": "._opt_called",
    "model._orig_mod": "._orig_mod",
    "next(iterator)._next_data()": "._next_data",
    "class Tensor(Base):\n    def f(self):\n        return self._make_subclass()": "._make_subclass",
    "vars(scheduler).get('_schedulers', ())": "._schedulers",
    "core.__dict__['_loss_function']": "._loss_function",
    "storage._cdata": "._cdata",
    "import ctypes": "ctypes",
    "from ctypes import c_float": "ctypes.c_float",
    "importlib.import_module('ctypes')": "ctypes",
    "array.ctypes.data": ".ctypes",
    "tensor.data_ptr()": ".data_ptr",
    "[one for one in map(attrgetter('data_ptr'), tensors)]": ".data_ptr",
    "array.__array_interface__['data']": ".__array_interface__",
    "place = id(owner) + 16": "id()",
    "string_at(id(owner), 8)": "id()",
    "f'{id(owner):x}'": "id()",
    "sorted(tensors, key=address_of(id))": "id()",
}


@pytest.mark.parametrize("source", FOUND)
def test_a_planted_use_is_found(source: str) -> None:
    assert FOUND[source] in {name for _, name in uses_in({"planted.py": source})}


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.optim.AdamW(parameters).step()",
        "from trainwright._types import Batch",
        "from ._private import thing",
        "import os\nos._exit(1)",
        "import threading\ngetattr(threading, '_register_atexit', None)",
        "class A:\n    def __init__(self):\n        self._kept = 1\ndef f(a):\n    return a._kept",
        "class A:\n    def _hook(self): ...\ngetattr(a, '_hook')",
        "vars(self)['_n_gpu'] = 1\nargs._n_gpu",
        "name.endswith('_runtime')",
        "getattr(args, f'{kind}_strategy')",
        '"""`torch._C` in a docstring."""',
        "point._replace(x=1)._asdict()",
        "torch.__version__, model.__class__, _",
        "memo[id(tensor)] = 1",
        "seen = {id(one) for one in tensors}\nid(other) in seen",
        "known.get(id(tensor)), known.setdefault((id(a), id(b)), 0)",
        "kept = {id(one): one for one in tensors} | {id(other): other}",
        "len(set(map(id, tensors))) == 1",
        "Row(id=id, name=name)",
    ],
)
def test_other_uses_are_left_alone(source: str) -> None:
    assert uses_in({"planted.py": source}) == {}
