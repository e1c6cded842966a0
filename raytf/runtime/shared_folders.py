"""Whether two hosts mean the same folder by one path. Nothing is written for it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from raytf import procfs

# File systems of which several hosts see the same files, under the same numbers. Others are of one host, and those of
# two hosts that were copied from one image have folders of the same path, device and inode.
_SHARED = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "afs", "fuse.glusterfs", "fuse.ceph-fuse")
)


@dataclass(frozen=True)
class Folder:
    """A folder as a process sees it. What changes with its content, such as a time, is no part of it.

    Args:
        path: absolute.
        device, inode: its file system on this host, and its number there.
        boot: id of the boot of this host's kernel, which containers share, as they share numbers of devices.
        shared: type and source of its file system if several hosts may see that, else None.
    """

    path: str
    device: int
    inode: int
    boot: str
    shared: tuple[str, str] | None

    def is_same(self, other: Folder) -> bool:
        """Whether two processes, each on some host, mean the same files."""
        if (self.path, self.inode) != (other.path, other.inode):
            return False
        here = self.boot == other.boot and self.device == other.device
        return here or (self.shared is not None and self.shared == other.shared)


def folder(path: str) -> Folder:
    """The folder at a path; raises OSError if there is none."""
    found = os.stat(path)
    return Folder(
        path=os.path.abspath(path),
        device=found.st_dev,
        inode=found.st_ino,
        boot=procfs.boot_id() or os.uname().nodename,
        shared=shared(procfs.mounts(), found.st_dev),
    )


def is_seen(other: Folder) -> bool:
    """Whether this process sees a folder of another one, at the same path."""
    with contextlib.suppress(OSError):
        return folder(other.path).is_same(other)
    return False


def shared(mounts: str, device: int) -> tuple[str, str] | None:
    """Type and source of a device in the text of `/proc/self/mountinfo`, if several hosts may see it; pure."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        place, _, system = line.partition(" - ")
        kind, source = [*system.split(), "", ""][:2]
        if place.split()[2:3] == [number] and kind in _SHARED:
            return kind, source
    return None
