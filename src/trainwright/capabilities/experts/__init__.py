"""Experts: how many tokens each of them gets."""
