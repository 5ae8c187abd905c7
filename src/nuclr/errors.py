"""What a user did wrong, said in a line or two; the command line prints it and ends with status 2."""


class UserError(ValueError):
    """A mistake in the input, a file or an option. The message names it and how to mend it."""
