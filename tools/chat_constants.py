"""Cut the fixed texts of DeepSeek-V4's chat prompt out of `deepseek-recipe` renders into `chat_constants.json`.

The texts are data of the model: they are never typed by hand. Each is checked against the sha256 prefix it is known by
before the file is written. Run once per revision: `python tools/chat_constants.py [OUTPUT]`. Needs deepseek-recipe.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import deepseek_recipe

OUTPUT = Path(__file__).parents[1] / "gateway" / "text" / "chat_constants.json"
BOS = "<｜begin▁of▁sentence｜>"
USER = "<｜User｜>"
DIGESTS = {
    "effort_1": "f7a24f3b3050d4a8",
    "effort_2": "53fb31b8392ec5b4",
    "tools_head": "876d4bbdf029848a",
    "tools_tail": "690702850fe25651",
    "json_object": "34751a8fa185b076",
}


def system_part(**body: Any) -> str:
    """What a one-message request's prompt has between its first token and the user's turn."""
    request = {"model": "DeepSeek-V4-Pro", "messages": [{"role": "user", "content": "json"}], **body}
    conversation = deepseek_recipe.ChatCompletionRequest(request).convert(deepseek_recipe.ConversionOptions())
    prompt = deepseek_recipe.DeepseekV4Encoding().render_conversation(conversation.conversation).prompt
    return str(prompt.removeprefix(BOS).partition(USER)[0])


def cut() -> dict[str, str]:
    """The constants by name."""
    tool = {"type": "function", "function": {"name": "f"}}
    head, _, tail = system_part(reasoning_effort="low", tools=[tool]).partition(
        '{"name": "f", "description": "", "parameters": {}}'
    )
    off = {"thinking": {"type": "disabled"}}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    return {
        "effort_1": system_part(reasoning_effort="high"),
        "effort_2": system_part(reasoning_effort="max"),
        "tools_head": head,
        "tools_tail": tail,
        "json_object": system_part(response_format={"type": "json_object"}, **off),
        "json_schema": system_part(response_format=schema, **off).removesuffix('{"type": "object"}'),
    }


def digest(text: str) -> str:
    """First 16 hexadecimal digits of the sha256 of the UTF-8 text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> None:
    """Write the file, or stop at the first constant that is not the known one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("output", nargs="?", type=Path, default=OUTPUT)
    output: Path = parser.parse_args().output
    constants = cut()
    for name, expected in DIGESTS.items():
        if digest(constants[name]) != expected:
            raise SystemExit(f"{name}: sha256 {digest(constants[name])}, expected {expected}; nothing written")
    output.write_text(json.dumps(constants, ensure_ascii=False, indent=1) + "\n")
    for name, text in constants.items():
        print(f"{name:12} {len(text):4} characters  {digest(text)}")


if __name__ == "__main__":
    main()
