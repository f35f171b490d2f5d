"""The one exception for mistakes that the user can mend."""


class UserError(ValueError):
    """One line for the user: what is wrong, where, and what would be right. The programs print it and exit with 2."""
