# SPDX-License-Identifier: Apache-2.0
"""Chat templates in the shape of those of well-known models, written for these tests: the marks and
the ways of each family, such as which roles it knows, how it shows calls, and what it leaves out.
"""

from __future__ import annotations

_TOOLS_IN_SYSTEM = (
    "{{- '\\n\\n# Tools\\n\\nFunctions within <tools></tools>:\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}"
    "{{- '\\n</tools>\\nAnswer with <tool_call>{\"name\": …, \"arguments\": …}</tool_call>' }}"
)

# Roles by name; results of tools are a user's, those that follow each other in one turn.
QWEN_2_5 = (
    """
{%- set first = messages[0] %}
{%- if tools %}
    {{- '<|im_start|>system\\n' ~ (first.content if first.role == 'system' else 'You help.') }}
    """
    + _TOOLS_IN_SYSTEM
    + """
    {{- '<|im_end|>\\n' }}
{%- elif first.role == 'system' %}
    {{- '<|im_start|>system\\n' + first.content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)  # noqa: E501 - a template's line

# The same with thoughts: those before the last question are left out, and may be within the content.
QWEN_3 = (
    """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    """
    + _TOOLS_IN_SYSTEM
    + """
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(looking=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if ns.looking and message.role == 'user' and message.content is string and not message.content.startswith('<tool_response>') %}
        {%- set ns.looking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {%- set function = call.function or call %}
            {{- '<tool_call>\\n{"name": "' ~ function.name ~ '", "arguments": ' }}
            {%- if function.arguments is string %}{{- function.arguments }}{%- else %}{{- function.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
)  # noqa: E501

# Any role in its header; one call a message, beside which no text shows; tools in the first question.
LLAMA_3 = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set told = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set told = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- told + '<|eot_id|>' }}
{%- if tools %}
    {%- if not messages %}{{- raise_exception('tools need a first question') }}{%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions, called as {"name": …, "parameters": …}:\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- messages[0].content | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role in ['ipython', 'tool'] or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""  # noqa: E501

# Turns must alternate; ids of calls have nine letters; the system's text stands in the last question.
MISTRAL = """
{%- if messages[0].role == 'system' %}
    {%- set told = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in rest %}
    {%- if not (message.role == 'tool' or message.tool_calls) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {%- if tools and message == (rest | selectattr('role', 'equalto', 'user') | list | last) %}
            {{- '[AVAILABLE_TOOLS] ' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and told is defined %}
            {{- '[INST] ' + told + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message.content + '[/INST]' }}
        {%- endif %}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' ~ message.content ~ ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('only user, assistant and tool') }}
    {%- endif %}
{%- endfor %}
"""  # noqa: E501

# A call is what has no content; arguments are joined to a text; of several system texts the last.
R1_DISTILL = """
{%- set ns = namespace(told='', in_tool=false, is_first=true) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- set ns.told = message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token ~ ns.told }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.in_tool = false %}
        {{- '<|User|>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- set ns.in_tool = false %}
        {%- for call in message['tool_calls'] %}
            {{- '<|Assistant|><|tool_calls_begin|>' if loop.first else '\\n' }}
            {{- '<|tool_call_begin|>' + call['type'] + '<|tool_sep|>' + call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```<|tool_call_end|>' }}
            {%- if loop.last %}{{- '<|tool_calls_end|>' + eos_token }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- if ns.in_tool %}
            {{- '<|tool_outputs_end|>' + message['content'] + eos_token }}
            {%- set ns.in_tool = false %}
        {%- else %}
            {{- '<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token }}
        {%- endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {{- ('\\n' if ns.in_tool else '<|tool_outputs_begin|>') + '<|tool_output_begin|>' + message['content'] + '<|tool_output_end|>' }}
        {%- set ns.in_tool = true %}
    {%- endif %}
{%- endfor %}
{%- if ns.in_tool %}{{- '<|tool_outputs_end|>' }}{%- endif %}
{%- if add_generation_prompt and not ns.in_tool %}{{- '<|Assistant|><think>\\n' }}{%- endif %}
"""  # noqa: E501

# Two templates: without tools a plain one, in which calls are nothing.
HERMES = """
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
HERMES_TOOL_USE = (
    """
{{- bos_token + '<|im_start|>system\\nYou call functions.' }}
"""
    + _TOOLS_IN_SYSTEM
    + """
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role in ['user', 'system'] or (message.role == 'assistant' and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>tool\\n' }}{%- endif %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '\\n' if not loop.last and loop.nextitem.role == 'tool' else '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)  # noqa: E501

# No tools at all; the system's text stands in the first question; turns must alternate.
GEMMA_3 = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set told = messages[0].content + '\\n\\n' %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set told = '' %}
    {%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + (told if loop.first else '') }}
    {%- if message.content is string %}
        {{- message.content | trim }}
    {%- else %}
        {%- for item in message.content %}{%- if item.type == 'text' %}{{- item.text | trim }}{%- endif %}{%- endfor %}
    {%- endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""  # noqa: E501

# Three roles by name, and nothing of any other.
PHI = """
{%- for message in messages %}
    {%- if message.role == 'system' and message.content %}
        {{- '<|system|>\\n' + message.content + '<|end|>\\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|user|>\\n' + message.content + '<|end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>\\n' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}
"""

# A developer's text is the instruction; thoughts by another name; one call a message.
GPT_OSS = """
{{- '<|start|>system<|message|>You are a model.\\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if messages[0].role in ['developer', 'system'] %}
    {%- set told = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set told = '' %}
    {%- set rest = messages %}
{%- endif %}
{%- if told or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if told %}{{- '# Instructions\\n\\n' + told + '\\n\\n' }}{%- endif %}
    {%- if tools %}
        {{- '# Tools\\n\\nnamespace functions {\\n' }}
        {%- for tool in tools %}{{- 'type ' + tool.function.name + ' = (_: ' + (tool.function.parameters | tojson) + ') => any;\\n' }}{%- endfor %}
        {{- '}' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(called=none) %}
{%- for message in rest %}
    {%- if message.role == 'assistant' %}
        {%- if 'tool_calls' in message %}
            {%- if message.content and message.thinking %}{{- raise_exception('a content or a thought beside a call') }}{%- endif %}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.content or message.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' + (call.arguments | tojson) + '<|call|>' }}
            {%- set ns.called = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
            {%- set ns.called = none %}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if ns.called is none %}{{- raise_exception('a result without a call') }}{%- endif %}
        {{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' + (message.content | tojson) + '<|end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""  # noqa: E501

# One turn each, whatever the role is called.
PLAIN = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# By name, each with the template for tools where there is one of its own.
TEMPLATES: dict[str, tuple[str, str | None]] = {
    "qwen-2.5": (QWEN_2_5, None),
    "qwen-3": (QWEN_3, None),
    "llama-3": (LLAMA_3, None),
    "mistral": (MISTRAL, None),
    "r1-distill": (R1_DISTILL, None),
    "hermes": (HERMES, HERMES_TOOL_USE),
    "gemma-3": (GEMMA_3, None),
    "phi": (PHI, None),
    "gpt-oss": (GPT_OSS, None),
    "plain": (PLAIN, None),
}
