"""Pure renderings of a run's JSON records: HTML, Markdown, plots and terminal tables."""
