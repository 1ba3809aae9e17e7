"""Training callbacks: one per file; callbacks do not import each other."""
