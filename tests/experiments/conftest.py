"""A small text for the tests of the lab."""
import pytest


@pytest.fixture(scope="session")
def notes(tmp_path_factory):
    """A small text with lines, in which names come back, as a file."""
    path = tmp_path_factory.mktemp("experiments") / "notes.txt"
    path.write_text("".join(f"n{i // 9}_a {'a' * (i % 5)}\n" for i in range(4400)))
    return path
