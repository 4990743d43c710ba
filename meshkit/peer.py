"""Why a peer cannot be reached, step by step: name, socket, connection. For log lines and the PEER refusal."""

import asyncio
import socket

from meshkit.address import parse_address

STEP_S = 2.0


async def diagnose(target: str) -> str:
    """`scheduler:50051: name resolves, TCP refused`: the steps that work, and the first that does not."""
    address = parse_address(target)
    if address.path is not None:
        return f"{target}: {await _unix(str(address.path))}"
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(STEP_S):
            await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as error:
        return f"{target}: name does not resolve ({_short(error)})"
    try:
        async with asyncio.timeout(STEP_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except (OSError, TimeoutError) as error:
        return f"{target}: name resolves, TCP fails ({_short(error)})"
    writer.close()
    return f"{target}: name resolves, TCP ok, no answer on the stream"


async def _unix(path: str) -> str:
    try:
        async with asyncio.timeout(STEP_S):
            _, writer = await asyncio.open_unix_connection(path)
    except FileNotFoundError:
        return "there is no such socket; is that service started, with this address?"
    except PermissionError:
        return "the socket belongs to somebody else"
    except ConnectionRefusedError:
        return "the socket is there, nobody listens; that service has died"
    except (OSError, TimeoutError) as error:
        return f"the socket fails ({_short(error)})"
    writer.close()
    return "the socket answers, the stream does not open"


def _short(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
