"""What a corpus is like, measured on a stream of its rows with a fixed amount of memory."""
