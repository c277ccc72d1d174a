"""The former place of `ExpertLoad`, which is public as `trainwright.ExpertLoad`."""

from trainwright.capabilities.experts.extension import ExpertLoad

__all__ = ["ExpertLoad"]
