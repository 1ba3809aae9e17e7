"""Rules over typed values, one group per rule; `validate` runs them all."""
