"""A user's mistake, as every program here reports it: one sentence, exit status 2."""


class UserError(ValueError):
    """The message says what is wrong and what to do.  A defect of ours keeps its traceback."""
