"""Recognizes start-up lines of TensorFlow's native code. As a program it copies all other lines to its output.

Imports nothing of raytf, as each process that imports TensorFlow starts this program.
"""

from __future__ import annotations

import re

_NATIVE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|To enable the following instructions: "
    r"|\S+ \S+ +\d+ (?:"
    r"port\.cc:\d+\] oneDNN custom operations are on"
    r"|cudart_stub\.cc:\d+\] Could not find cuda drivers"
    r"|cpu_feature_guard\.cc:\d+\]"
    r"|cuda_(?:dnn|fft|blas)\.cc:\d+\] Unable to register cu\w+ factory"
    r"|computation_placer\.cc:\d+\] computation placer already registered"
    # no driver, or no visible device; other failures of a GPU are shown
    r"|cuda_\w+\.cc:\d+\] failed call to cuInit: .*(?:\(303\)|CUDA_ERROR_NO_DEVICE)"
    r")"
)


def is_native(line: str) -> bool:
    """Returns whether a line is a start-up line of TensorFlow's native code."""
    return _NATIVE.match(line) is not None


def _copy() -> None:
    """Copies standard input to standard output, without start-up lines."""
    with open(0, "rb", buffering=0) as lines, open(1, "wb", buffering=0) as out:
        remaining = b""
        while text := lines.read(1 << 16):
            *whole, remaining = re.split(rb"(?<=[\n\r])", remaining + text)
            out.write(b"".join(line for line in whole if not is_native(line.decode(errors="replace"))))
        if remaining and not is_native(remaining.decode(errors="replace")):
            out.write(remaining)


if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when its writer ends
    _copy()
