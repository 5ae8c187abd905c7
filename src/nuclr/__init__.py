"""Contrastive learning on paired data that works at small batch sizes, and tells which data is popular."""

__version__ = "0.1.0"
