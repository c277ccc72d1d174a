"""Every file that brings checks, in the order in which they are shown."""

from __future__ import annotations

from trainwright.checkup import data, losses, parameters, surroundings, tokens, trials
from trainwright.checkup.table import CHECKS

__all__ = ["CHECKS", "data", "losses", "parameters", "surroundings", "tokens", "trials"]
