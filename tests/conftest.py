"""What all tests share: where the lessons are, the marker `slow`, one seed, one thread.

    pytest                        everything that is quick
    pytest -m slow                the rest: whole lessons, run as a reader runs them
    pytest -m "slow or not slow"  both
"""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)  # the tensors are tiny, and sums must not depend on the number of cores


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: runs a whole lesson; left out unless -m asks for it")


def pytest_collection_modifyitems(config, items):
    """Leave slow tests out, unless -m decides or a test is asked for by its name (file::test)."""
    if config.option.markexpr or any("::" in arg for arg in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Every test starts from the same seed, so none depends on those that ran before it."""
    torch.manual_seed(0)
