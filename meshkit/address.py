"""Addresses of the mesh: `unix:/run/v4mesh/scheduler.sock`, `127.0.0.1:50051`, and the checks before listening.

A unix socket lies in a folder that only its owner may enter (0700). Plain TCP beyond loopback is refused unless the
operator says `insecure = true`. A busy address is a `PortError` that names who holds it, found before any weight loads.
"""

import errno
import ipaddress
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from meshkit.errors import ConfigError, PermError, PortError

MAX_UNIX_PATH: Final = 107  # bytes of sun_path without its end mark


@dataclass(frozen=True, slots=True)
class Address:
    """Either `path` (a unix socket) or `host` and `port` (TCP)."""

    host: str = ""
    port: int = 0
    path: Path | None = None

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"{_bracket(self.host)}:{self.port}"

    @property
    def is_local(self) -> bool:
        """True for unix sockets and loopback."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> Address:
    """`unix:PATH`, `HOST:PORT`, `[V6]:PORT`; anything else is a ConfigError that shows these forms."""
    if text.startswith("unix:"):
        path = Path(re.sub("^/+", "/", text.removeprefix("unix:"))).absolute()
        if len(bytes(path)) > MAX_UNIX_PATH:
            raise ConfigError(f"{text}: a socket path has at most {MAX_UNIX_PATH} bytes; choose a shorter folder")
        return Address(path=path)
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"{text!r} is no address: write unix:/folder/name.sock or host:port")
    return Address(host.strip("[]"), int(port))


def prepare_listen(address: Address, *, insecure: bool = False) -> None:
    """Make sure that this process may listen here: folder mode, stale sockets, busy ports, trust."""
    if address.path is not None:
        _prepare_socket(address.path)
        return
    check_trust(address, insecure=insecure)
    check_port(address)


def check_trust(address: Address, *, insecure: bool) -> None:
    """ConfigError for plain TCP beyond this host, unless an operator wants that."""
    if not (address.is_local or insecure):
        raise ConfigError(
            f"{address} is reachable from other hosts and plain TCP has no protection: listen on 127.0.0.1 or a unix "
            "socket, or set insecure = true"
        )


def check_port(address: Address) -> None:
    """PortError if someone listens on this TCP address, naming who; port 0 is always free."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                owner = _owner_of(address.port)
                raise PortError(f"{address} is in use{owner}. --port 0 picks a free one") from error
            raise PortError(f"cannot listen on {address}: {error.strerror}") from error


def _prepare_socket(path: Path) -> None:
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(f"{folder} has mode {mode:04o}, sockets need a private folder: chmod 700 {folder}")
        if not path.exists():
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()  # left behind by a process that was killed
                return
            pid = int.from_bytes(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
            raise PortError(f"unix:{path} is in use{_describe(pid)}. Stop it, or choose another run folder")
    except PermissionError as error:
        raise PermError(f"cannot use {path}: {error.strerror}") from error


def _owner_of(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            bound = connection.laddr[1] if connection.laddr else 0
            if connection.status == psutil.CONN_LISTEN and bound == port and connection.pid:
                return _describe(connection.pid)
    except psutil.Error:
        pass  # seeing other users' sockets may be forbidden: the address alone must do
    return ""


def _describe(pid: int) -> str:
    try:
        return f" by pid {pid} ({' '.join(psutil.Process(pid).cmdline())[:80]})"
    except psutil.Error:
        return f" by pid {pid}"


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
