"""Quantized base weights: one binding for each quantizer."""
