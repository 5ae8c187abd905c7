"""Which samples of an embedding file are popular: from the file to a table that people can read."""
