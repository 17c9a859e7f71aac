"""Runs a script and ends with its parent: `python guard.py main.py ARGS...`.

The parent holds the other end of standard input and never writes to it. When the parent stops the
server, or dies in whatever way (Ctrl-C, kill -9, a closed terminal), the pipe closes and this process
exits, so no server is ever left behind. It works the same on Linux, macOS and Windows.
"""

import os
import runpy
import sys
import threading


def exit_with_parent(pipe: int) -> None:
    while True:
        try:
            if not os.read(pipe, 1):
                break
        except OSError:
            break
    os._exit(0)


if __name__ == "__main__":
    # the script sees an empty standard input; only the guard reads the pipe
    held = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    threading.Thread(target=exit_with_parent, args=(held,), daemon=True).start()
    script = os.path.abspath(sys.argv[1])
    sys.argv = [script, *sys.argv[2:]]
    # the script's folder takes the place of this file's (which an embedded Python has not put there)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.path.dirname(script), *(entry for entry in sys.path if os.path.abspath(entry) != here)]
    runpy.run_path(script, run_name="__main__")
