"""Adapters' initialisation and dropout, keyed by layer name."""
