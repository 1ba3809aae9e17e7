"""What preflight asks of the files of one group each."""
