"""Load a model, free it, and load it again."""

import json
import sys
from pathlib import Path

from vllm import LLM
from vllm.config import AttentionConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.tokenizers import get_tokenizer

tokenizer = get_tokenizer(sys.argv[1], tokenizer_mode="auto", trust_remote_code=False)
ids = tokenizer.encode("Once upon a time")
children, texts = [], []


def count_children() -> int:
    return sum(len(file.read_text().split()) for file in Path("/proc/self/task").glob("*/children"))


for config in (AttentionConfig(backend="FLASH_ATTN"), None):
    llm = LLM(model=sys.argv[1], attention_config=config, num_pages=128)
    texts.append(llm.get_tokenizer().encode("Once upon a time"))
    children.append(count_children())
    del llm
    cleanup_dist_env_and_memory()
    if config is not None:
        children.append(count_children())
print(json.dumps([texts, children, ids]))
