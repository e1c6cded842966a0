"""Lines that TensorFlow's native code writes whenever it starts; run as a file, it copies all others to its output.

Imports nothing of raytf: it is the program of a process that starts in each process that imports TensorFlow.
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
    # no driver, or no device that may be seen; whatever else is wrong with a GPU is told
    r"|cuda_\w+\.cc:\d+\] failed call to cuInit: .*(?:\(303\)|CUDA_ERROR_NO_DEVICE)"
    r")"
)


def is_native(line: str) -> bool:
    """Whether a line is one of those that TensorFlow's native code writes whenever it starts."""
    return _NATIVE.match(line) is not None


def _copy() -> None:
    """What the filtering process does."""
    with open(0, "rb", buffering=0) as lines, open(1, "wb", buffering=0) as out:
        rest = b""
        while text := lines.read(1 << 16):
            *whole, rest = re.split(rb"(?<=[\n\r])", rest + text)
            out.write(b"".join(line for line in whole if not is_native(line.decode(errors="replace"))))
        if rest and not is_native(rest.decode(errors="replace")):
            out.write(rest)


if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with who writes to it
    _copy()
