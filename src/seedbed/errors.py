"""The one error a user may cause: shown as one or two lines, never as a traceback."""


class UserError(ValueError):
    """What is wrong and what to do about it, in one or two lines; the command line exits with status 2."""
