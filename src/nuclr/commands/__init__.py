"""Commands of the command line, one file each; heavy imports happen inside the functions, so that --help is quick."""
