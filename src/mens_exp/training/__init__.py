"""The Lightning module, how a run is built, and what listens to training."""
