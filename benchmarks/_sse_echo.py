"""What a user would build instead: FastAPI and uvicorn, one pydantic chunk object per token, written as SSE.

`python -m benchmarks._sse_echo PORT STEP_MS`. No tokenizer, no parser, no journal: tokens come from a list, one per
stream and step, so that it shows what the web framework alone costs per token.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

WORDS = [" a", " fox", " and", " the", " old", " lamp", " went", " home"]


class Delta(BaseModel):
    role: str | None = None
    content: str | None = None


class Choice(BaseModel):
    index: int
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None


class Chunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[Choice]


class Body(BaseModel):
    model: str
    messages: list[dict[str, str]]
    max_tokens: int
    stream: bool = True


def application(step_s: float) -> FastAPI:
    """One route; all streams wake at the same steps, as those of a batch do."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(body: Body) -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            created, name = int(time.time()), f"chatcmpl-{time.monotonic_ns()}"
            for number in range(body.max_tokens):
                now = time.monotonic()
                await asyncio.sleep(step_s - now % step_s)
                delta = Delta(content=WORDS[number % len(WORDS)])
                chunk = Chunk(id=name, created=created, model=body.model, choices=[Choice(index=0, delta=delta)])
                yield f"data: {chunk.model_dump_json()}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    uvicorn.run(
        application(float(sys.argv[2]) / 1e3), host="127.0.0.1", port=int(sys.argv[1]), log_level="error", loop="uvloop"
    )
