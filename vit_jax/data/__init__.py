"""Sources, transforms and batches."""
