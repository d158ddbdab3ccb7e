"""Table of all targets."""

from __future__ import annotations

from fuzzing.checkpoints import Safetensors
from fuzzing.codec import Codec
from fuzzing.configs import Configs
from fuzzing.gguf_files import GgufFiles
from fuzzing.grammars import GrammarShapes
from fuzzing.pages import Pages
from fuzzing.target import Setup
from fuzzing.traces import Traces

TARGETS = {
    "codec": Setup(Codec, max_bytes=8192),
    "traces": Setup(Traces, max_bytes=8192),
    "safetensors": Setup(Safetensors, max_bytes=8192),
    "gguf": Setup(GgufFiles, max_bytes=65536),
    "configs": Setup(Configs, max_bytes=32768),
    "grammars": Setup(GrammarShapes, max_bytes=256, max_seconds=120, num_mutants=25),
    "pages": Setup(Pages, max_bytes=8192),
}
