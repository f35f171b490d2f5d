"""The parts of the trainer: one module for each."""
