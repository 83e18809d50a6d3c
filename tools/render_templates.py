#!/usr/bin/env python3
"""Renders chat templates as `transformers` does and writes the results, for the tests of refrain-formats.

usage: tools/render_templates.py TEMPLATE_DIR [OUTPUT]

The environment is the one of `transformers.utils.chat_template_utils`: Jinja's immutable sandbox with trimmed blocks,
loop controls, `tojson` without HTML escapes, `raise_exception` and `strftime_now`. The conversations are
written for this script. The output holds them with their renderings, and no template source.
"""

import datetime
import json
import pathlib
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

NOW = datetime.datetime(2024, 7, 26, 13, 5, 30)
SPECIALS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


def turn(role, content, **extra):
    return {"role": role, "content": content, **extra}


CALL = {"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says <how> it's outside",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the \"city\""},
                "days": {"type": "integer", "description": "How many"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
        },
    },
}

# Every conversation, with the variables for its rendering in addition to `add_generation_prompt` on and off.
CONVERSATIONS = {
    "system and user": ([turn("system", "Be brief."), turn("user", "Hello?")], {}),
    "several turns": (
        [
            turn("system", " Be kind. \n"),
            turn("user", "  One\n\n"),
            turn("assistant", "Two "),
            turn("user", "Three?"),
            turn("assistant", "Four."),
            turn("user", "Five"),
        ],
        {},
    ),
    "user first": ([turn("user", "Hi"), turn("assistant", "Hello"), turn("user", "Bye")], {}),
    "special characters": (
        [
            turn("system", "<b>&amp;</b> {{ 1 + 1 }} {% if %}"),
            turn("user", "\"quoted\" 'single' \\ back\\nslash\ttab\r\nline 🦙 é 中文 <|im_end|> \u00a0"),
        ],
        {},
    ),
    "thinking off": ([turn("system", "Short."), turn("user", "Why?")], {"enable_thinking": False}),
    "thinking on": ([turn("system", "Short."), turn("user", "Why?")], {"enable_thinking": True}),
    "earlier thinking": (
        [
            turn("system", "S"),
            turn("user", "Q1"),
            turn("assistant", "<think>\nhidden\n</think>\n\nA1"),
            turn("user", "Q2"),
            turn("assistant", "<think>\nmore\n</think>\n\nA2"),
        ],
        {},
    ),
    "wrong order": ([turn("assistant", "I begin"), turn("user", "No")], {}),
    "empty content": ([turn("system", ""), turn("user", ""), turn("assistant", ""), turn("user", "x")], {}),
    "tool call": (
        [
            turn("system", "S"),
            turn("user", "Weather?"),
            turn("assistant", "", tool_calls=[CALL]),
            turn("tool", "{\"sky\": \"grey\"}", tool_call_id="abcdef123"),
        ],
        {},
    ),
    "tools": ([turn("system", "S"), turn("user", "Weather?")], {"tools": [TOOL]}),
}

# Renderings that repeat long passages of a template's own text are not committed.
LONG_TEXT = {
    "HuggingFaceTB-SmolLM3-3B": {"user first", "wrong order", "empty content"},
    "Qwen-Qwen3-0.6B": {"tools"},
    "meta-llama-Llama-3.2-3B-Instruct": {"tools"},
}


def main():
    folder = pathlib.Path(sys.argv[1])
    default = pathlib.Path(__file__).parent.parent / "crates/refrain-formats/tests/data/chat_expected.json"
    output = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else default
    everything = "--all" in sys.argv[3:]
    env = environment()
    cases = []
    for path in sorted(folder.glob("*.jinja")):
        template = env.from_string(path.read_text(encoding="utf-8"))
        for name, (messages, variables) in CONVERSATIONS.items():
            if name in LONG_TEXT.get(path.stem, ()) and not everything:
                continue
            for add_generation_prompt in (False, True):
                given = {"tools": None, "documents": None, **SPECIALS, **variables}
                case = {
                    "template": path.name,
                    "conversation": name,
                    "add_generation_prompt": add_generation_prompt,
                }
                try:
                    case["text"] = template.render(
                        messages=messages, add_generation_prompt=add_generation_prompt, **given
                    )
                except jinja2.exceptions.TemplateError as error:
                    case["error"] = str(error)
                except TypeError as error:
                    case["error"] = ""
                cases.append(case)
    made = {
        "made_by": f"tools/render_templates.py, jinja2 {jinja2.__version__}",
        "now": int(NOW.replace(tzinfo=datetime.timezone.utc).timestamp()),
        "bos_token": SPECIALS["bos_token"],
        "eos_token": SPECIALS["eos_token"],
        "conversations": {
            name: {"messages": messages, "variables": variables}
            for name, (messages, variables) in CONVERSATIONS.items()
        },
        "cases": cases,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{len(cases)} renderings in {output}")


if __name__ == "__main__":
    main()
