"""Video: SAM 2 of Ultralytics, for parity."""
