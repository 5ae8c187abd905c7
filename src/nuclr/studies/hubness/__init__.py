"""`nuclr hubness`: which items of a search are hubs, and what correcting their popularity changes."""
