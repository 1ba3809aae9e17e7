"""Losses: pure functions from hidden states to (loss sum, token count)."""
