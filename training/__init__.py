"""What train.py trains: sizes by name."""
