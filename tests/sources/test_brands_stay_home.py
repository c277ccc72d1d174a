"""No backend is named outside `engine/`, `config/` and `distributed/`: neither in identifiers nor in strings."""

import re

import pytest

from .parsed import files, text, words_in

AT_HOME = ("engine", "config", "distributed")

BRAND = re.compile(r"(?<![a-z])(deep_?speed|fsdp\d*|ddp|xla|data_?parallel)(?![a-z])")

# The published surface asks for these names.
DEMANDED = {
    "__init__.py": {
        "FSDPOption",
        "FSDP_MODEL_NAME",
        "ShardedDDPOption",
        "deepspeed",
        "integrations.deepspeed",
        "integrations.fsdp",
    },
    "compat/__init__.py": {"deepspeed", "integrations.deepspeed", "integrations.fsdp"},
    "run/checks.py": {"_defer_fsdp_gradient_reduction"},
    "compat/helpers.py": {"ShardedDDPOption", "_ShardedDDPOption", "FairScale is not used; write fsdp=True"},
    "trainer.py": {
        "is_deepspeed_enabled",
        "is_fsdp_enabled",
        "deepspeed",
        "is_fsdp_xla_enabled",
        "is_fsdp_xla_v1_enabled",
        "is_fsdp_xla_v2_enabled",
        "_defer_fsdp_gradient_reduction",
        "deepspeed_plugin",
        "fsdp_plugin",
    },
    "_types.py": {"FSDP_MODEL_NAME", "pytorch_model_fsdp"},
    "support/patches.py": {"optimize_ddp"},  # a setting of torch's compiler
    "optim/optimizer_table.py": {"adamw_torch_xla", "torch_xla", "torch_xla.amp.syncfree:AdamW"},  # a row of a package
}


def words_of(name: str) -> str:
    """`FSDPOption`, `is_fsdp2_enabled` and `deepspeed` in one spelling: lower case, words apart."""
    apart = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", apart).lower()


def names_a_brand(word: str) -> bool:
    return BRAND.search(words_of(word)) is not None


def brands_in(source: str, allowed: frozenset[str] = frozenset()) -> list[tuple[int, str]]:
    return [(line, word) for line, word in words_in(source) if names_a_brand(word) and word not in allowed]


def test_no_brand_is_named() -> None:
    found = {
        name: brands
        for name, path in files().items()
        if not name.startswith(AT_HOME) and (brands := brands_in(text(path), frozenset(DEMANDED.get(name, ()))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "if args.fsdp: pass",
        "from torch.nn.parallel import DistributedDataParallel",
        "import deepspeed",
        "x = hasattr(state, 'deepspeed_plugin')",
        "def is_fsdp2_enabled(): ...",
        "raise ValueError('not with FSDP')",
        "isinstance(model, DataParallel)",
        "f(ddp=True)",
        "uses_torch_xla = 1",
        "class DeepSpeedThing: ...",
        "error = f'{x} under DDP'",
    ],
)
def test_a_planted_brand_is_found(source: str) -> None:
    assert brands_in(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""Also under FSDP."""',
        "x = 1  # DDP does this too",
        'class A:\n    x: int\n    """As DeepSpeed has it."""',
        "add_path = relaxed = 'reddpaths'",
        "def f():\n    '''xla'''",
    ],
)
def test_prose_and_lookalikes_are_left_alone(source: str) -> None:
    assert brands_in(source) == []
