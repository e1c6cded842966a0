"""Who the processes of a run are, where they fit, what environment they read, and whether they live."""
