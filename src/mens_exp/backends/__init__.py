"""Trained graphs behind one protocol."""
