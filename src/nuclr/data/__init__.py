"""Pairs on disk -> numbered samples."""
