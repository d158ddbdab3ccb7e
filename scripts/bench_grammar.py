"""What grammars cost: `.venv/bin/python scripts/bench_grammar.py --help`.

The same batch is run with and without grammars, in turns, since the load of a shared machine changes by the second.
Some requests are free, and others are ruled by a grammar in every second run; all get the same number of tokens. Told
are the medians, over the turns, of the ratios of the times between tokens, and the ratios of the shortest: of those who
are free in both, and of those who are ruled in one.

`strings` allows an array of any JSON strings. Those of `counted` have 4,000 characters at least, each of which is a
state of the grammar of its own; so it is with `text`, sentences of words by a regex, whose masks take longer. `records`
has many forced tokens.
"""

from __future__ import annotations

import argparse

from bench.grammar_mix import GRAMMARS, Mix

from quire.frontend import LLM


def parse_mix(text: str) -> tuple[int, int]:
    """`4+2`: four free requests and two ruled ones."""
    free, ruled = text.split("+")
    return int(free), int(ruled)


def main() -> None:
    """Prints all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder with a tokenizer; the demo model by default")
    parser.add_argument("--grammars", nargs="+", choices=GRAMMARS, default=list(GRAMMARS))
    parser.add_argument(
        "--mixes", type=parse_mix, nargs="+", default=[(0, 1), (7, 1), (4, 4), (24, 8)], metavar="FREE+RULED"
    )
    parser.add_argument("--tokens", type=int, default=200, help="of each request (default 200)")
    parser.add_argument("--turns", type=int, default=15, help="that count, of each mix (default 15)")
    parser.add_argument(
        "--stolen", type=float, default=0.005, help="CPU time that others may have in one that counts (default 0.005)"
    )
    parser.add_argument("--attempts", type=int, default=4, help="at each turn (default 4)")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, preload_grammars=True, max_model_len=arguments.tokens + 16)
    mixes = [
        Mix(llm, grammar, free, ruled, arguments.tokens)
        for grammar in arguments.grammars
        for free, ruled in arguments.mixes
    ]
    try:
        for _ in range(arguments.turns * arguments.attempts):
            for mix in mixes:
                if mix.num_turns < arguments.turns:
                    mix.turn(arguments.stolen)
    finally:
        for mix in mixes:
            print(mix.report())
        llm.close()


if __name__ == "__main__":
    main()
