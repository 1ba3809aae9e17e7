"""Parts of a checkpoint: safetensors headers, model directories, layer names."""
