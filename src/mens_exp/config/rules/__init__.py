"""Rules over the typed values of one group each; `validate` runs them all."""
