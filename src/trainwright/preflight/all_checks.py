"""Every file that brings checks, in the order in which they are shown."""

from __future__ import annotations

from trainwright.preflight import (
    data_checks,
    loss_checks,
    parameter_checks,
    system_checks,
    token_checks,
    trial_step_checks,
)
from trainwright.preflight.check_registry import CHECKS

__all__ = [
    "CHECKS",
    "data_checks",
    "loss_checks",
    "parameter_checks",
    "system_checks",
    "token_checks",
    "trial_step_checks",
]
