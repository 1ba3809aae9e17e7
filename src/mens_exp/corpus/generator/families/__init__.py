"""Templates of tasks, a file for each few themes; `catalogue` lists them all."""
