"""Lines for people to copy: how curl and the official Python client talk to a mesh."""


def client_snippets(url: str, model: str) -> str:
    """A curl line and a Python program for this address and model."""
    return f"""\
# curl, streaming
curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
  "model": "{model}", "stream": true, "seed": 7,
  "messages": [{{"role": "user", "content": "Tell me a story about a fox."}}]}}'

# Python: pip install openai
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="none")
stream = client.chat.completions.create(
    model="{model}", seed=7, stream=True,
    messages=[{{"role": "user", "content": "Tell me a story about a fox."}}],
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()"""
