"""Preflight checks of files, one module for each config group."""
