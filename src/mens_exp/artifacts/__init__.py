"""The files of a run: its directory, its records, and the code that reads and writes them."""
