"""What a real run needs and no lesson teaches."""
