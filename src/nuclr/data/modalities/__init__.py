"""How samples of each modality are read and augmented."""
