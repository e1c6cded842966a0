"""Pickles are read only where nobody else can have written them."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd

import pytest

from raytf.errors import ConfigError
from raytf.storage import pickle_safety
from raytf.storage.pickle_safety import check_owner


@pytest.fixture
def folder(tmp_path):
    """/…/sweep/trial/result.pkl, for this user alone."""
    trial = tmp_path / "sweep" / "trial"
    trial.mkdir(parents=True)
    (trial / "result.pkl").write_bytes(b"")
    for path in (tmp_path / "sweep", trial):
        path.chmod(0o755)
    (trial / "result.pkl").chmod(0o644)
    return tmp_path / "sweep"


def check(folder):
    check_owner(str(folder))


def test_what_is_ones_own_is_read(folder):
    check(folder)


@pytest.mark.parametrize("bits", [0o020, 0o002])
@pytest.mark.parametrize("place", [".", "trial", "trial/result.pkl", ".."])
def test_what_others_can_write_is_refused(folder, place, bits, monkeypatch):
    """The folder, one in it, a file, and the folder above, in which another could take its place."""
    monkeypatch.setattr(pickle_safety, "_is_private_group", lambda seen: False)
    path = os.path.realpath(folder / place)
    refused = rf"A sweep's state .*received: '{path}', to which others .*chmod -R go-w"
    os.chmod(path, os.stat(path).st_mode | bits)
    try:
        with pytest.raises(ConfigError, match=refused):
            check(folder)
    finally:
        os.chmod(path, os.stat(path).st_mode & ~bits)


def test_a_group_of_one_is_no_other(folder, monkeypatch):
    """Users of Debian have a group of their own, and a umask that lets it write."""
    user = pwd.getpwuid(os.geteuid())
    for members, refused in (([], False), ([user.pw_name], False), (["another"], True)):
        group = grp.struct_group((user.pw_name, "x", user.pw_gid, members))
        monkeypatch.setattr(grp, "getgrgid", lambda gid, group=group: group)
        os.chown(folder, -1, user.pw_gid)
        os.chmod(folder, 0o775)
        with pytest.raises(ConfigError) if refused else contextlib.nullcontext():
            check(folder)


def test_a_sticky_folder_above_is_right(folder):
    os.chmod(folder.parent, 0o1777)
    check(folder)
    os.chmod(folder.parent, 0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_another_user_owns_is_refused(folder):
    os.chown(folder / "trial" / "result.pkl", 12345, -1)
    with pytest.raises(ConfigError, match=r"result.pkl', to which the user of number 12345 can write"):
        check(folder)


def test_a_link_to_what_others_can_write_is_refused(folder, tmp_path):
    (tmp_path / "other").write_bytes(b"")
    os.chmod(tmp_path / "other", 0o666)
    (folder / "linked.pkl").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="linked.pkl"):
        check(folder)


def test_a_uri_is_warned_of():
    with pytest.warns(UserWarning, match="anyone who can write there can run code"):
        check_owner("s3://bucket/sweep")
