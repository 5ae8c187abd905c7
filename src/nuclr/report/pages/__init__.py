"""One file per kind of page: what it reads from a folder, and which sections it has."""
