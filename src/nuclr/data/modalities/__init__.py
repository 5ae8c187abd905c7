"""Kinds of data on a side of a pair: how they are read, prepared and augmented."""
