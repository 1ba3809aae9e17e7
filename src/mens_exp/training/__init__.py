"""Training: the LightningModule, the construction of a run, and the callbacks."""
