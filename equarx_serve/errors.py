"""The one exception that the command line turns into a sentence.

`UserError` means: what was asked for cannot be done, and the message says what was given, which rule it breaks and
what would be legal. Everything else that is raised is a defect and keeps its traceback. `equarx_serve.collectives`
stands alone and has its own `CollectiveError`.
"""


class UserError(ValueError):
    """Bad input (a file, a size, a name): one clear sentence with the value, the rule and the legal choices."""
