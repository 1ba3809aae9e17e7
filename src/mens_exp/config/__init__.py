"""Typed configuration: one schema module per group, validation, and composition by Hydra."""
