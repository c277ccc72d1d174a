"""A stand-in accelerator: devices "accel:0" and "accel:1" on torch's PrivateUse1 key, in Python, in the CPU's memory.

Tensors on it are plain tensors of torch with a device, storages and addresses of their own. Operations compute by the
CPU's kernels, so that two trainers can be compared bit by bit, and everything that matters on an accelerator is noted:

- `COUNTS` has the waits of the host, the copies in both directions, the pins and the launches;
- an operation that mixes devices raises, as on any accelerator;
- each device has a generator of its own, which a checkpoint must keep;
- `limit_memory` makes an allocation raise `torch.OutOfMemoryError`;
- `streams.py` orders the operations of streams and events: one that reads what another stream still writes raises;
- memory that nobody wrote holds NaN.

What is changed is of the whole process, so `install()` belongs in a process of its own. torch's function for backends
in Python, which it uses, is experimental.
"""

from .counts import COUNTS, Counts
from .device import NAME, limit_memory, peak_bytes, used_bytes
from .install import install
from .streams import MissingWaitError

__all__ = ["COUNTS", "NAME", "Counts", "MissingWaitError", "install", "limit_memory", "peak_bytes", "used_bytes"]
