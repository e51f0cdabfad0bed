"""Functions called in forked children, with limits of time and memory."""

import os
import resource
import select
import signal
import time

ENDLESS_S = 1e6


def in_a_child(call, seconds=ENDLESS_S, **limits):
    """Call a function that returns text in a forked child: the text, and the child's exit status.

    The child is killed after so many seconds; `limits` are those of `resource`, such as ``cpu``.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        status = 0
        try:
            for name, most in limits.items():
                resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (most, most))
            said = call()
        except BaseException as error:
            said, status = f"raised {type(error).__name__}: {error}", 4
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(said.encode(errors="replace"))
        os._exit(status)
    os.close(writing)
    deadline, parts = time.monotonic() + seconds, []
    while True:
        if not select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os.kill(child, signal.SIGKILL)
            break
        parts.append(os.read(reading, 1 << 16))
        if not parts[-1]:
            break
    os.close(reading)
    return b"".join(parts).decode(errors="replace"), os.waitpid(child, 0)[1]
