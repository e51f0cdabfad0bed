"""The command line, called in this process."""

import json

import pytest

from phaze_fast.cli.main import main


@pytest.fixture
def run(capsys):
    """Run a command; exit code, standard output and standard error."""

    def call(*words):
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def document(run):
    """Run a command that succeeds; what it prints as JSON."""

    def call(*words):
        code, out, err = run(*words, "--json")
        assert code == 0, err
        return json.loads(out)

    return call


@pytest.fixture
def refused(run):
    """Run a command with bad input; the one line that it says."""

    def call(*words):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1, err
        assert err.startswith("phaze-fast: ")
        assert "Traceback" not in err
        return err

    return call
