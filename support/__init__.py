"""What the lessons use and do not teach: text, the adaptive softmax, checks, progress."""
