"""Initialization and dropout of adapters, keyed by layer name."""
