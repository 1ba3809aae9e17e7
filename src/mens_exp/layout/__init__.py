"""Checkpoint layout: safetensors headers, model directories, layer names."""
