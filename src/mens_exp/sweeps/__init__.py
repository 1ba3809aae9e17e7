"""Sweeps: many runs of one command, each in a separate process."""
