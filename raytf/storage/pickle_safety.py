"""Checks by owners and modes of files that no other user can have written a pickle."""

from __future__ import annotations

import grp
import os
import pwd
import stat

from raytf.errors import ConfigError
from raytf.logs import warn_user


def check_owner(folder: str) -> None:
    """Refuses a folder of pickles that another user can write to, as its writers run code in this process.

    The folder, its content and the folders above it must belong to this user or to root. No other user may write to
    them. A folder above may be writable if it is sticky, as /tmp is. A user's own group counts as the user. Storage
    that is not mounted (a URI) cannot be checked: it raises a warning.

    Args:
        folder: An absolute path, or a URI.

    Raises:
        ConfigError: Another user can write there.
    """
    if "://" in folder:
        warn_user(
            f"A sweep's state is read as pickles from {folder!r}: anyone who can write there can run code in this "
            "process. Resume only from a folder that you trust",
        )
        return
    folder = os.path.realpath(folder)
    ancestor = folder
    while (parent := os.path.dirname(ancestor)) != ancestor:
        ancestor = parent
        _check(ancestor, os.lstat(ancestor), stat.S_ISVTX)
    for directory, _, files in os.walk(folder):
        _check(directory, os.lstat(directory))
        for name in files:
            path = os.path.join(directory, name)
            _check(path, os.stat(path))


def _check(path: str, seen: os.stat_result, allowed: int = 0) -> None:
    shared = stat.S_IWOTH if _is_private_group(seen) else stat.S_IWOTH | stat.S_IWGRP
    writable = seen.st_mode & shared and not seen.st_mode & allowed
    if seen.st_uid in (os.geteuid(), 0) and not writable:
        return
    writers = "others than its owner" if writable else f"the user of number {seen.st_uid}"
    raise ConfigError(
        "A sweep's state is kept as pickles, and read only where nobody else can write",
        f"{path!r}, to which {writers} can write",
        "Take their access away (chmod -R go-w, chown -R), if you trust what is there; or start from scratch",
    )


def _is_private_group(seen: os.stat_result) -> bool:
    """Returns whether the group is its owner's private group, as on Debian and Red Hat (umask 002)."""
    try:
        user, group = pwd.getpwuid(seen.st_uid), grp.getgrgid(seen.st_gid)
    except KeyError:
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
