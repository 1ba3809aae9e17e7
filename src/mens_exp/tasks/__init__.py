"""One short recipe a task, and the run that each opens."""
