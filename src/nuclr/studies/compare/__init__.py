"""Compare methods on the same data with the same budget and the same size of tuning grid; see `study`."""
