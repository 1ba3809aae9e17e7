"""From encoded documents to batches: packing, order, the datamodule."""
