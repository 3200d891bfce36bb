"""The error for a row of a data set that nothing can be learned from."""


class InvalidRow(Exception):
    """What is wrong with the row, after `row 3 of dataset ...`; `hint` names the way out."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint
