"""Files of runs, on disks and object stores: folders, locks, checkpoints' files, and what may be read of them."""
