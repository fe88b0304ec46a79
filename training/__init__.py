"""Parts of a full training run that no lesson teaches (training/README.md)."""
