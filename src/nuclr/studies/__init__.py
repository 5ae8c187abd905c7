"""Studies that end in a folder of numbers and figures."""
