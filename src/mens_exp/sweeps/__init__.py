"""Sweeps: many runs of one command, each in a process of its own."""
