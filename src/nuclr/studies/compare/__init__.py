"""Methods against one another: the same data, budget and size of the tuning grid for each; see `study`."""
