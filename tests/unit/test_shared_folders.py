"""A folder is distinguished from another of the same path, also while files come and go in it."""

import dataclasses
import os

from raytf.runtime import shared_folders

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:52 / /home rw,relatime shared:30 - nfs4 server:/export/home rw,vers=4.2
31 22 0:53 /sub /data rw - overlay overlay rw,lowerdir=/a
"""
FOLDER = shared_folders.Folder("/home/a", os.makedev(0, 52), 77, "boot-a", ("nfs4", "server:/export/home"))


def test_files_come_and_go(tmp_path):
    before = shared_folders.describe_folder(tmp_path)
    (tmp_path / "result").write_text("1")
    assert shared_folders.exists_as(before) and shared_folders.describe_folder(tmp_path) == before


def test_another_folder_of_the_same_path(tmp_path):
    before = shared_folders.describe_folder(tmp_path)
    tmp_path.rename(tmp_path.parent / "moved")
    assert not shared_folders.exists_as(before)
    tmp_path.mkdir()
    assert not shared_folders.exists_as(before)


def test_what_hosts_share():
    assert shared_folders.is_shared(MOUNTS, os.makedev(0, 52)) == ("nfs4", "server:/export/home")
    assert (
        shared_folders.is_shared(MOUNTS, os.makedev(8, 1)) is None
        and shared_folders.is_shared(MOUNTS, os.makedev(0, 53)) is None
    )
    assert shared_folders.is_shared("", 1) is None


def test_numbers_of_devices_belong_to_a_kernel():
    elsewhere = dataclasses.replace(FOLDER, boot="boot-b", device=os.makedev(0, 61))
    assert FOLDER.is_same(elsewhere), "NFS has another number of device on each host"
    assert not FOLDER.is_same(dataclasses.replace(elsewhere, inode=78))
    assert not FOLDER.is_same(dataclasses.replace(elsewhere, shared=("nfs4", "server:/export/other")))
    local = dataclasses.replace(FOLDER, shared=None)
    assert local.is_same(local)
    assert not local.is_same(dataclasses.replace(local, boot="boot-b")), "two hosts copied from one image"
    assert not local.is_same(dataclasses.replace(local, device=os.makedev(0, 53))), "two containers of a host"
