"""The life of a server: listen, start the engine, serve, drain, stop."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from jpaged.config import EngineConfig
from jpaged.engine.async_llm import AsyncLLM
from jpaged.errors import ConfigError
from jpaged.serving.inference_service import InferenceService
from jpaged.serving.prometheus import PrometheusObserver
from jpaged.v1 import inference_pb2, inference_pb2_grpc

logger = logging.getLogger(__name__)
SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
LAST_STATUS_SECONDS = 1.0  # for telling clients that their requests were ended


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where and how to listen.

    Attributes:
        host, port: port 0 takes a free one, which the log names.
        model_name: what clients may call the model.
        max_queued_requests: requests that may wait for a row before more are refused.
        max_message_bytes: of a request; larger ones are refused with RESOURCE_EXHAUSTED.
        keepalive_seconds: how often an idle connection is probed.
        drain_seconds: how long accepted requests may go on after SIGTERM.
        pinned_prefixes: texts that are pinned before the server is ready, by name.
        metrics_port: Prometheus metrics over HTTP on the same host; `None` for none, 0 for a free port.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    model_name: str = ""
    max_queued_requests: int = 1024
    max_message_bytes: int = 16 << 20
    keepalive_seconds: float = 60.0
    drain_seconds: float = 30.0
    metrics_port: int | None = None
    pinned_prefixes: dict[str, str] = field(default_factory=dict[str, str])


class Server:
    """One gRPC server and its engine. `run` is its whole life."""

    def __init__(self, engine_config: EngineConfig, config: ServerConfig) -> None:
        self._engine_config = engine_config
        self._config = config
        self._service = InferenceService(config.model_name or engine_config.model)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises:
            ConfigError: the port is taken, or the engine's configuration does not work.
            ModelError: the model cannot be loaded.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        server = self._make_server()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.start()
        try:
            await self._serve()
        finally:
            await server.stop(grace=0)
            # Calls without an end, such as the health service's Watch, hear of it by themselves; grpc logs an error for
            # those that the end of the event loop reaches first.
            if calls := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(calls, timeout=LAST_STATUS_SECONDS)

    def _make_server(self) -> grpc.aio.Server:
        config = self._config
        server = grpc.aio.server(
            interceptors=[_RefuseMalformed()],
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.keepalive_time_ms", int(config.keepalive_seconds * 1000)),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
                ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind the same port
            ],
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        address = f"{config.host}:{config.port}"
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error}; is the port in use? choose another --port"
            ) from error
        logger.info("listening on %s:%d", config.host, port)
        return server

    async def _serve(self) -> None:
        observer = PrometheusObserver()
        llm = await self._start_engine(observer)
        if llm is None:
            return
        try:
            metrics = self._start_metrics(observer, llm)
            for name, text in self._config.pinned_prefixes.items():
                logger.info("pinned %d tokens of %s", await llm.pin_prefix(name, text), name)
            self._service.open(llm)
            await self._set_health(health_pb2.HealthCheckResponse.SERVING)
            logger.info("ready after %.1f s", llm.stats().ready_seconds)
            await self._stop.wait()
            await self._drain(llm)
            if metrics is not None:
                await asyncio.to_thread(metrics.shutdown)
        finally:
            await asyncio.to_thread(llm.close)

    async def _start_engine(self, observer: PrometheusObserver) -> AsyncLLM | None:
        """Return the engine, or `None` if the server was told to stop meanwhile."""

        def report(what: str, done: int, total: int) -> None:
            if self._stop.is_set():
                raise _StoppedWhileStarting
            if total:
                logger.info("compiled %s (%d of %d)", what, done, total)
            else:
                logger.info("%s", what)

        starting = asyncio.create_task(
            asyncio.to_thread(
                AsyncLLM,
                self._engine_config.model,
                max_queued_requests=self._config.max_queued_requests,
                observer=observer,
                report=report,
                **self._engine_config.options(),
            )
        )
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if self._stop.is_set():
            logger.info("told to stop while starting")
            with suppress(_StoppedWhileStarting):
                (await starting).close()
            return None
        stopping.cancel()
        return starting.result()

    def _start_metrics(self, observer: PrometheusObserver, llm: AsyncLLM):
        port = self._config.metrics_port
        if port is None:
            return None
        observer.watch(llm.stats)
        try:
            metrics, _ = start_http_server(port, self._config.host, registry=observer.registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {self._config.host}:{port}: {error}; choose another --metrics-port"
            ) from error
        logger.info("metrics on http://%s:%d/metrics", self._config.host, metrics.server_port)
        return metrics

    async def _drain(self, llm: AsyncLLM) -> None:
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        logger.info("draining for at most %.0f s", self._config.drain_seconds)
        if await self._service.drain(self._config.drain_seconds):
            logger.info("drained")
        else:
            logger.warning("the drain time is over; ending what is left")
            await asyncio.to_thread(llm.close)
            await self._service.drain(LAST_STATUS_SECONDS)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)


class _StoppedWhileStarting(Exception):
    """Ends a start between two of its programs."""


class _RefuseMalformed(grpc.aio.ServerInterceptor):
    """Answers bytes that are no message with INVALID_ARGUMENT; grpc itself takes them for a bug of the server."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(f"/{SERVICE_NAME}/"):  # type: ignore[attr-defined]
            return handler

        async def parse(data: bytes, context: grpc.aio.ServicerContext) -> Any:
            try:
                return handler.request_deserializer(data)
            except DecodeError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is no valid message: {error}")

        async def answer(data: bytes, context: grpc.aio.ServicerContext) -> Any:
            return await handler.unary_unary(await parse(data, context), context)

        async def stream(data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with aclosing(handler.unary_stream(await parse(data, context), context)) as responses:
                async for response in responses:
                    yield response

        serializer = handler.response_serializer
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, None, serializer)
        return grpc.unary_unary_rpc_method_handler(answer, None, serializer)
