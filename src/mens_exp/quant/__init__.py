"""Quantized base weights with bitsandbytes."""
