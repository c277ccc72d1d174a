"""The former place of `ExpertLoad`."""
