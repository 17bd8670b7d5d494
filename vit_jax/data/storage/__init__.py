"""Storage of data sets and of results in files."""
