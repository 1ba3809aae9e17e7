"""Backends: trainable models behind one protocol."""
