"""Tasks: one module per task, and the run that each task opens."""
