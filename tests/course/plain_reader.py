"""The model as lesson 5 has it: here it trains, is evaluated and generates with your functions.

In the whole project this file holds a faster form of the same model, which would show solutions.
"""


def prepare(model, plain=False):
    """Return what evaluates and samples: the model as it is."""
    return model
