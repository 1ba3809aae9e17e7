"""What a run leaves behind: its directory, its records, and how they are written and read."""
