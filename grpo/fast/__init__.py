"""Faster ways to run a model and to sample from it, with the same numbers up to rounding."""
