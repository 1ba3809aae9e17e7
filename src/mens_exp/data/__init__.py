"""Encoded documents to batches: packing, order, the datamodule."""
