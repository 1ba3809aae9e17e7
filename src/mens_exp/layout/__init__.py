"""What a checkpoint is made of: safetensors headers, model directories, layer names."""
