"""UserError and the exit codes of all commands."""

EXIT_OK = 0
EXIT_FAILED = 1  # a run or a check failed, data is damaged, or a bug in seedbed
EXIT_USER = 2  # something that the user can fix; the message says how
EXIT_WARNING = 3  # checks found warnings and no errors
EXIT_STALLED = 75  # a step did not end in time; the run can be resumed
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141  # the reader of the output closed the pipe


class UserError(ValueError):
    """What is wrong and what to do about it, in one or two lines; the command line exits with status 2."""
