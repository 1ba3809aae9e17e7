"""Outputs that leave this machine: archives for a colleague, uploads to the hub."""
