"""Small chat templates in the manner of Qwen, Llama 3 and Mistral, a tokenizer for them, and templates that are broken.

The tokenizer is of bytes with merges, so that tokens cross the words that results and templates have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

QWEN = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}<tools>
{%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}
</tools><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user' if loop.previtem.role != 'tool' }}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
{%- elif m.role != 'system' or not tools %}<|im_start|>{{ m.role ~ '\n' ~ m.content }}
{%- for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('a single call') }}{% endif %}
{%- set call = m.tool_calls[0].function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}
{%- if tools and loop.first %}{% for tool in tools %}{{ tool | tojson }}

{% endfor %}{% endif %}{{ m.content | trim }}
{%- endif %}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{{- ', ' if not loop.last }}
{%- endfor %}]</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}{{ m.content }}</s>
{%- endif %}
{%- endfor %}"""
_LIST = MISTRAL[MISTRAL.index("[TOOL_CALLS]") : MISTRAL.index("]</s>") + 1]
MISTRAL_NAMES = MISTRAL.replace(
    _LIST,
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
)
PLAIN = """\
{%- for m in messages %}<|im_start|>{{ m.role ~ '\n' ~ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NO_SYSTEM = (
    "{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
)
SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|python_tag|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
)  # fmt: skip
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that are not special, as Qwen has them."""


def schema(name: str, *parameters: str) -> dict[str, Any]:
    """Return the schema of a tool that takes texts."""
    properties = {parameter: {"type": "string", "description": f"the {parameter}"} for parameter in parameters}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"A tool to {name}.",
            "parameters": {"type": "object", "properties": properties, "required": list(parameters)},
        },
    }


SCHEMAS = (schema("calculate", "query"), schema("look_up", "query", "place"))


def chat_tokenizer(template: str | None, added: Sequence[str] = TAGS) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and a few merges, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        ['\n\n12"\n3\nuser\n assistant\n\nthe tool\n', "<|im_end|>im_start|>tool_call>"], trainer
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    )
