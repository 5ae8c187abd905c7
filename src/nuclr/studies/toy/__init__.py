"""The toy study: a problem small enough that risk, partition function and popularity are known exactly."""
