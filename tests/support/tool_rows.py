"""The chat templates that TRL ships, and a row in which the assistant calls tools."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mens_exp.rows.parse import parse_row

TRL = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"


def call_of(name, **arguments):
    return {
        "id": f"{name:_<9}"[:9],
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def tool_of(name, **kinds):
    properties = {key: {"type": kind, "description": f"the {key}"} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    function = {"name": name, "description": f"Tells the {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool_of("weather", city="string", days="integer"), tool_of("clock", zone="string")]
WITH_TOOLS = parse_row(
    {
        "tools": TOOLS,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "How is it there?"},
            {"role": "assistant", "tool_calls": [call_of("weather", city='Zü"rich', days=3)]},
            {"role": "tool", "tool_call_id": "weather__", "content": '{"sky": "grey"}'},
            {"role": "assistant", "content": "It is grey."},
            {"role": "user", "content": "And how late?"},
            {"role": "assistant", "tool_calls": [call_of("clock", zone="CET")]},
            {"role": "tool", "tool_call_id": "clock____", "content": "noon"},
            {"role": "assistant", "content": "Noon."},
        ],
    },
    "rows.jsonl:1",
)
