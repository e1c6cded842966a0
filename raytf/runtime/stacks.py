"""The Python stack of a process that does not answer, taken from another process of its host by py-spy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from raytf import timeouts

# Threads of a worker are many; of each the innermost lines.
_LINES = 120


def of(pid: int) -> str:
    """The stacks of a process of this host, or why they cannot be told; it may be stopped.

    py-spy comes with Ray. It reads another process' memory, which takes the right to trace it: in a container that is
    the capability SYS_PTRACE, elsewhere the same user and `kernel.yama.ptrace_scope` 0.
    """
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    program = beside if os.path.exists(beside) else shutil.which("py-spy")
    if program is None:
        return "its stack is not known: py-spy is not installed on its host (pip install py-spy)"
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeouts.get().stack_dump, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its stack is not known: py-spy failed ({type(error).__name__})"
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return (
            f"its stack is not known: py-spy may not look at it ({lines[-1].strip() if lines else 'no reason given'})"
        )
    head, *threads = done.stdout.split("\n\n")
    lines = "\n\n".join([head, *sorted(threads, key=len, reverse=True)]).splitlines()  # the training's is a long one
    more = [f"... {len(lines) - _LINES} lines more"] if len(lines) > _LINES else []
    return "\n".join([*lines[:_LINES], *more])
