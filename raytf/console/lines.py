"""The lines that a run prints for its user, such as its folder and its result. Messages are logged, see `logs.py`."""


def print_line(line: str) -> None:
    """Prints a line on stdout at once, also where that is a file or a pipe."""
    print(line, flush=True)
