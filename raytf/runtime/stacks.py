"""The Python stack of a process that does not answer, read from another process of its host by py-spy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from raytf import timeouts

# Limit of lines: a worker has many threads.
_LINES = 120


def stack_of(pid: int) -> str:
    """Returns the stacks of a process of this host, even a stopped one, or the reason why they are unknown.

    py-spy is installed with raytf. It reads another process' memory, which requires the right to trace it. In a
    container this is the capability SYS_PTRACE, elsewhere the same user and `kernel.yama.ptrace_scope` 0.
    """
    next_to_python = os.path.join(os.path.dirname(sys.executable), "py-spy")
    program = next_to_python if os.path.exists(next_to_python) else shutil.which("py-spy")
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
    lines = "\n\n".join([head, *sorted(threads, key=len, reverse=True)]).splitlines()  # the training thread's is long
    more = [f"... {len(lines) - _LINES} lines more"] if len(lines) > _LINES else []
    return "\n".join([*lines[:_LINES], *more])
