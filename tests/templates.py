"""Chat templates in the styles that released models use, in words of our own: what differs is what they read and write.

Each has the texts of the control tokens that it writes; `TOOLS` is something to call.
"""

# ruff: noqa: E501, RUF001 - lines of templates, and the bars that a model has
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]

#: Qwen's: thinking leaves history, tool results are a user's turn, parts or text, system first or never.
QWEN = """{%- macro text_of(content) %}{%- if content is string %}{{- content }}{%- elif content is none or content is undefined %}
{%- else %}{%- for part in content %}{%- if part.type == 'text' %}{{- part.text }}{%- else %}
{{- raise_exception('Unknown part.') }}{%- endif %}{%- endfor %}{%- endif %}{%- endmacro %}
{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- text_of(messages[0].content) + '\n\n' }}{%- endif %}
{{- '<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + text_of(messages[0].content) + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last=messages | length - 1, open=true) %}
{%- for message in messages[::-1] %}{%- if ns.open and message.role == 'user' %}
{%- set ns.open = false %}{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- set content = text_of(message.content) | trim %}
{%- if message.role == 'system' %}{%- if not loop.first %}{{- raise_exception('System message must come first.') }}{%- endif %}
{%- elif message.role == 'user' %}{{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last %}{{- '<think>\n' + reasoning | trim + '\n</think>\n\n' }}{%- endif %}{{- content }}
{%- for call in message.tool_calls or [] %}{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '\n<tool_call>\n<function=' + call.name + '>\n' }}
{%- for key, value in call.arguments | items %}{{- '<parameter=' + key + '>\n' }}
{{- value if value is string else value | tojson }}{{- '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- else %}{{- raise_exception('Unexpected role.') }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '<think>\n' }}{%- endif %}"""

#: Llama's: a header with the role in it, text only, one call at a time, as JSON.
LLAMA = """{{- bos_token }}{%- for message in messages %}
{%- if message.tool_calls is defined and message.tool_calls %}{%- if message.tool_calls | length != 1 %}
{{- raise_exception('One call at a time.') }}{%- endif %}{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif message.role in ['tool', 'ipython'] %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
{%- if message.content is mapping %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

#: DeepSeek's: bars of their own, arguments as the text they came as, thinking cut off at its end tag.
DEEPSEEK = """{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}
{% set ns.system = ns.system + m['content'] %}{% endif %}{% endfor %}{{ ns.system }}{% for m in messages %}
{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% elif m['role'] == 'assistant' %}{{ '<｜Assistant｜></think>' }}
{% if m['content'] is not none and m['content'] is defined %}{% set text = m['content'] %}{% if '</think>' in text %}
{% set text = text.split('</think>')[-1] %}{% endif %}{{ text }}{% endif %}
{% for call in m['tool_calls'] or [] %}{{ '<｜tool▁call▁begin｜>' + call['function']['name'] + '\n```json\n' + call['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}
{% endfor %}{{ eos_token }}{% elif m['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>' }}{% endif %}"""

#: GLM's: observations, arguments as pairs, parts joined with nothing.
GLM = """[gMASK]<sop>{%- macro visible(c) -%}{%- if c is string -%}{{ c }}{%- elif c is iterable and c is not mapping -%}
{%- for part in c -%}{%- if part is mapping and part.type == 'text' -%}{{- part.text }}{%- elif part is string -%}{{- part }}{%- endif -%}{%- endfor -%}
{%- else -%}{{- c }}{%- endif -%}{%- endmacro -%}
{%- for m in messages %}{%- if m.role == 'user' -%}<|user|>
{{ visible(m.content) }}{%- elif m.role == 'assistant' -%}<|assistant|>{%- if m.reasoning_content is string %}
{{ '<think>' + m.reasoning_content.strip() + '</think>' }}{%- else %}
<think></think>{%- endif %}{%- if visible(m.content).strip() %}{{ '\n' + visible(m.content).strip() }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name }}{% set args = call.function.arguments %}
{% for k, v in args.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson if v is not string else v }}</arg_value>{% endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' -%}<|observation|>{{ visible(m.content) }}{%- elif m.role == 'system' -%}<|system|>
{{ visible(m.content) }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""

#: Gemma's: the assistant is called a model, system text goes into the first turn, roles alternate.
GEMMA = """{{ bos_token }}{%- if messages[0].role == 'system' -%}{%- if messages[0].content is string -%}
{%- set prefix = messages[0].content + '\n\n' -%}{%- else -%}{%- set prefix = messages[0].content[0].text + '\n\n' -%}{%- endif -%}
{%- set rest = messages[1:] -%}{%- else -%}{%- set prefix = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}
{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' + (prefix if loop.first else '') }}
{%- if message.content is string -%}{{ message.content | trim }}{%- elif message.content is iterable -%}
{%- for part in message.content -%}{%- if part.type == 'text' -%}{{ part.text | trim }}{%- endif -%}{%- endfor -%}
{%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

#: gpt-oss's: channels, thinking by that name, developer messages of their own.
HARMONY = """{%- for message in messages %}{%- if message.role in ['system', 'developer'] %}
{{- '<|start|>developer<|message|># Instructions\n\n' + message.content + '<|end|>' }}
{%- elif message.role == 'assistant' %}{%- if '<|channel|>' in (message.content or '') %}
{{- raise_exception('Channels belong to the renderer.') }}{%- endif %}
{%- if message.tool_calls %}{%- if message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- elif message.role == 'tool' %}{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
{%- else %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

#: LFM2's: ChatML whose content may be parts or JSON.
LFM = """{{- bos_token -}}{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' -}}{%- set content = message['content'] -%}
{%- if content is not string -%}{%- set content = content | tojson -%}{%- endif -%}
{%- if message['role'] == 'tool' -%}{%- set content = '<|tool_response_start|>' + content + '<|tool_response_end|>' -%}{%- endif -%}
{{- content + '<|im_end|>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

#: A picture model's: reads parts alone, and loses what is a text.
PARTS = """{%- for message in messages %}{{- '<|' + message.role + '|>' }}
{%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{- part.text }}{%- endfor %}{{- '<|end|>' }}{%- endfor %}"""

#: Falcon's older one: roles in words, nothing but a colon.
WORDS = """{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}
{{ message['role'] | capitalize + ': ' + message['content'] | replace('\r\n', '\n') | trim }}{% endfor %}
{% if add_generation_prompt %}{{ '\nAssistant:' }}{% endif %}"""

TEMPLATES = {
    "qwen": QWEN,
    "llama": LLAMA,
    "deepseek": DEEPSEEK,
    "glm": GLM,
    "gemma": GEMMA,
    "harmony": HARMONY,
    "lfm": LFM,
    "parts": PARTS,
    "words": WORDS,
}

CONTROL = {
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama": ("<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "deepseek": ("<s>", "</s>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁call▁begin｜>", "</think>"),
    "glm": ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
    "gemma": ("<s>", "<start_of_turn>", "<end_of_turn>"),
    "harmony": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
    "lfm": ("<s>", "<|im_start|>", "<|im_end|>", "<|tool_response_start|>", "<|tool_response_end|>"),
    "parts": ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    "words": ("</s>",),
}
