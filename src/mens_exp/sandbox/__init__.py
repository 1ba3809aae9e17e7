"""Execution of generated code; no other package executes any."""
