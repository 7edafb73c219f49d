"""The shipped model's tokenizer with chat templates that know tools, after those of Qwen, Llama 3 and Mistral."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st

from headwater_server.lm.text.language import LanguageText
from tests.app.lm.scripted import FOLDER

_TURN = "{{ '<|im_start|>' + message.role + '\\n' }}"
TEMPLATES = {
    "hermes": f"""\
{{%- if tools %}}<|im_start|>system
You may call these functions:
{{%- for tool in tools %}}
{{{{ tool | tojson }}}}
{{%- endfor %}}
Write <tool_call>{{"name": ..., "arguments": ...}}</tool_call>.<|im_end|>
{{% endif %}}
{{%- for message in messages %}}{_TURN}{{{{ message.content }}}}
{{%- for call in message.tool_calls or [] %}}
<tool_call>
{{{{ call.function | tojson }}}}
</tool_call>
{{%- endfor %}}<|im_end|>
{{% endfor %}}
{{%- if add_generation_prompt %}}<|im_start|>assistant
{{% endif %}}""",
    "llama3": f"""\
{{%- if tools %}}Respond as {{"name": function name, "parameters": dictionary of argument name and its value}}.
{{%- for tool in tools %}}
{{{{ tool | tojson }}}}
{{%- endfor %}}
{{% endif %}}
{{%- for message in messages %}}{_TURN}
{{%- if message.tool_calls %}}{{%- set call = message.tool_calls[0].function %}}
{{{{- '{{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}}' }}}}
{{%- else %}}{{{{- message.content }}}}{{%- endif %}}<|im_end|>
{{% endfor %}}
{{%- if add_generation_prompt %}}<|im_start|>assistant
{{% endif %}}""",
    "mistral": f"""\
{{%- if tools %}}[AVAILABLE_TOOLS]{{{{ tools | tojson }}}}[/AVAILABLE_TOOLS]{{% endif %}}
{{%- for message in messages %}}{_TURN}{{{{ message.content }}}}
{{%- if message.tool_calls %}}[TOOL_CALLS][
{{%- for call in message.tool_calls %}}{{{{ call.function | tojson }}}}{{{{ ", " if not loop.last }}}}{{%- endfor %}}]
{{%- endif %}}<|im_end|>
{{% endfor %}}
{{%- if add_generation_prompt %}}<|im_start|>assistant
{{% endif %}}""",
}
TEMPLATES["reasoning"] = f"""{TEMPLATES["hermes"]}
{{%- if add_generation_prompt %}}<think>
{{% if enable_thinking is false %}}
</think>

{{% endif %}}{{% endif %}}"""
TEMPLATES["unknown"] = TEMPLATES["hermes"].replace("tool_call>", "call>")
TEMPLATES["mistral_args"] = TEMPLATES["mistral"].replace("[TOOL_CALLS][", "[TOOL_CALLS][ARGS]")
MARKS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<think>", "</think>"]
VOCAB_SIZE = 4104

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 3, 7]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}


def tool_folder(folder: Path, template: str, *, has_marks: bool = False) -> Path:
    """A copy of the shipped model with this template, perhaps with special tokens for calls, but without weights."""
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    if has_marks:
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        tokenizer["added_tokens"] += [
            {**tokenizer["added_tokens"][0], "id": 4096 + n, "content": mark} for n, mark in enumerate(MARKS)
        ]
        path.write_text(json.dumps(tokenizer))
    return folder


@cache
def tool_text(template: str) -> LanguageText:
    """The tokenizer and this template."""
    with TemporaryDirectory() as folder:
        return LanguageText(tool_folder(Path(folder) / "model", template))


TOOLS: Any = [WEATHER, CLOCK]
ARGUMENTS = '{"city": "Köln", "days": 3}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
PIECES = st.lists(
    st.sampled_from(["So:\n", CALL, "<tool_call>", "</tool_call>", "\n", "é", '{"name": "clock"}', "🙂", '"', "{}"]),
    max_size=6,
).map("".join)
