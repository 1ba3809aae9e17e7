"""Sources of training pairs: extraction, generation, deduplication and the split."""
