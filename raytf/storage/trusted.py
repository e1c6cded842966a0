"""Whether nobody else can have written what is about to be unpickled, by owners and modes of files."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import warnings

from raytf.errors import ConfigError


def check_own(folder: str) -> None:
    """Refuses a folder of pickles that somebody else can write to: whoever does so runs code in this process.

    Its files and folders, and those above it, must belong to this user or to root and be writable for nobody else. A
    folder above may be writable where it is sticky, as /tmp is; a user's own group is nobody else. Of storage that is
    not mounted here (a URI) nothing can be told: that is warned of.

    Args:
        folder: a path from the root, or a URI.

    Raises:
        ConfigError: somebody else can write there.
    """
    if "://" in folder:
        warnings.warn(
            f"A sweep's state is read as pickles from {folder!r}: whoever can write there can run code in this process",
            stacklevel=3,
        )
        return
    folder = os.path.realpath(folder)
    above = folder
    while (parent := os.path.dirname(above)) != above:
        above = parent
        _check(above, os.lstat(above), stat.S_ISVTX)
    for place, _, files in os.walk(folder):
        _check(place, os.lstat(place))
        for name in files:
            path = os.path.join(place, name)
            _check(path, os.stat(path))


def _check(path: str, seen: os.stat_result, allowed: int = 0) -> None:
    shared = stat.S_IWOTH if _is_of_one(seen) else stat.S_IWOTH | stat.S_IWGRP
    writable = seen.st_mode & shared and not seen.st_mode & allowed
    if seen.st_uid in (os.geteuid(), 0) and not writable:
        return
    who = "others than its owner" if writable else f"the user of number {seen.st_uid}"
    raise ConfigError(
        "A sweep's state is kept as pickles, and read only where nobody else can write",
        f"{path!r}, to which {who} can write",
        "Take their access away (chmod -R go-w, chown -R), if you trust what is there; or start anew",
    )


def _is_of_one(seen: os.stat_result) -> bool:
    """Whether the group is its owner's own, as Debian's and Red Hat's users have one (umask 002)."""
    try:
        user, group = pwd.getpwuid(seen.st_uid), grp.getgrgid(seen.st_gid)
    except KeyError:
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
