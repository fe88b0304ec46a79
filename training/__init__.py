"""What a real run of train.py needs, above lesson 5 (training/README.md)."""
