"""First token of a prompt after a restart, from disk and computed: `.venv/bin/python scripts/bench_kv_disk.py --help`.

An engine computes prompts and writes their KV pages to disk. Engines that start after it answer the same prompts from
there: with the files in the page cache of the system, and without (`--cold`, where the system lets them go); into KV
memory that was never used, which the kernel has to zero first, and into memory that was. All answers must be equal. The
rate of reads is compared with that of plain reads of the same file.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from quire.frontend import LLM, SamplingParams, TokensPrompt

_PARAMS = SamplingParams(temperature=0, max_tokens=1, logprobs=4)
_CHUNK = 4 << 20


def ask(llm: LLM, prompt: list[int]) -> tuple[float, object]:
    """Return the time to the first token, and the answer."""
    begun = time.perf_counter()
    output = llm.generate(TokensPrompt(prompt_token_ids=prompt), _PARAMS)[0]
    return time.perf_counter() - begun, output.outputs


def wait_until_written(llm: LLM, pages: int) -> None:
    """Wait until so many pages are on disk."""
    while (stats := llm.stats())["kv_disk_pages"] < pages:
        if stats["kv_disk_failures"] or stats["kv_disk_pages_skipped"]:
            raise SystemExit(f"pages could not be written: {stats}")
        time.sleep(0.05)


def fetch(llm: LLM, prompts: list[list[int]]) -> tuple[list[tuple[float, object]], tuple[float, float]]:
    """Ask for prompts that are only on disk; return the answers, and the pages and seconds that were read."""
    before = llm.stats()
    answers = [ask(llm, prompt) for prompt in prompts]
    after = llm.stats()
    llm.reset_prefix_cache()
    pages, seconds = (after[name] - before[name] for name in ("kv_disk_pages_read", "kv_disk_read_seconds"))
    return answers, (pages, seconds)


def drop_from_page_cache(path: Path) -> None:
    """Have the system forget what it has read of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_rate(path: Path, is_cold: bool) -> float:
    """Return the bytes per second of reading a file from its begin to its end."""
    if is_cold:
        drop_from_page_cache(path)
    buffer, done = bytearray(_CHUNK), 0
    with path.open("rb", buffering=0) as file:
        begun = time.perf_counter()
        while count := file.readinto(buffer):
            done += count
        return done / (time.perf_counter() - begun)


def main() -> None:
    """Print times and rates, medians over the prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder; the demo model by default")
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt (default 4096)")
    parser.add_argument("--prompts", type=int, default=3, help="different ones (default 3)")
    parser.add_argument("--folder", help="on the disk to measure; default: a temporary one")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before they are read")
    arguments = parser.parse_args()
    choose = random.Random(0)
    prompts = [[choose.randrange(1, 500) for _ in range(arguments.tokens + 1)] for _ in range(arguments.prompts)]
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="quire-kv-") as folder:
        model = [] if arguments.model is None else [arguments.model]
        options = {"num_pages": (arguments.prompts + 1) * (arguments.tokens // 32 + 2), "kv_disk": folder}
        with LLM(*model, **options, kv_disk_bytes="64GiB") as llm:
            ask(llm, prompts[0][:64])  # the first step of a process is slower
            computed = [ask(llm, prompt) for prompt in prompts]
            wait_until_written(llm, len(prompts) * (arguments.tokens // 32))
        (path,) = Path(folder).glob("*.pages")
        if arguments.cold:
            drop_from_page_cache(path)
        with LLM(*model, **options, kv_disk_bytes="64GiB") as llm:
            fetched, read = fetch(llm, prompts)
            if arguments.cold:
                drop_from_page_cache(path)
            again, read_again = fetch(llm, prompts)
        if any([answer for _, answer in each] != [answer for _, answer in computed] for each in (fetched, again)):
            raise SystemExit("the answers differ")
        page_bytes = path.stat().st_size / (len(prompts) * (arguments.tokens // 32))
        plain = statistics.median(plain_rate(path, arguments.cold) for _ in range(5)) / 1e9
    slow = statistics.median(seconds for seconds, _ in computed)
    print(f"first token of {arguments.tokens + 1} tokens: computed {slow:.2f} s; plain reads {plain:.2f} GB/s")
    for memory, answers, (pages, seconds) in (("never used", fetched, read), ("used before", again, read_again)):
        fast, rate = statistics.median(seconds for seconds, _ in answers), pages * page_bytes / seconds / 1e9
        print(
            f"from disk to KV memory that was {memory}: {fast:.3f} s ({slow / fast:.1f} times as fast), read at "
            f"{rate:.2f} GB/s ({rate / plain:.0%} of plain reads)"
        )


if __name__ == "__main__":
    main()
