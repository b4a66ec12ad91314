"""One process that has loaded everything, for all tests of a worker."""

import pytest

from faults.stage import Stage


@pytest.fixture(scope="session")
def stage():
    with Stage() as made:
        yield made
