"""What the sweep of these tests leaves where nothing goes wrong."""

import pytest

from faults.sweeps import sweep


@pytest.fixture(scope="session")
def undisturbed(stage, tmp_path_factory):
    """The folder of an undisturbed sweep."""
    place = tmp_path_factory.mktemp("undisturbed")
    code, said = stage.run(sweep(place / "out"), place / "log")
    assert code == 0, said
    return place / "out"
