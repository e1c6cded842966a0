"""TensorFlow's first look for devices. Can be imported while TensorFlow is half imported."""

from __future__ import annotations

from raytf.compat.versions import uses


@uses("tensorflow.python.eager.context:Context._initialize_physical_devices")
def look_for_devices(around):
    """Has the first look for devices of this process made within a context: it prints, and nothing public makes it.

    Args:
        around: gives a context manager.
    """
    from tensorflow.python.eager.context import Context

    original = Context._initialize_physical_devices

    def look(self, reinitialize=False):
        Context._initialize_physical_devices = original
        with around():
            return original(self, reinitialize)

    Context._initialize_physical_devices = look
