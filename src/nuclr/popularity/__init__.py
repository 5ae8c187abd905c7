"""Exact popularity."""
