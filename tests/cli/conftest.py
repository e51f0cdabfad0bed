"""The command line, called in this process."""

import pytest

from phaze_fast.cli.main import main


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return call
