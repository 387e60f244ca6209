"""The warm parent: imports what confined programs need once, and forks each of them, confined, from itself.

``python -P -m onboarding.sandbox.zygote CONTROL_FD PARENT_PID MARK MODULE...``. Importing torch takes 1.3 s of CPU
time, a fork some milliseconds. This process starts from a clean environment, runs none but our own code, holds no
secret, no candidate and no result, and never touches CUDA; each fork serves one program, once. The fork puts itself
into its own user, mount, process, network and ipc namespaces and gives up every privilege (``launcher.py``) before
the program's first line runs, so that what lives beside it (this process, other forks) is out of its sight and reach.

A module may define ``prepare()``, which is called once it is imported, for what it would otherwise import late.

Requests come over the control socket, one message each: the launcher's configuration as JSON, with ``module``, and
descriptors: status pipe, stdout, stderr, then the program's own, whose numbers are its first arguments. On the status
pipe the fork says its process id and, at the end, the exit status; when nobody reads it any more the fork ends with
everything in it.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import socket
import sys
import traceback
from importlib.abc import InspectLoader
from types import ModuleType
from typing import Any, NoReturn

from onboarding.sandbox import launcher

MESSAGE_BYTES = 1 << 18
MOST_DESCRIPTORS = 16
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


def main(arguments: list[str]) -> None:
    """Serve requests until the client closes the socket or dies."""
    control_fd, parent, modules = int(arguments[0]), int(arguments[1]), arguments[3:]
    launcher.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks report by their status pipe and need no burial
    for name in modules:
        getattr(importlib.import_module(name), "prepare", lambda: None)()
    gc.collect()
    gc.freeze()  # the collector would otherwise touch, and so copy, every page that is shared with the forks
    launcher.prctl(PR_SET_DUMPABLE, 0)  # its memory is nobody's to read or write, whatever else may fail
    with socket.socket(fileno=control_fd) as control:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, MOST_DESCRIPTORS)
            if not message:
                return
            if os.fork() == 0:
                control.close()
                serve(json.loads(message), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def serve(config: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Be the outermost process of one confined program."""
    code = 125
    try:
        os.setsid()
        status, stdout, stderr, *own = descriptors
        os.write(status, f"{os.getpid()}\n".encode())
        launcher.prctl(PR_SET_DUMPABLE, 1)  # the maps of a user namespace are written through /proc/self
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for source, target in ((stdout, 1), (stderr, 2)):
            os.dup2(source, target)
            os.close(source)
        config["fds"] = own
        code = launcher.confined(config, become, lifeline=status)
        os.write(status, f"{code}\n".encode())
    except BrokenPipeError:
        pass
    except OSError as failure:
        os.write(2, f"sandbox: {failure}\n".encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def become(config: dict[str, Any]) -> None:
    """Run the module as ``python -m`` would, in the environment that it was promised; never returns."""
    os.environ.clear()
    os.environ.update(config["env"])
    sys.argv = [config["module"], *map(str, config["fds"]), *config["arguments"]]
    code = 1
    try:
        run(config["module"])
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def run(name: str) -> None:
    """Execute a module (of a package: its ``__main__``) as ``__main__``, imported before or not."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or not isinstance(spec.loader, InspectLoader):
        raise ModuleNotFoundError(f"no module named {name}")
    program = ModuleType("__main__")
    program.__file__, program.__spec__, program.__package__ = spec.origin, spec, spec.parent
    sys.modules["__main__"] = program
    code = spec.loader.get_code(spec.name)
    assert code is not None  # a module of this project has source
    exec(code, program.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
