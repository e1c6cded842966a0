"""Fingerprints of models, functions, configs and datasets, by which a resumed run is recognized."""
