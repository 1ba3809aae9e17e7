"""Where training pairs come from: extraction, deduplication and the split."""
