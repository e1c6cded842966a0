"""Files of runs on disks and object stores: run folders, locks, checkpoint files, and safe readers."""
