"""The steps of task=corpus, each a function from files of rows to files of rows."""
