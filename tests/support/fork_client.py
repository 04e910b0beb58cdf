"""Runs `python ARGUMENT ...` in a fork of the process that serves a socket (`fork_server`).

    fork_client.py SOCKET PYTHON ARGUMENT ...

Ends as the program does, and passes signals on to it. What a fork cannot do, such as `-c`, the interpreter PYTHON does.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    path, python, *arguments = sys.argv[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-u", "-m")):
        os.execv(python, [python, *arguments])
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(connection, [b" "], [0, 1, 2])
    connection.sendall(json.dumps(request).encode() + b"\n")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    status = int(connection.makefile().readline())
    if status >= 0:
        os._exit(status)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), -status)


main()
