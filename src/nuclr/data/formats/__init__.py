"""One file per format of pairs on disk."""
