"""The metadata of a distributed checkpoint of an older torch names classes where they were then."""

from __future__ import annotations

import io
import pickle

import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OlderProperties
from torch.distributed.checkpoint.metadata import TensorProperties

from trainwright.engine.sharded_state import _Unpickler


def test_properties_in_the_older_place_are_read_as_those_of_now() -> None:
    written = pickle.dumps(OlderProperties(dtype=torch.float16, memory_format=torch.channels_last))
    found = _Unpickler(io.BytesIO(written)).load()
    assert found == TensorProperties(dtype=torch.float16, memory_format=torch.channels_last)
