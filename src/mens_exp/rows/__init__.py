"""Training rows: the schema of one row, and the readers of files of them."""
