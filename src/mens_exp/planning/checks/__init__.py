"""Preflight file checks, one module for each config group."""
