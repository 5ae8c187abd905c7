"""A run on disk: its settings, folder, checkpoints and components, and `Run`, which opens it for every command."""
