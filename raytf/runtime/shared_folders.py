"""Checks whether two hosts see the same folder at one path, without writing."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from raytf import procfs

# File systems whose files several hosts see under the same inode numbers. Others belong to one host, and two hosts
# copied from one image may have folders of equal path, device and inode.
_SHARED = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "afs", "fuse.glusterfs", "fuse.ceph-fuse")
)


@dataclass(frozen=True)
class Folder:
    """A folder as a process sees it, without properties that change with its content, such as times.

    Args:
        path: Absolute path.
        device, inode: Its file system on this host, and its inode there.
        boot: Boot id of this host's kernel, which containers share, as they share device numbers.
        shared: Type and source of its file system if several hosts may see it, else None.
    """

    path: str
    device: int
    inode: int
    boot: str
    shared: tuple[str, str] | None

    def is_same(self, other: Folder) -> bool:
        """Returns whether two processes, each on some host, see the same files."""
        if (self.path, self.inode) != (other.path, other.inode):
            return False
        same_host = self.boot == other.boot and self.device == other.device
        return same_host or (self.shared is not None and self.shared == other.shared)


def describe_folder(path: str) -> Folder:
    """Returns the folder at a path; raises OSError if it does not exist."""
    status = os.stat(path)
    return Folder(
        path=os.path.abspath(path),
        device=status.st_dev,
        inode=status.st_ino,
        boot=procfs.boot_id() or os.uname().nodename,
        shared=is_shared(procfs.mounts(), status.st_dev),
    )


def exists_as(other: Folder) -> bool:
    """Returns whether this process sees another process's folder at the same path."""
    with contextlib.suppress(OSError):
        return describe_folder(other.path).is_same(other)
    return False


def is_shared(mounts: str, device: int) -> tuple[str, str] | None:
    """Returns a device's type and source from `/proc/self/mountinfo` if several hosts may see it, else None; pure."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        mount, _, system = line.partition(" - ")
        kind, source = [*system.split(), "", ""][:2]
        if mount.split()[2:3] == [number] and kind in _SHARED:
            return kind, source
    return None
