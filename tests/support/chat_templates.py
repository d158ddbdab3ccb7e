"""Chat templates like those of well-known models, reduced to tools and thinking."""

from __future__ import annotations

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" + (tool | tojson) }}
    {%- endfor %}
    {{- "\\n</tools>\\nAnswer:\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n</tool_call>" }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (message.role == "system" and loop.first and tools) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

QWEN_THINKING = (
    QWEN.replace("'\\n' + message.content }}", "'\\n' + message.content.split('</think>')[-1] }}")
    + """\
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""
)

LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + (message.content | tojson) + "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("only one tool call at once") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' + (tool_call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and value}.' }}
    {{- tools | tojson }}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

BAR = "\N{FULLWIDTH VERTICAL LINE}"
DEEPSEEK = (
    """\
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message['tool_calls'] %}
            {{- '<call>' + call['function']['name'] + '\\n' + call['function']['arguments'] + '\\n</call>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content.split('</think>')[-1] }}
    {%- endif %}
{%- endfor %}
"""
    "{%- if add_generation_prompt %}{{ '<" + BAR + "Assistant" + BAR + ">' }}{% endif %}"
)

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "

GRANITE = """\
{%- if tools %}
    {{- '<|start_of_role|>system<|end_of_role|>Answer with <|tool_call|> and a list of calls.<|end_of_text|>\\n' }}
    {{- '<|start_of_role|>tools<|end_of_role|>' + (tools | tojson) + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_of_role|>assistant<|end_of_role|>' }}
    {%- if thinking %}{{- 'Write after Here is my thought process: and Here is my response:' }}{%- endif %}
{%- endif %}
"""

COHERE = """\
{%- if tools %}
    {{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + (tools | tojson) + ' Think between <|START_THINKING|> and ' }}
    {{- '<|END_THINKING|>, call between <|START_ACTION|> and <|END_ACTION|>.<|END_OF_TURN_TOKEN|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
{%- endif %}
"""

PHI4_MINI = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + message.content }}
    {%- if loop.first and tools %}{{- '<|tool|>' + (tools | tojson) + '<|/tool|>' }}{%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

GLM4 = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\n' + (tools | tojson) }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|observation|>\\n' + message.content }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<|assistant|>' + call.function.name + '\\n' + (call.function.arguments | tojson) }}
        {%- endfor %}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
