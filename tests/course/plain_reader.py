"""Run lesson 5's model as it is: training, evaluation and generation call your functions.

The complete project has an optimized model here, which would reveal solutions.
"""


def reader_of(model, plain=False):
    """Return the model that evaluates and samples, which is the given model itself."""
    return model
