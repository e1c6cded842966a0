"""What a test's process gives back to the test, among all else that it prints."""

from __future__ import annotations

import json

_MARK = "answer: "


def give(answer) -> None:
    """In the process: prints an answer that JSON can hold."""
    print(_MARK + json.dumps(answer))


def of(out: str, err: str):
    """In the test: the answer in what the process printed; fails with that if there is none."""
    found = [line for line in out.splitlines() if line.startswith(_MARK)]
    assert found, out + err[-4000:]
    return json.loads(found[0].removeprefix(_MARK))
