"""LiteLLM, LangChain, OpenAI's agents and Pydantic AI, unmodified, against a mesh.

`python outside_clients.py URL NAME`: runs one check, prints what it saw as JSON, fails by exception. Run by
test_outside_clients.py in an environment of its own.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

MODEL = "v4-nano"
QUESTION = "What is the weather in Paris in celsius?"
STORY = "Tell me a story about a fox and a lamp."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
    "required": ["city", "unit"],
}
FUNCTION = {"name": "get_weather", "description": "Get the weather of a city", "parameters": SCHEMA}
RESULT = json.dumps({"temp": 17, "sky": "windy"})
WANTED = {"city": "Paris", "unit": "celsius"}


def litellm_round(provider: str) -> Callable[[str], dict[str, Any]]:
    """Chat, stream and a round with a tool through one of LiteLLM's providers."""

    def check(url: str) -> dict[str, Any]:
        import litellm

        base = url if provider in ("deepseek", "anthropic") else f"{url}/v1"
        options: dict[str, Any] = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none"}
        options |= {"max_tokens": 80, "temperature": 0}
        asked = [{"role": "user", "content": STORY}]
        whole = litellm.completion(messages=asked, **options)
        pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(
            messages=asked, stream=True, **options)]  # fmt: skip
        assert "".join(pieces) == whole.choices[0].message.content
        tools = [{"type": "function", "function": FUNCTION}]
        question = {"role": "user", "content": QUESTION}
        first = litellm.completion(messages=[question], tools=tools, **options).choices[0]
        assert first.finish_reason == "tool_calls"
        (call,) = first.message.tool_calls
        assert json.loads(call.function.arguments) == WANTED
        result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
        second = litellm.completion(messages=[question, first.message.model_dump(), result], tools=tools, **options)
        return {"story": whole.choices[0].message.content, "answer": second.choices[0].message.content}

    return check


def litellm_responses(url: str) -> dict[str, Any]:
    import litellm

    options = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "max_output_tokens": 60}
    whole = litellm.responses(input=STORY, temperature=0, **options)
    text = ""
    for event in litellm.responses(input=STORY, temperature=0, stream=True, **options):
        if str(getattr(event.type, "value", event.type)) == "response.output_text.delta":
            text += event.delta
    said = next(item for item in whole.output if item.type == "message").content[0].text
    assert text == said
    return {"story": text}


def langchain_round(kind: str) -> Callable[[str], dict[str, Any]]:
    """Invoke, stream and a round with a tool through LangChain."""

    def check(url: str) -> dict[str, Any]:
        from langchain_core.messages import HumanMessage, ToolMessage

        model = _langchain(kind, url)
        whole = model.invoke(STORY)
        streamed = list(model.stream(STORY))
        assert "".join(part.text for part in streamed) == whole.text
        assert whole.usage_metadata["output_tokens"] > 0
        bound = model.bind_tools([{"type": "function", "function": FUNCTION}])
        question = HumanMessage(QUESTION)
        first = bound.invoke([question])
        (call,) = first.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", WANTED)
        gathered = None
        for part in bound.stream([question]):
            gathered = part if gathered is None else gathered + part
        assert [c["args"] for c in gathered.tool_calls] == [WANTED]
        second = bound.invoke([question, first, ToolMessage(RESULT, tool_call_id=call["id"])])
        return {"story": whole.text, "answer": second.text}

    return check


def _langchain(kind: str, url: str) -> Any:
    if kind == "anthropic":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model="claude-any-model", base_url=url, api_key="none", max_tokens=80, temperature=0)
    from langchain_openai import ChatOpenAI

    responses = kind == "responses"
    return ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=80, temperature=0, use_responses_api=responses
    )


def openai_agents(url: str) -> dict[str, Any]:
    """A run with a tool, whole and streamed, through Responses and through chat."""
    import asyncio

    import agents
    from openai import AsyncOpenAI

    @agents.function_tool
    def get_weather(city: str, unit: str) -> str:
        """Get the weather of a city"""
        return RESULT

    async def run() -> list[str]:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        answers = []
        for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
            agent = agents.Agent(
                name="A",
                model=kind(model=MODEL, openai_client=client),
                tools=[get_weather],
                model_settings=agents.ModelSettings(temperature=0, max_tokens=80),
            )
            answers.append((await agents.Runner.run(agent, QUESTION)).final_output)
            streamed = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in streamed.stream_events():
                pass
            answers.append(streamed.final_output)
        return answers

    agents.set_tracing_disabled(True)
    answers = asyncio.run(run())
    assert len(set(answers)) == 1, answers
    return {"answer": answers[0]}


def pydantic_ai(url: str) -> dict[str, Any]:
    """A run with a tool through each of the three dialects."""
    import anthropic
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    other = AnthropicProvider(anthropic_client=anthropic.AsyncAnthropic(base_url=url, api_key="none"))
    models = (
        OpenAIChatModel(MODEL, provider=provider),
        OpenAIResponsesModel(MODEL, provider=provider),
        AnthropicModel("claude-any-model", provider=other),
    )

    def get_weather(city: str, unit: str) -> str:
        """Get the weather of a city"""
        return RESULT

    settings: Any = {"temperature": 0, "max_tokens": 80}
    answers = [Agent(model, model_settings=settings, tools=[get_weather]).run_sync(QUESTION).output for model in models]
    assert len(set(answers)) == 1, answers
    return {"answer": answers[0]}


CHECKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "litellm hosted_vllm": litellm_round("hosted_vllm"),
    "litellm openai": litellm_round("openai"),
    "litellm deepseek": litellm_round("deepseek"),
    "litellm anthropic": litellm_round("anthropic"),
    "litellm responses": litellm_responses,
    "langchain chat": langchain_round("chat"),
    "langchain responses": langchain_round("responses"),
    "langchain anthropic": langchain_round("anthropic"),
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
}

if __name__ == "__main__":
    print(json.dumps(CHECKS[sys.argv[2]](sys.argv[1])))
