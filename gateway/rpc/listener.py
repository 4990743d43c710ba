"""The gateway's gRPC socket: Generation, the Open Inference Protocol, health and reflection.

Unary calls need no deadline here, unlike inside the mesh: a caller without one gets the request limit of the gateway.
"""

import asyncio
import logging
from dataclasses import replace
from typing import Final

import grpc
from grpc_reflection.v1alpha import reflection
from meshpb.oip import inference_pb2_grpc
from meshpb.v1 import generation_pb2_grpc

from gateway.access import KeyRing
from gateway.rpc import generation, inference
from gateway.rpc.entry import Entry
from gateway.service import Gateway
from meshkit.address import Address, parse_address, prepare_listen
from meshkit.channel import SERVER_OPTIONS
from meshkit.errors import PortError
from meshkit.health import Health
from meshkit.obs import Tracing

WATCH_S: Final = 0.2

log = logging.getLogger("gateway")


class RpcListener:
    """Made inside the event loop; `start`, later `stop`."""

    def __init__(self, gateway: Gateway, tracing: Tracing) -> None:
        config = gateway.config
        keys = KeyRing.read(config.api_key_file, config.admin_api_key_file)
        self._gateway = gateway
        self._health = Health()
        self._entry = Entry(gateway, keys, tracing)
        self._server: grpc.aio.Server | None = None
        self._watching: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    async def start(self, listen: str) -> Address:
        """Listen; returns the address with the real port. Raises PortError."""
        config = self._gateway.config
        address = parse_address(listen)
        options = dict(SERVER_OPTIONS)
        if config.hub or config.listen_fds:  # siblings, or a successor that starts before this process leaves
            options["grpc.so_reuseport"] = 1
        else:
            prepare_listen(address, insecure=config.insecure or config.api_key_file is not None)
        server = grpc.aio.server(options=list(options.items()))
        generation_pb2_grpc.add_GenerationServicer_to_server(generation.GenerationServicer(self._entry), server)
        inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(inference.InferenceServicer(self._entry), server)
        self._health.add_to(server)
        if config.grpc_reflection:
            names = (generation.NAME, inference.NAME, "grpc.health.v1.Health", reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        try:
            if address.path is not None:
                server.add_secure_port(str(address), grpc.local_server_credentials(grpc.LocalConnectionType.UDS))
            else:
                address = replace(address, port=server.add_insecure_port(str(address)))
        except RuntimeError as error:  # someone took it since the check
            raise PortError(f"cannot listen on {address}: {error}") from error
        await self._health.start()
        await server.start()
        self._server = server
        self._watching = asyncio.create_task(self._watch())
        log.info("gRPC on %s", address)
        return address

    def leave(self) -> None:
        """Send clients elsewhere with their next call; `stop` says how long open ones may go on."""
        if self._server is not None:
            self._leaving = asyncio.create_task(self.stop(self._gateway.limits.deadline_seconds))

    async def stop(self, grace_s: float) -> None:
        """No new calls; open ones may go on for `grace_s` seconds."""
        if self._watching is not None:
            self._watching.cancel()
        await self._health.enter_drain()
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._leaving is not None and self._leaving is not asyncio.current_task():
            await self._leaving

    async def _watch(self) -> None:
        while True:
            await self._health.set_ready(self._gateway.trouble() is None)
            await asyncio.sleep(WATCH_S)
