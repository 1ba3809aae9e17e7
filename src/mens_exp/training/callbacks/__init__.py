"""Training callbacks: one callback a file, none importing another."""
