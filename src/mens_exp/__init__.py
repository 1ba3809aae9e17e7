"""A config-driven laboratory for trustworthy QLoRA experiments."""

__version__ = "0.1.0"
