"""A config-driven laboratory for trustworthy QLoRA experiments."""

__version__ = "0.2.0"
