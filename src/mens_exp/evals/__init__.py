"""Evaluation: suites, generation, grading, KPIs, and the comparison of runs."""
