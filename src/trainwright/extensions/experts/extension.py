"""The former place of `ExpertLoad`: pickles of a trainer that has one name it. It is public in `trainwright`."""

from trainwright.capabilities.experts.extension import ExpertLoad

__all__ = ["ExpertLoad"]
