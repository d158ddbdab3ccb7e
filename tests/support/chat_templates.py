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

PHI4_MINI_PUBLISHED = """\
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + message['content'] }}
    {%- if message['role'] == 'system' and 'tools' in message %}
        {{- '<|tool|>' + message['tools'] + '<|/tool|>' }}
    {%- endif %}
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

GPT_OSS = """\
{{- "<|start|>system<|message|>Reasoning: " + (reasoning_effort or "medium") + "\\n\\n# Valid channels: analysis, " }}
{{- "commentary, final.<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set instructions = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if instructions or tools %}
    {{- "<|start|>developer<|message|># Instructions\\n\\n" + (instructions or "") }}
    {%- if tools %}{{- "\\n\\nnamespace functions {" + (tools | tojson) + "}" }}{%- endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == "assistant" and "tool_calls" in message %}
        {%- set later = namespace(answer=false) %}
        {%- for other in messages[loop.index:] if other.role == "assistant" and "tool_calls" not in other %}
            {%- set later.answer = true %}
        {%- endfor %}
        {%- if message.content and message.thinking %}
            {{- raise_exception("either content or thinking") }}
        {%- elif message.thinking and not later.answer %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
        {{- (call.arguments | tojson) + "<|call|>" }}
        {%- set last.name = call.name %}
    {%- elif message.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}
        {{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- (message.content | tojson) + "<|end|>" }}
    {%- else %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""

_DEEPSEEK_MESSAGES = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|tool_output_begin|>' + message.content + '<|tool_output_end|>' }}
    {%- elif message.tool_calls %}
        {{- 'OPENING' + (message.content or '') + '<|tool_calls_begin|>' }}
        {%- for call in message.tool_calls %}
            {{- CALL }}
        {%- endfor %}
        {{- '<|tool_calls_end|><|end_of_sentence|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|Assistant|>' + message.content.split('</think>')[-1] + '<|end_of_sentence|>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content }}
    {%- endif %}
{%- endfor %}
"""


def _deepseek(head: str, call: str, tail: str, opening: str = "<|Assistant|>") -> str:
    """Return a template whose marks have the characters that DeepSeek's have."""
    source = head + _DEEPSEEK_MESSAGES.replace("CALL", call).replace("OPENING", opening) + tail
    for mark in ("tool_calls", "tool_call", "tool_sep", "tool_output"):
        for part in ("_begin|>", "_end|>", "|>"):
            source = source.replace(f"<|{mark}{part}", f"<|{mark}{part}".replace("_", "\N{LOWER ONE EIGHTH BLOCK}"))
    return source.replace("<|", "<" + BAR).replace("|>", BAR + ">")


_TOOLS = "{%- if tools %}{{- 'Tools: ' + (tools | tojson) }}{% endif %}"
_FENCED = """'<|tool_call_begin|>function<|tool_sep|>' + call.function.name + '\\n```json\\n'
            + (call.function.arguments | tojson) + '\\n```<|tool_call_end|>' + ('' if loop.last else '\\n')"""
DEEPSEEK_V3 = _deepseek(
    _TOOLS,
    _FENCED,
    "{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{% endif %}",
).replace(".split('</think>')[-1]", "")
DEEPSEEK_R1 = _deepseek(
    _TOOLS,
    _FENCED,
    "{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{% endif %}",
)
DEEPSEEK_V31 = _deepseek(
    "{%- if not thinking is defined %}{% set thinking = false %}{% endif %}" + _TOOLS,
    "'<|tool_call_begin|>' + call.function.name + '<|tool_sep|>' + (call.function.arguments | tojson) "
    "+ '<|tool_call_end|>'",
    "{%- if add_generation_prompt and messages[-1].role == 'user' %}"
    "{{- '<|Assistant|>' + ('<think>' if thinking else '</think>') }}{% endif %}",
    "<|Assistant|></think>",
)

QWEN3_CODER = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' + (tools | tojson) + '</tools>\\nReply in the format:\\n<tool_call>\\n' }}
    {{- '<function=NAME>\\n<parameter=KEY>\\nvalue\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- ('\\n' if message.content or not loop.first else '') }}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<parameter=' + key + '>\\n' + (value | string if value is not mapping else value | tojson) }}
            {{- '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls if call.id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endfor %}
        CALLS
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL_LIST = _MISTRAL.replace(
    "CALLS",
    """{{- '[TOOL_CALLS][' }}{% for call in message.tool_calls %}{{- (call.function | tojson)[:-1] }}\
{{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}{% endfor %}{{- ']' }}""",
)
MISTRAL = _MISTRAL.replace(
    "CALLS",
    """{%- for call in message.tool_calls %}{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}\
{{- call.function.arguments | tojson }}{% endfor %}""",
)

SMOLLM3 = """\
{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}
{%- if xml_tools %}
    {{- '<|im_start|>system\\n<tools>\\n' + (xml_tools | string) + '\\n</tools>\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else "" %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
    {%- if message.role == 'assistant' and not enable_thinking %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('' if enable_thinking else '<think>\\n\\n</think>\\n') }}
{%- endif %}
"""

OLMO3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\nOutput calls within <function_calls></function_calls> XML tags.' }}
    {{- '<functions>' + (tools | tojson) + '</functions><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- ('\\n' if message.content and loop.first else '') + ('<function_calls>\\n' if loop.first else '') }}
        {{- call.function.name + '(' }}
        {%- for key, value in call.function.arguments | items %}
            {{- key + '=' + (value | tojson) + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ')\\n' + ('</function_calls>' if loop.last else '') }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

GLM45 = """\
[gMASK]<sop>
{%- if tools %}
    {{- '<|system|>\\n<tools>' + (tools | tojson) + '</tools>\\nReply in the format:\\n<tool_call>NAME\\n' }}
    {{- '<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + (message.content or '') }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + call.function.name + '\\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
            {{- (value if value is string else value | tojson) + '</arg_value>\\n' }}
        {%- endfor %}
        {{- '</tool_call>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""

_IN_TAGS = """\
{%- if tools %}
    {{- '<s>system\\n<tools>' + (tools | tojson) + '</tools>\\nReply in the format:\\nTAG\\nOPEN' + 'NAMEEND' }}
    {{- '\\nPARAMETER' + 'KEYEND' + 'value</parameter>\\nCLOSE\\nTAG_END</s>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<s>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\nTAG\\nOPEN' + call.function.name + 'END\\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- 'PARAMETER' + key + 'END' + (value if value is string else value | tojson) + '</parameter>\\n' }}
        {%- endfor %}
        {{- 'CLOSE\\nTAG_END' }}
    {%- endfor %}
    {{- '</s>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<s>assistant\\n' }}{%- endif %}
"""


def _in_tags(tag: str, opening: str, close: str, parameter: str, end: str) -> str:
    names = {"TAG_END": f"</{tag}>", "TAG": f"<{tag}>", "OPEN": opening, "CLOSE": close, "PARAMETER": parameter}
    source = _IN_TAGS
    for name, text in names.items():
        source = source.replace(name, text)
    return source.replace("END", end)


SEED_OSS = _in_tags("seed:tool_call", "<function=", "</function>", "<parameter=", ">")
MINIMAX_M2 = _in_tags("minimax:tool_call", '<invoke name="', "</invoke>", '<parameter name="', '">')

MINIMAX_M2_PUBLISHED = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1] %}
        {{- ']~b]ai\\n' + content + '[e~[\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- ']~b]tool' }}{%- endif %}
        {{- '\\n<response>' + message.content + '</response>' }}
    {%- elif message.role == 'user' %}
        {{- ']~b]user\\n' + message.content + '[e~[\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}
"""

ERNIE45_THINKING = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<response>\\n' + message.content.split('</think>')[-1] }}
        {{- '\\n</response>\\n<|im_end|>\\n\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\\n<tool_output>' + message.content + '</tool_output><|im_end|>\\n\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""

LFM2 = """\
{%- if tools %}
    {{- '<|im_start|>system\\nList of tools: ' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else message.content | tojson %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LFM25 = """\
{%- macro written(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}{%- for item in content -%}{{ item.text }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\\nList of tools: ' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + written(message.content) }}
    {%- for call in message.tool_calls or [] %}
        {{- ('<|tool_call_start|>[' if loop.first else ', ') + call.function.name + '(' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- key + '=' + ("'" + value + "'" if value is string else value | string) + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ')' + (']<|tool_call_end|>' if loop.last else '') }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

GEMMA4 = """\
{%- macro written(value) -%}
    {%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
    {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
    {%- elif value is mapping -%}
        {{ '{' }}
        {%- for key, each in value | dictsort -%}
            {{ key + ':' + written(each) + ('' if loop.last else ',') }}
        {%- endfor -%}
        {{ '}' }}
    {%- else -%}{{ value }}
    {%- endif -%}
{%- endmacro -%}
{%- if enable_thinking or tools %}
    {{- '<|turn>system\\n' + ('<|think|>\\n' if enable_thinking else '') }}
    {%- for tool in tools or [] %}
        {{- '<|tool>declaration:' + tool.function.name + '{' + written(tool.function.parameters) + '}<tool|>' }}
    {%- endfor %}
    {{- '<turn|>\\n' }}
{%- endif %}
{%- for message in messages if message.role != 'tool' %}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- if message.reasoning_content and message.tool_calls %}
        {{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<|tool_call>call:' + call.function.name + written(call.function.arguments) + '<tool_call|>' }}
    {%- endfor %}
    {%- if message.content %}{{- message.content }}{%- endif %}
    {{- '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn>model\\n' + ('' if enable_thinking else '<|channel>thought\\n<channel|>') }}
{%- endif %}
"""

APERTUS = """\
{%- set tool_calls_token = '<|tools_prefix|>' %}
{{- '<|developer_start|>Deliberation: ' + ('enabled' if enable_thinking else 'disabled') + '\\n' }}
{{- (tools | tojson if tools else '') + '<|developer_end|>' }}
{%- for message in messages %}
    {%- if message.content is mapping %}
        {%- for block in message.content.blocks %}
            {{- '<|inner_prefix|>' + block.text + '<|inner_suffix|>' }}
            {%- for call in block.calls or [] %}
                {{- tool_calls_token + '[{"' + call.name + '": ' + call.arguments + '}]<|tools_suffix|>' }}
            {%- endfor %}
        {%- endfor %}
    {%- else %}
        {{- '<|' + message.role + '_start|>' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- (tool_calls_token + '[' if loop.first else ', ') }}
            {{- '{"' + call.function.name + '": ' + call.function.arguments | tojson + '}' }}
            {{- (']<|tools_suffix|>' if loop.last else '') }}
        {%- endfor %}
        {{- '<|' + message.role + '_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant_start|>' }}{%- endif %}
"""

_LISTED = """\
{%- if tools %}
    {{- 'OPENING{"name": "tool_name1", "arguments": "tool_args1"}, ...]CLOSING ' + (tools | tojson) }}
{%- endif %}
{%- for message in messages %}
    {{- 'END' if message.role == 'assistant' else '<' + message.role + '>' }}
    {{- (message.content or '').split('</think>')[-1] }}
    {%- for call in message.tool_calls or [] %}
        {{- ('OPENING' if loop.first else ', ') + '{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}' + (']CLOSING' if loop.last else '') }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'END' + ('<think></think>' if enable_thinking is defined and not enable_thinking else '') }}
{%- endif %}
"""
NEMOTRON_NANO_V2 = (
    _LISTED.replace("OPENING", "<TOOLCALL>[")
    .replace("CLOSING", "</TOOLCALL>")
    .replace("END", "<SPECIAL_11>Assistant\\n")
)
HUNYUAN_A13B = (
    _LISTED.replace("OPENING", "<tool_calls>[").replace("CLOSING", "</tool_calls>").replace("END", "<|extra_0|>")
)
