"""Suites, generation and the KPIs of a scorecard."""
