"""Names that scripts import from transformers' modules: the same line works with the package's name alone changed."""

from __future__ import annotations

import importlib

import pytest

import trainwright

from .._support.subprocesses import run_python

PATHS = {
    "hyperparameter_search": "default_hp_search_backend ALL_HYPERPARAMETER_SEARCH_BACKENDS",
    "utils": "logging is_peft_available is_wandb_available WEIGHTS_NAME",
    "utils.notebook": "NotebookProgressCallback NotebookTrainingTracker",
    "deepspeed": "HfDeepSpeedConfig is_deepspeed_zero3_enabled deepspeed_config",
    "modelcard": "TrainingSummary",
    "pytorch_utils": "Conv1D",
    "integrations.fsdp": "is_fsdp_managed_module",
    "integrations.neftune": "activate_neftune",
    "integrations.peft": "PeftAdapterMixin",
    "integrations.liger": "apply_liger_kernel",
    "integrations.tpu": "tpu_spmd_dataloader",
    "data": "DataCollatorWithPadding DataCollatorForSeq2Seq DataCollatorForPermutationLanguageModeling "
    "DefaultDataCollator default_data_collator",
}


@pytest.mark.parametrize("path", PATHS)
def test_names_can_be_imported_from_the_originals_path(path: str) -> None:
    module = importlib.import_module(f"trainwright.{path}")
    for name in PATHS[path].split():
        value = getattr(module, name)
        assert value is getattr(trainwright, name, value)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


@pytest.mark.process
def test_collators_of_the_data_package_are_loaded_when_they_are_asked_for() -> None:
    script = (
        "import sys; from trainwright.data import columns, sources; "
        "print([n for n in sys.modules if n.startswith('transformers')])"
    )
    assert run_python("-c", script).stdout.strip() == "[]"
