"""Parts that the lessons use but do not teach: text, adaptive softmax, checks, progress."""
