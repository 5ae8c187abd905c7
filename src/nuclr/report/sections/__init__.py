"""The sections of a training page, one file per section. Each file has its typed content and the function for it."""
