"""The command line, called in this process."""

import json
import shlex

import pytest

from phaze_fast.cli.main import main


@pytest.fixture
def run(capsys):
    """Run a command line, with more words as they are; exit code, standard output and error."""

    def call(line, *words):
        code = main([*shlex.split(str(line)), *map(str, words)])
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
