"""Quality measures of a corpus, computed on a stream of rows with a fixed amount of memory."""
