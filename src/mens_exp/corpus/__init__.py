"""Where training pairs come from: extraction, generation, deduplication and the split."""
